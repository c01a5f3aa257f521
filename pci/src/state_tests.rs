//! Registers that a state restores, and states that are refused.

use proptest::prelude::*;

use super::*;
use crate::{
    Ari, BarIndex, BarKind, ConfigShape, Effects, EndpointShape, Identity, Link, LinkSpeed, LinkWidth, MsixShape,
    PortType, Role, SriovShape, VendorCapability, VfRouting, Window,
};

fn bar(n: u8) -> BarIndex {
    BarIndex::new(n).unwrap()
}

fn bars() -> Vec<(BarIndex, BarKind)> {
    vec![
        (bar(0), BarKind::Memory32 { size: 0x100 }),
        (bar(2), BarKind::Memory64 { size: 0x2000, prefetchable: true }),
        (bar(4), BarKind::Memory64 { size: 0x1000, prefetchable: true }),
    ]
}

fn shape(role: Role) -> ConfigShape {
    ConfigShape {
        identity: Identity {
            vendor: 0x1af4,
            device: 0x1041,
            revision: 1,
            class: [2, 0, 0],
            subsystem_vendor: 0x1af4,
            subsystem: 0x1041,
        },
        bars: bars(),
        role,
        port: PortType::RcIntegratedEndpoint,
        vendor: vec![VendorCapability { body: vec![8, 5, 0, 0, 0, 0], writable: vec![0, 0, 0xff, 0xff, 0xff, 0xff] }],
        msix: Some(MsixShape { vectors: 3, table: (bar(4), 0), pba: (bar(4), 0x800) }),
        aer: false,
        serial_number: None,
        offsets: Vec::new(),
    }
}

fn space(role: Role) -> ConfigSpace {
    ConfigSpace::new(shape(role)).unwrap()
}

fn pf() -> ConfigSpace {
    space(Role::Pf(SriovShape {
        total_vfs: 8,
        first_vf_offset: 0xe8,
        vf_stride: 1,
        vf_device_id: 0x1041,
        bars: bars(),
        function_dependency_link: 0,
    }))
}

fn write(space: &mut ConfigSpace, offset: u16, value: u32) -> Effects {
    space.write(Dword::containing(offset), DwordWrite::full(value))
}

fn windows(space: &ConfigSpace) -> Vec<Window> {
    let mut windows = Vec::new();
    space.windows(&mut windows);
    windows
}

/// A PF in use: BARs placed, memory enabled, three VFs with 8 KiB pages enabled, MSI-X enabled.
fn used() -> ConfigSpace {
    let mut pf = pf();
    for (offset, value) in [
        (0x18, 0x1000_0000),
        (0x04, 6),
        (0x120, 2),
        (0x12c, 0x4000_0000),
        (0x130, 1),
        (0x110, 3),
        (0x108, 9),
        (0x7c, 0x8000_0000),
        (0x48, 0x10),
    ] {
        let _ = write(&mut pf, offset, value);
    }
    let _ = pf.msix_mut().unwrap().table_write(16, &[4, 0, 0xe0, 0xfe, 0, 0, 0, 0]);
    let offset = pf.vendor_offset(0);
    let _ = write(&mut pf, offset + 4, 0x55aa);
    pf
}

#[test]
fn a_saved_pf_is_restored_with_its_vfs_enabled() {
    let mut restored = pf();
    restored.restore(&used().save()).unwrap();
    assert_eq!(restored, used());
    assert_eq!((restored.sriov().unwrap().num_visible(), windows(&restored)), (3, windows(&used())));
}

/// B4: NumVFs in a state without VF Enable.
#[test]
fn num_vfs_without_vf_enable_enables_nothing_and_stays_writable() {
    let mut pf = used();
    let _ = write(&mut pf, 0x108, 0);
    let mut restored = self::pf();
    restored.restore(&pf.save()).unwrap();
    assert_eq!(restored.sriov().unwrap().num_visible(), 0);
    let _ = write(&mut restored, 0x110, 5);
    assert_eq!(restored.read(Dword::containing(0x110)), 5);
}

/// B4: the lock of NumVFs after a restore.
#[test]
fn num_vfs_is_locked_again_after_a_restore_with_vf_enable() {
    let mut restored = pf();
    restored.restore(&used().save()).unwrap();
    let _ = write(&mut restored, 0x110, 5);
    assert_eq!(restored.read(Dword::containing(0x110)), 3);
}

#[test]
fn a_function_in_d3hot_is_restored_in_d3hot() {
    let mut pf = used();
    let power = pf.power_offset().unwrap();
    let _ = write(&mut pf, power + 4, 3);
    let mut restored = self::pf();
    restored.restore(&pf.save()).unwrap();
    assert_eq!(restored, pf);
    assert!(windows(&restored).is_empty());
}

#[test]
fn a_state_software_cannot_write_is_refused_and_changes_nothing() {
    let changes: [fn(&mut ConfigState); 14] = [
        |state| state.version = 2,
        |state| state.command = 1,
        |state| state.bars[2] = 0x1000_0001,
        |state| state.bars[1] = 1,
        |state| state.device_control = 1 << 15,
        |state| state.power_state = 2,
        |state| state.msix.as_mut().unwrap().control |= 1,
        |state| state.msix.as_mut().unwrap().table[0][3] = 2,
        |state| state.msix.as_mut().unwrap().table.truncate(2),
        |state| state.msix = None,
        |state| state.endpoint = Some(EndpointState::default()),
        |state| state.vendor[0][0] = 9,
        |state| state.sriov = None,
        |state| state.vendor.clear(),
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut state = used().save();
        change(&mut state);
        let mut target = pf();
        assert!(target.restore(&state).is_err(), "change {n}");
        assert_eq!(target, pf());
    }
    assert!(space(Role::Vf).restore(&used().save()).is_err());
}

#[test]
fn a_function_without_msi_x_is_saved_without_it() {
    let new = || ConfigSpace::new(ConfigShape { msix: None, ..shape(Role::Plain) }).unwrap();
    let mut plain = new();
    let _ = write(&mut plain, 0x04, 6);
    let state = plain.save();
    assert_eq!(state.msix, None);
    let mut restored = new();
    restored.restore(&state).unwrap();
    assert_eq!(restored, plain);
    let other = ConfigState { msix: Some(MsixState::default()), ..state };
    assert_eq!(new().restore(&other), Err(RestoreError::Shape("MSI-X vectors")));
}

fn endpoint() -> ConfigSpace {
    let link = Link { speed: LinkSpeed::Gt5_0, width: LinkWidth::X1 };
    let vfs = Some(VfRouting { first_vf_offset: 1, vf_stride: 1 });
    let port = PortType::Endpoint(EndpointShape { link, ari: Some(Ari { vfs }), acs: true });
    let pf = pf().sriov().unwrap().shape().clone();
    let role = Role::Pf(SriovShape { first_vf_offset: 0x100, ..pf });
    ConfigSpace::new(ConfigShape { port, ..shape(role) }).unwrap()
}

#[test]
fn an_endpoint_is_restored_with_its_link_and_ari() {
    let mut used = endpoint();
    for (offset, value) in [(0x50, 0x43), (0x68, 0x10), (0x70, 0x81), (0x110, 3), (0x108, 0x19)] {
        let _ = write(&mut used, offset, value);
    }
    let state = used.save();
    let expected = EndpointState { device_control_2: 0x10, link_control: 0x43, link_control_2: 0x81 };
    assert_eq!((state.endpoint.as_ref(), state.sriov.as_ref().unwrap().control), (Some(&expected), 0x19));
    let mut restored = endpoint();
    restored.restore(&state).unwrap();
    assert_eq!(restored, used);
    let changes: [fn(&mut ConfigState); 4] = [
        |state| state.endpoint = None,
        |state| state.endpoint.as_mut().unwrap().link_control = 4,
        |state| state.endpoint.as_mut().unwrap().device_control_2 = 1,
        |state| state.endpoint.as_mut().unwrap().link_control_2 = 0x40,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let (mut state, mut target) = (state.clone(), endpoint());
        change(&mut state);
        assert!(target.restore(&state).is_err(), "change {n}");
        assert_eq!(target, endpoint());
    }
}

/// B1: NumVFs above TotalVFs, in a state.
#[test]
fn a_state_with_more_enabled_vfs_than_exist_is_not_restored() {
    let changes: [fn(&mut SriovState); 5] = [
        |state| state.num_vfs = 9,
        |state| state.control = 0x19,
        |state| state.system_page_size = 3,
        |state| state.system_page_size = 0,
        |state| state.bars[2] |= 0x2000,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut state = used().sriov().unwrap().save();
        change(&mut state);
        let mut sriov = pf().sriov().unwrap().clone();
        let refused = sriov.restore(&state);
        // Software may set an address bit.
        assert_eq!(refused.is_err(), n != 4, "change {n}");
        assert_eq!(sriov.num_visible(), if n == 4 { 3 } else { 0 });
    }
}

fn sriov_state() -> impl Strategy<Value = SriovState> {
    let bars = prop::array::uniform6(prop_oneof![Just(0), any::<u32>(), Just(0xc), Just(0x4000_000c)]);
    (prop_oneof![0u16..16, any::<u16>()], prop_oneof![0u16..12, any::<u16>()], 0u32..13, bars)
        .prop_map(|(control, num_vfs, page, bars)| SriovState { control, num_vfs, system_page_size: 1 << page, bars })
}

proptest! {
    #[test]
    fn arbitrary_states_are_refused_or_restored_as_they_are(state in sriov_state()) {
        let mut sriov = pf().sriov().unwrap().clone();
        let fresh = sriov.clone();
        if sriov.restore(&state).is_err() {
            prop_assert_eq!(&sriov, &fresh);
        } else {
            prop_assert_eq!(sriov.save(), state);
            prop_assert!(sriov.num_visible() <= sriov.total_vfs());
        }
    }

    /// B22: all state is saved.
    #[test]
    fn any_state_that_software_reaches_is_restored(writes in prop::collection::vec((0u16..0x50, any::<u32>()), 0..60)) {
        let mut pf = pf();
        for (dword, value) in writes {
            let _ = write(&mut pf, dword * 4, value);
        }
        let mut restored = self::pf();
        restored.restore(&pf.save()).unwrap();
        prop_assert_eq!(&restored, &pf);
        prop_assert_eq!(windows(&restored), windows(&pf));
    }
}
