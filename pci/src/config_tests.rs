//! The header and the capability lists, for each role.
#![expect(unused_must_use, reason = "most writes here are made for the registers that they change")]

use super::*;
use crate::{Ari, EndpointShape, Link, LinkSpeed, LinkWidth, MsixStructure};

fn bar(n: u8) -> BarIndex {
    BarIndex::new(n).unwrap()
}

fn pair() -> Vec<(BarIndex, BarKind)> {
    vec![
        (bar(2), BarKind::Memory64 { size: 0x2000, prefetchable: true }),
        (bar(4), BarKind::Memory64 { size: 0x1000, prefetchable: true }),
    ]
}

fn shape(role: Role) -> ConfigShape {
    let body = vec![16, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0];
    let writable = [vec![0; 4], vec![0xff; 10]].concat();
    ConfigShape {
        identity: Identity {
            vendor: 0x1af4,
            device: 0x1041,
            revision: 1,
            class: [2, 0, 0],
            subsystem_vendor: 0x1af4,
            subsystem: 0x1041,
        },
        bars: pair(),
        role,
        port: PortType::RcIntegratedEndpoint,
        vendor: vec![VendorCapability { body, writable }],
        msix: Some(MsixShape { vectors: 4, table: (bar(4), 0), pba: (bar(4), 0x800) }),
        aer: false,
        serial_number: None,
        offsets: Vec::new(),
    }
}

fn sriov_shape() -> SriovShape {
    SriovShape {
        total_vfs: 8,
        first_vf_offset: 0xe8,
        vf_stride: 1,
        vf_device_id: 0x1041,
        bars: pair(),
        function_dependency_link: 0,
    }
}

fn space(role: Role) -> ConfigSpace {
    ConfigSpace::new(shape(role)).unwrap()
}

fn pf() -> ConfigSpace {
    space(Role::Pf(sriov_shape()))
}

fn read(space: &ConfigSpace, offset: u16) -> u32 {
    space.read(Dword::containing(offset))
}

fn write(space: &mut ConfigSpace, offset: u16, value: u32) -> Effects {
    space.write(Dword::containing(offset), DwordWrite::full(value))
}

/// Capability IDs and offsets, enumerated as software does.
fn capabilities(space: &ConfigSpace) -> Vec<(u8, u16)> {
    let mut found = Vec::new();
    let mut offset = u16::from(read(space, header::CAPABILITIES).to_le_bytes()[0]);
    while offset != 0 {
        assert!(offset >= 0x40 && offset % 4 == 0 && found.len() < 48);
        let [id, next, ..] = read(space, offset).to_le_bytes();
        found.push((id, offset));
        offset = u16::from(next);
    }
    found
}

/// Extended capability IDs, versions and offsets, enumerated as software does.
fn extended_capabilities(space: &ConfigSpace) -> Vec<(u16, u16, u16)> {
    let mut found = Vec::new();
    let mut offset = header::FIRST_EXTENDED_CAPABILITY;
    while offset != 0 && read(space, offset) != 0 {
        assert!(offset >= 0x100 && offset % 4 == 0 && found.len() < 960);
        let head = read(space, offset);
        let [a, b, ..] = head.to_le_bytes();
        let version = u16::try_from(head >> 16 & 0xf).unwrap();
        found.push((u16::from_le_bytes([a, b]), version, offset));
        offset = u16::try_from(head >> 20).unwrap();
    }
    found
}

fn windows(space: &ConfigSpace) -> Vec<Window> {
    let mut windows = Vec::new();
    space.windows(&mut windows);
    windows
}

#[test]
fn the_chain_holds_each_capability_once() {
    let ids = |role| capabilities(&space(role)).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!(ids(Role::Plain), [0x10, 0x11, 0x01, 0x09]);
    assert_eq!(ids(Role::Pf(sriov_shape())), [0x10, 0x11, 0x01, 0x09]);
    assert_eq!(ids(Role::Vf), [0x10, 0x11, 0x09]);
}

/// G1: the chain of extended capabilities.
#[test]
fn a_pf_has_sr_iov_as_its_first_and_only_extended_capability() {
    assert_eq!(extended_capabilities(&pf()), [(0x0010, 1, 0x100)]);
    assert_eq!(ConfigSpace::EXTENT, 0x1a0);
    assert!((0x140..0x1000).step_by(4).all(|offset| read(&pf(), offset) == 0), "nothing is behind it");
    assert_eq!(extended_capabilities(&space(Role::Plain)), []);
}

/// B17: offsets from the capability's start and from that of configuration space.
#[test]
fn registers_of_the_capability_and_of_the_header_are_apart() {
    for offset in (0..spec::sriov::LEN).step_by(4).filter(|offset| *offset != header::COMMAND_STATUS) {
        for (written, other) in [(offset, offset + 0x100), (offset + 0x100, offset)] {
            let mut pf = pf();
            let before = read(&pf, other);
            write(&mut pf, written, 0x0101_0101);
            assert_eq!(read(&pf, other), before, "{written:#x} is not {other:#x}");
        }
    }
    let mut pf = pf();
    write(&mut pf, header::CACHE_LINE_HEADER_TYPE, u32::MAX);
    assert_eq!(pf.sriov().map(Sriov::total_vfs), Some(8), "TotalVFs is not Header Type");
}

/// G29: Vendor ID and Device ID of a VF.
#[test]
fn a_vf_hides_its_ids() {
    assert_eq!(read(&space(Role::Vf), 0), 0xffff_ffff);
    assert_eq!(read(&pf(), 0), 0x1041_1af4);
}

/// G30: Command and Status of a VF.
#[test]
fn a_vfs_command_is_bus_master_enable() {
    let mut vf = space(Role::Vf);
    write(&mut vf, header::COMMAND_STATUS, 0xffff_ffff);
    assert_eq!(read(&vf, header::COMMAND_STATUS), 0x0010_0004);
    assert!(vf.bus_master());
    write(&mut vf, header::COMMAND_STATUS, 0);
    assert_eq!(read(&vf, header::COMMAND_STATUS), 0x0010_0000);
    assert!(!vf.bus_master());
}

/// G31, B12: registers that a VF lacks.
#[test]
fn a_vfs_header_has_no_bars_no_pin_and_no_rom() {
    let mut vf = space(Role::Vf);
    for offset in (0x0c..0x40).step_by(4).filter(|offset| !matches!(offset, 0x2c | 0x34)) {
        assert!(write(&mut vf, offset, u32::MAX).is_none());
        assert_eq!(read(&vf, offset), 0, "{offset:#x}");
    }
}

/// G32: values that a VF has from its PF.
#[test]
fn class_and_subsystem_of_a_vf_are_the_pfs() {
    for offset in [header::CLASS_REVISION, header::SUBSYSTEM] {
        assert_eq!(read(&space(Role::Vf), offset), read(&pf(), offset));
    }
    assert_eq!(read(&pf(), header::CLASS_REVISION), 0x0200_0001);
    assert_eq!(read(&pf(), header::SUBSYSTEM), 0x1041_1af4);
}

/// G33: the PCI Express capability of a VF.
#[test]
fn a_vfs_pci_express_capability_is_of_the_pfs_type_and_can_flr() {
    let vf = space(Role::Vf);
    assert_eq!(read(&vf, 0x40) >> 16, read(&pf(), 0x40) >> 16);
    assert_eq!(read(&vf, 0x40) >> 16, 0x0092);
    assert_eq!(read(&vf, 0x44), read(&pf(), 0x44));
    assert_ne!(read(&vf, 0x44) & 1 << 28, 0);
    for offset in (0x48..0x7c).step_by(4) {
        let mut vf = space(Role::Vf);
        let effects = write(&mut vf, offset, u32::MAX);
        assert_eq!((read(&vf, offset), effects.reset.is_some()), (0, offset == 0x48), "{offset:#x}");
    }
}

/// G34: capabilities that a VF must not have.
#[test]
fn a_vf_has_no_extended_capability() {
    for offset in (0x100..0x1000).step_by(4) {
        assert_eq!(read(&space(Role::Vf), offset), 0);
    }
}

/// G34: a VF interrupts by MSI-X, and lacks capabilities that only its PF may have.
#[test]
fn a_vf_has_pci_express_msi_x_and_vendor_capabilities_only() {
    let ids: Vec<_> = capabilities(&space(Role::Vf)).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, [0x10, 0x11, 0x09]);
}

#[test]
fn a_pf_is_a_single_function_device() {
    assert_eq!(read(&pf(), header::CACHE_LINE_HEADER_TYPE) >> 16, 0);
}

#[test]
fn memory_decodes_with_memory_space_enable_in_d0_only() {
    let mut pf = pf();
    write(&mut pf, header::BAR0 + 8, 0x1000_0000);
    write(&mut pf, header::BAR0 + 16, 0x2000_0000);
    assert!(windows(&pf).is_empty());
    assert!(write(&mut pf, header::COMMAND_STATUS, u32::from(command::MEMORY_SPACE)).windows);
    let bases: Vec<_> = windows(&pf).iter().map(|window| (window.id, window.base, window.len)).collect();
    assert_eq!(bases, [(WindowId::Bar(bar(2)), 0x1000_0000, 0x2000), (WindowId::Bar(bar(4)), 0x2000_0000, 0x1000)]);
    let (_, power) = capabilities(&pf)[2];
    assert!(write(&mut pf, power + 4, 3).windows);
    assert!(windows(&pf).is_empty());
    assert!(write(&mut pf, power + 4, 0).windows);
    assert_eq!(windows(&pf).len(), 2);
}

/// G18: the PF's BARs and the VF BARs.
#[test]
fn pf_and_vf_bars_do_not_depend_on_each_other() {
    let mut pf = pf();
    write(&mut pf, 0x100 + 0x24 + 8, 0x4000_0000);
    write(&mut pf, 0x110, 2);
    write(&mut pf, 0x108, 9);
    assert_eq!(read(&pf, header::BAR0 + 8), 0xc);
    assert!(windows(&pf).iter().all(|window| matches!(window.id, WindowId::VfBar(_))));
    write(&mut pf, header::BAR0 + 8, 0x1000_0000);
    assert_eq!(read(&pf, 0x12c), 0x4000_000c);
}

/// G37: function level reset of a VF.
#[test]
fn flr_of_a_vf_resets_its_registers() {
    let mut vf = space(Role::Vf);
    write(&mut vf, header::COMMAND_STATUS, 4);
    let (_, msix) = capabilities(&vf)[1];
    write(&mut vf, msix, 0x8000_0000);
    let effects = write(&mut vf, 0x48, 1 << 15);
    assert_eq!(effects.reset, Some(ResetKind::Flr));
    assert_eq!(vf, space(Role::Vf));
}

/// G38: function level reset of a PF.
#[test]
fn flr_of_a_pf_is_power_on_and_the_vfs_are_gone() {
    let mut pf = pf();
    for offset in [header::COMMAND_STATUS, header::BAR0 + 8, 0x98, 0x12c, 0x120] {
        write(&mut pf, offset, 0x0000_1001);
    }
    write(&mut pf, 0x110, 3);
    write(&mut pf, 0x108, 9);
    let (_, power) = capabilities(&pf)[2];
    write(&mut pf, power + 4, 3);
    let effects = write(&mut pf, 0x48, 1 << 15);
    assert_eq!((effects.reset, effects.vfs), (Some(ResetKind::Flr), Some(crate::VfChange::Disabled { num_vfs: 3 })));
    assert_eq!(pf, self::pf());
}

/// G43: D3hot and back.
#[test]
fn d3hot_keeps_the_vfs() {
    let mut pf = pf();
    write(&mut pf, 0x12c, 0x4000_0000);
    write(&mut pf, 0x110, 3);
    write(&mut pf, 0x108, 9);
    let before = windows(&pf);
    let (_, power) = capabilities(&pf)[2];
    let _ = write(&mut pf, power + 4, 3);
    assert!(windows(&pf).is_empty());
    let effects = write(&mut pf, power + 4, 0);
    assert_eq!((effects.vfs, effects.reset), (None, None));
    assert_eq!(windows(&pf), before);
}

#[test]
fn messages_need_bus_master_and_d0_and_each_change_is_reported() {
    let mut pf = pf();
    let (_, power) = capabilities(&pf)[2];
    let told = Effects { messages: true, queues: true, ..Effects::NONE };
    assert!(!pf.bus_master());
    assert_eq!(write(&mut pf, header::COMMAND_STATUS, u32::from(command::BUS_MASTER)), told);
    assert!(pf.bus_master());
    assert_eq!(write(&mut pf, power + 4, 3), Effects { windows: true, ..told });
    assert!(!pf.bus_master());
    assert!(write(&mut pf, power + 4, 3).is_none());
    assert_eq!(write(&mut pf, power + 4, 0), Effects { windows: true, ..told });
    assert!(pf.bus_master());
    assert!(write(&mut pf, header::COMMAND_STATUS, u32::from(command::BUS_MASTER | command::SERR)).is_none());
    assert_eq!(write(&mut pf, header::COMMAND_STATUS, 0), told);
    let mut vf = space(Role::Vf);
    assert_eq!(write(&mut vf, header::COMMAND_STATUS, 4), told);
}

#[test]
fn a_vendor_capability_is_written_where_it_may_be() {
    let mut plain = space(Role::Plain);
    let offset = plain.vendor_offset(0);
    write(&mut plain, offset, u32::MAX);
    write(&mut plain, offset + 4, u32::MAX);
    write(&mut plain, offset + 8, 0x1122_3344);
    assert_eq!(read(&plain, offset), 0x0110_0009);
    assert_eq!(read(&plain, offset + 4), 0xffff_0002);
    assert_eq!(read(&plain, offset + 8), 0x1122_3344);
    assert_eq!(plain.vendor_offset(1), 0);
}

fn refused(change: fn(&mut ConfigShape), role: Role) -> ShapeError {
    let mut shape = shape(role);
    change(&mut shape);
    ConfigSpace::new(shape).unwrap_err()
}

/// B20, B21: impossible shapes are an error when configured.
#[test]
fn shapes_that_no_function_has_are_refused() {
    assert_eq!(
        refused(|shape| shape.msix.as_mut().unwrap().vectors = 0, Role::Vf),
        ShapeError::Msix(MsixError::Vectors(0))
    );
    assert_eq!(
        refused(|shape| shape.msix.as_mut().unwrap().vectors = 2049, Role::Plain),
        ShapeError::Msix(MsixError::Vectors(2049))
    );
    let no_vfs = SriovShape { total_vfs: 0, ..sriov_shape() };
    assert_eq!(refused(|_| {}, Role::Pf(no_vfs)), ShapeError::Sriov(SriovError::NoVfs));
    assert_eq!(refused(|shape| shape.identity.vendor = 0xffff, Role::Plain), ShapeError::VendorId);
    assert!(matches!(refused(|shape| shape.bars.push((bar(3), pair()[0].1)), Role::Plain), ShapeError::Bar(_)));
}

/// G31: a VF never has BARs of its own: those in its shape are its PF's, and place its MSI-X.
#[test]
fn the_vf_bars_place_a_vfs_msi_x_and_stay_out_of_its_header() {
    let mut vf = space(Role::Vf);
    for offset in (header::BAR0..=header::BAR5).step_by(4) {
        assert!(write(&mut vf, offset, u32::MAX).is_none());
        assert_eq!(read(&vf, offset), 0);
    }
    write(&mut vf, header::COMMAND_STATUS, u32::MAX);
    assert!(windows(&vf).is_empty());
    let no_bar = ShapeError::Msix(MsixError::NoBar { structure: MsixStructure::Table, bar: bar(4) });
    assert_eq!(refused(|shape| shape.bars.clear(), Role::Vf), no_bar);
}

#[test]
fn impossible_vendor_capabilities_are_refused_with_their_number() {
    let error = refused(|shape| shape.vendor.push(VendorCapability { body: vec![], writable: vec![] }), Role::Plain);
    assert_eq!(error, ShapeError::Vendor { index: 1, error: VendorError::NoBody });
    let text = "vendor-specific capability 1: it has no body; a body begins with the length byte";
    assert_eq!(error.to_string(), text);
}

#[test]
fn a_function_without_interrupts_has_no_msi_x() {
    let mut plain = ConfigSpace::new(ConfigShape { msix: None, ..shape(Role::Plain) }).unwrap();
    let ids: Vec<_> = capabilities(&plain).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, [0x10, 0x01, 0x09]);
    assert!(plain.msix().is_none() && plain.msix_mut().is_none());
    assert!(write(&mut plain, 0x48, 1 << 15).reset.is_some());
}

#[test]
fn too_many_capabilities_are_refused() {
    let mut shape = shape(Role::Plain);
    shape.vendor = vec![shape.vendor[0].clone(); 8];
    assert_eq!(ConfigSpace::new(shape).unwrap_err(), ShapeError::Chain(ChainError::TooLong));
}

/// B9: no function follows the PF of an Endpoint, and its VFs are not in a chain.
#[test]
fn next_function_number_leads_nowhere() {
    let link = Link { speed: LinkSpeed::Gt2_5, width: LinkWidth::X1 };
    let port = PortType::Endpoint(EndpointShape { link, ari: Some(Ari { vfs: None }), acs: false });
    let far = SriovShape { first_vf_offset: 0x100, ..sriov_shape() };
    let space = |role| ConfigSpace::new(ConfigShape { port, ..shape(role) }).unwrap();
    let (pf, vf) = (space(Role::Pf(far)), space(Role::Vf));
    assert_eq!((pf.port(), vf.port()), (&port, &port));
    assert_eq!(extended_capabilities(&pf), [(0x0010, 1, 0x100), (0x000e, 1, 0x140)]);
    assert_eq!(extended_capabilities(&vf), [(0x000e, 1, 0x100)]);
    assert_eq!((read(&pf, 0x144), read(&vf, 0x104)), (0, 0));
    let hidden = Role::Pf(SriovShape { first_vf_offset: 8, ..sriov_shape() });
    let error = ConfigSpace::new(ConfigShape { port, ..shape(hidden) }).unwrap_err();
    assert!(matches!(error, ShapeError::Sriov(SriovError::Hidden { .. })));
}

#[test]
fn given_offsets_place_aer_and_serial_number() {
    let at = [(Kind::Pcie, 0xa0), (Kind::Msix, 0x70), (Kind::Power, 0x40), (Kind::Vendor(0), 0x80)];
    let extended = [(Kind::Aer, 0x100), (Kind::SerialNumber, 0x140), (Kind::Sriov, 0x160)];
    let shape = |role| ConfigShape {
        aer: true,
        serial_number: Some(0x1122_3344_5566_7788),
        offsets: [at.as_slice(), &extended].concat(),
        ..shape(role)
    };
    let mut pf = ConfigSpace::new(shape(Role::Pf(sriov_shape()))).unwrap();
    assert_eq!(extended_capabilities(&pf), [(1, 2, 0x100), (3, 1, 0x140), (0x10, 1, 0x160)]);
    assert_eq!((read(&pf, 0x144), read(&pf, 0x148)), (0x5566_7788, 0x1122_3344));
    write(&mut pf, 0x144, 0);
    write(&mut pf, 0x108, 0x10);
    assert_eq!((read(&pf, 0x144), read(&pf, 0x108)), (0x5566_7788, 0x10));
    let mut other = ConfigSpace::new(shape(Role::Pf(sriov_shape()))).unwrap();
    other.restore(&pf.save()).unwrap();
    assert_eq!(other, pf);
    let mut vf = ConfigSpace::new(shape(Role::Vf)).unwrap();
    assert_eq!(extended_capabilities(&vf), [(1, 2, 0x100), (3, 1, 0x140)]);
    assert_eq!(vf.save().aer, None);
    assert!(vf.restore(&pf.save()).is_err());
}
