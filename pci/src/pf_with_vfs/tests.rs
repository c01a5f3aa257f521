//! Each rule of the composition, with functions that record what happens to them.

use super::*;
use crate::spec::power;
use crate::{
    Ari, ConfigShape, EndpointShape, Identity, Link, LinkSpeed, LinkWidth, MsixShape, MsixStructure, PortType, Role,
    VfRouting,
};

const PF: Rid = Rid::from_bits(3 << 3);
const FIRST_VF: u16 = 0x100;
const TOTAL: u16 = 4;
const BAR: BarIndex = BarIndex::ALL[2];
const SLICE: u64 = 0x1000;
const COMMAND: Dword = Dword::containing(4);
const CONTROL: Dword = Dword::containing(0x108);
const NUM_VFS: Dword = Dword::containing(0x110);

/// A recorded call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Changed { reset: Option<ResetKind>, powered: bool },
    BarRead { offset: u64 },
    BarWrite { offset: u64, powered: bool },
}

const AWAKE: Event = Event::Changed { reset: None, powered: true };
const ASLEEP: Event = Event::Changed { reset: None, powered: false };

const fn reset(kind: ResetKind) -> Event {
    Event::Changed { reset: Some(kind), powered: true }
}

/// A function that records calls, and that stops a worker, its number, when it is reset or has no power.
#[derive(Debug)]
struct Fake {
    number: u16,
    config: ConfigSpace,
    events: Vec<Event>,
}

impl Fake {
    fn new(number: u16, class: u8, role: Role) -> Self {
        let identity =
            Identity { vendor: 1, device: 2, revision: 1, class: [class, 0, 0], subsystem_vendor: 1, subsystem: 2 };
        Self::with(number, ConfigShape { bars: vec![bar()], ..ConfigShape::new(identity, role) })
    }

    fn with(number: u16, shape: ConfigShape) -> Self {
        Self { number, config: ConfigSpace::new(shape).unwrap(), events: Vec::new() }
    }
}

impl Function for Fake {
    type Stopping = u16;

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn changed(&mut self, effects: Effects, powered: bool) -> Outcome<u16> {
        if effects.is_none() {
            return Outcome::none();
        }
        self.events.push(Event::Changed { reset: effects.reset, powered });
        let stopping = if effects.reset.is_some() || !powered { vec![self.number] } else { Vec::new() };
        Outcome { stopping, ..effects.into() }
    }

    fn bar_read(&mut self, _bar: BarIndex, offset: u64, data: &mut [u8]) {
        self.events.push(Event::BarRead { offset });
        data.fill(0);
    }

    fn bar_write(&mut self, _bar: BarIndex, offset: u64, _data: &[u8], powered: bool) -> Outcome<u16> {
        self.events.push(Event::BarWrite { offset, powered });
        Effects::QUEUES.into()
    }
}

fn bar() -> (BarIndex, BarKind) {
    (BAR, BarKind::Memory64 { size: SLICE, prefetchable: true })
}

fn pf_role() -> Role {
    let vfs = VfPlacement { total_vfs: TOTAL, first_vf_offset: FIRST_VF - PF.to_bits(), vf_stride: 1 };
    Role::Pf(SriovShape::new(PF, vfs, 2, vec![bar()]))
}

fn device() -> PfWithVfs<Fake> {
    let vfs = (0..TOTAL).map(|number| Fake::new(number, 2, Role::Vf)).collect();
    PfWithVfs::new(PF, Fake::new(99, 2, pf_role()), vfs).unwrap()
}

fn vf(index: u16) -> Rid {
    Rid::from_bits(FIRST_VF + index)
}

/// Sets NumVFs, then VF Enable and VF MSE. Not recorded.
fn enabled(num_vfs: u16) -> PfWithVfs<Fake> {
    let mut device = device();
    let _ = device.config_write(PF, NUM_VFS, DwordWrite::full(num_vfs.into()));
    let outcome = device.config_write(PF, CONTROL, DwordWrite::full(9));
    assert_eq!(outcome.effects.vfs, Some(VfChange::Enabled { num_vfs }));
    assert_eq!((outcome.reach, outcome.stopping), (Reach::Device, Vec::new()), "nothing is reset");
    device.functions_mut().for_each(|function| function.events.clear());
    device
}

fn events(device: &PfWithVfs<Fake>) -> Vec<&[Event]> {
    device.vfs().iter().map(|vf| vf.events.as_slice()).collect()
}

fn set_power(device: &mut PfWithVfs<Fake>, state: u32) -> Outcome<u16> {
    let offset = device.pf().config.power_offset().unwrap();
    device.config_write(PF, Dword::containing(offset + power::CONTROL_STATUS), DwordWrite::full(state))
}

#[test]
fn functions_that_are_no_pf_with_its_vfs_are_refused() {
    let new = |pf: Role, vfs: Vec<Fake>| PfWithVfs::new(PF, Fake::new(99, 2, pf), vfs).map(drop);
    let vfs = |class: u8, last: Role| {
        let mut vfs: Vec<_> = (0..TOTAL).map(|number| Fake::new(number, class, Role::Vf)).collect();
        vfs[3] = Fake::new(3, 2, last);
        vfs
    };
    assert_eq!(new(pf_role(), vfs(2, Role::Vf)), Ok(()));
    assert_eq!(new(Role::Plain, vfs(2, Role::Vf)), Err(PfError::NotPf));
    assert_eq!(new(pf_role(), Vec::new()), Err(PfError::Count { vfs: 0, total_vfs: TOTAL }));
    assert_eq!(new(pf_role(), vfs(2, Role::Plain)), Err(PfError::NotVf(VfIndex(3))));
    assert_eq!(new(pf_role(), vfs(1, Role::Vf)), Err(PfError::Class(VfIndex(0))));
}

/// Creates a PF at `rid` with valid VFs after applying `change` to each.
fn made(
    rid: Rid,
    (total_vfs, first_vf_offset): (u16, u16),
    port: PortType,
    change: &dyn Fn(&mut ConfigShape),
) -> Result<(), PfError> {
    let identity = Identity { vendor: 1, device: 2, revision: 1, class: [2, 0, 0], subsystem_vendor: 1, subsystem: 2 };
    let placement = VfPlacement { total_vfs, first_vf_offset, vf_stride: 1 };
    let role = Role::Pf(SriovShape::new(rid, placement, 2, vec![bar()]));
    let shape = |role| ConfigShape { bars: vec![bar()], port, ..ConfigShape::new(identity, role) };
    let mut vf = shape(Role::Vf);
    change(&mut vf);
    let vfs = (0..total_vfs).map(|number| Fake::with(number, vf.clone())).collect();
    PfWithVfs::new(rid, Fake::with(99, shape(role)), vfs).map(drop)
}

fn endpoint(width: LinkWidth, ari: Option<Ari>) -> PortType {
    PortType::Endpoint(EndpointShape { link: Link { speed: LinkSpeed::Gt2_5, width }, ari, acs: false })
}

/// G33, B20: a VF is attached as its PF is.
#[test]
fn vfs_with_another_port_type_link_or_without_ari_are_refused() {
    let root = PortType::RcIntegratedEndpoint;
    let ari = Some(Ari::default());
    let (narrow, wide) = (endpoint(LinkWidth::X1, ari), endpoint(LinkWidth::X4, ari));
    let new = |pf, vf| made(Rid::from_bits(0x100), (1, 0x100), pf, &|shape| shape.port = vf);
    for (pf, vf) in [(root, narrow), (narrow, root), (narrow, wide), (narrow, endpoint(LinkWidth::X1, None))] {
        assert_eq!(new(pf, vf), Err(PfError::Port(VfIndex(0))), "{pf:?} {vf:?}");
    }
    let placed = Some(Ari { vfs: Some(VfRouting { first_vf_offset: 1, vf_stride: 1 }) });
    for (pf, vf) in [(root, root), (narrow, narrow), (narrow, endpoint(LinkWidth::X1, placed))] {
        assert_eq!(new(pf, vf), Ok(()), "{pf:?} {vf:?}");
    }
}

/// G32, B20: the identity of a VF, and the BARs in which its MSI-X lies.
#[test]
fn vfs_of_another_vendor_or_with_misplaced_msix_are_refused() {
    let new = |change: &dyn Fn(&mut ConfigShape)| made(PF, (1, 0x100), PortType::RcIntegratedEndpoint, change);
    let vendor = |shape: &mut ConfigShape| shape.identity.subsystem_vendor = 9;
    assert_eq!(new(&vendor), Err(PfError::SubsystemVendor(VfIndex(0))));
    assert_eq!(new(&|shape| shape.identity.subsystem = 9), Ok(()), "each function's own");
    // The VF's own shape has room for it, but not the PF's VF BARs.
    let msix = |bar, pba| {
        move |shape: &mut ConfigShape| {
            shape.bars = vec![(bar, BarKind::Memory64 { size: 2 * SLICE, prefetchable: true })];
            shape.msix = Some(MsixShape { vectors: 2, table: (bar, 0), pba: (bar, pba) });
        }
    };
    assert_eq!(new(&msix(BAR, 0x800)), Ok(()));
    let (structure, bar) = (MsixStructure::PendingBits, BAR);
    let past_end = MsixError::PastEnd { structure, bar, offset: 0x1000, len: 8, size: SLICE };
    assert_eq!(new(&msix(BAR, 0x1000)), Err(PfError::Msix { index: VfIndex(0), error: past_end.clone() }));
    let other = BarIndex::ALL[4];
    let no_bar = MsixError::NoBar { structure: MsixStructure::Table, bar: other };
    assert_eq!(new(&msix(other, 0x800)), Err(PfError::Msix { index: VfIndex(0), error: no_bar }));
    let text = PfError::Msix { index: VfIndex(0), error: past_end }.to_string();
    assert!(
        text.starts_with("VF 0 does not fit the VF BARs of its PF: MSI-X PBA: 0x8 bytes at offset 0x1000"),
        "{text}"
    );
}

/// B20, G27: the same VFs, with their PF at different addresses.
#[test]
fn vfs_that_wrap_or_that_the_port_above_hides_are_refused() {
    let new = |rid, offset, port| made(Rid::from_bits(rid), (2, offset), port, &|_| ());
    let root = PortType::RcIntegratedEndpoint;
    assert_eq!(new(0xfeff, 0xff, root), Ok(()), "VF 1 is ff:1f.7");
    let error = SriovError::RoutingIds { total_vfs: 2 };
    let wraps = PfError::RoutingIds { rid: Rid::from_bits(0xff00), error };
    let text = wraps.to_string();
    assert!(text.starts_with("PF at ff:00.0: 2 VFs do not fit the routing IDs of a segment; "), "{text}");
    assert_eq!(new(0xff00, 0xff, root), Err(wraps));
    // Functions 6 and 7, or 7 and 8.
    let port = endpoint(LinkWidth::X1, Some(Ari::default()));
    assert_eq!(new(0x105, 1, port), Ok(()));
    let error = SriovError::Hidden { first_vf_offset: 1, vf_stride: 1 };
    assert_eq!(new(0x106, 1, port), Err(PfError::RoutingIds { rid: Rid::from_bits(0x106), error }));
    assert_eq!(new(0x106, 1, root), Ok(()), "on a root bus there is no port above");
    let with_ari = Some(Ari { vfs: Some(VfRouting { first_vf_offset: 0xff00, vf_stride: 1 }) });
    let far = new(0x105, 1, endpoint(LinkWidth::X1, with_ari));
    assert!(matches!(far, Err(PfError::RoutingIds { error: SriovError::RoutingIds { .. }, .. })), "with ARI, too");
}

#[test]
fn another_bus_concerns_every_function() {
    let mut device = enabled(1);
    let outcome = device.set_bus(9);
    assert_eq!((outcome.reach, outcome.effects.messages), (Reach::Device, true));
    assert_eq!(device.rid(), Rid::from_bus_devfn(9, PF.devfn()));
    assert!(device.vf(VfIndex(0)).is_some() && device.function(vf(0)).is_none());
    assert!(device.set_bus(9).is_none());
}

/// G19, G20: all routing IDs, with two of four VFs enabled.
#[test]
fn only_routing_ids_of_the_pf_and_enabled_vfs_answer() {
    let mut device = enabled(2);
    let answers = |rid: Rid| device.config_read(rid, Dword::containing(8)) != ALL_ONES;
    let answering: Vec<_> = (0..=u16::MAX).map(Rid::from_bits).filter(|rid| answers(*rid)).collect();
    assert_eq!(answering, [PF, vf(0), vf(1)]);
    assert_eq!((device.vf_index(vf(1)), device.vf_index(vf(2)), device.vf_index(PF)), (Some(VfIndex(1)), None, None));
    let outcome = device.config_write(vf(2), COMMAND, DwordWrite::full(4));
    assert!(outcome.is_none() && outcome.reach == Reach::Nothing);
    assert!(events(&device).concat().is_empty());
    let outcome = device.config_write(vf(1), COMMAND, DwordWrite::full(4));
    assert_eq!((outcome.effects.messages, outcome.reach), (true, Reach::Function(vf(1))));
    assert_eq!(device.vf(VfIndex(1)).unwrap().events, [AWAKE]);
}

/// G15: the slices of three of four VFs.
#[test]
fn each_slice_of_a_window_is_the_vfs_whose_turn_it_is() {
    let mut device = enabled(3);
    let window = WindowId::VfBar(BAR);
    let mut data = [0xaa];
    for index in 0..3 {
        let outcome = device.mmio_write(window, u64::from(index) * SLICE + 8, &[1]);
        assert_eq!((outcome.effects, outcome.reach), (Effects::QUEUES, Reach::Function(vf(index))));
        device.mmio_read(window, u64::from(index) * SLICE + 12, &mut data);
        assert_eq!(data, [0]);
        let expected = [Event::BarWrite { offset: 8, powered: true }, Event::BarRead { offset: 12 }];
        assert_eq!(device.vf(VfIndex(index)).unwrap().events, expected);
    }
    assert!(device.mmio_write(window, 3 * SLICE, &[1]).is_none());
    device.mmio_read(window, 3 * SLICE, &mut data);
    assert_eq!(data, [0xff], "the fourth of four is not enabled");
    let outcome = device.mmio_write(WindowId::Bar(BAR), 8, &[1]);
    assert_eq!((outcome.effects, outcome.reach), (Effects::QUEUES, Reach::Function(PF)));
    assert_eq!(device.pf().events, [Event::BarWrite { offset: 8, powered: true }]);
}

/// G16: VF Enable, VF MSE and the PF's power.
#[test]
fn nothing_is_in_a_window_that_is_not_decoded() {
    for (control, asleep) in [(0, 0), (1, 0), (8, 0), (9, 3)] {
        let mut device = enabled(2);
        let _ = device.config_write(PF, CONTROL, DwordWrite::full(control));
        let _ = set_power(&mut device, asleep);
        device.functions_mut().for_each(|function| function.events.clear());
        let mut data = [0];
        device.mmio_read(WindowId::VfBar(BAR), 0, &mut data);
        assert!(device.mmio_write(WindowId::VfBar(BAR), 0, &[1]).is_none());
        assert_eq!((data, events(&device).concat()), ([0xff], Vec::new()), "Control {control}, D{asleep}");
    }
}

/// G24: the VFs that clearing VF Enable resets.
#[test]
fn vfs_that_are_disabled_are_reset_and_no_others() {
    let mut device = enabled(3);
    let outcome = device.config_write(PF, CONTROL, DwordWrite::full(0));
    assert_eq!(outcome.effects.vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert_eq!((outcome.reach, outcome.stopping), (Reach::Device, vec![0, 1, 2]));
    let once = [reset(ResetKind::Conventional)];
    let once = once.as_slice();
    assert_eq!(events(&device), [once, once, once, &[]]);
}

/// G24, G43: VF Enable is cleared while the PF is in D3hot.
#[test]
fn vfs_that_are_disabled_in_d3hot_are_reset_without_power() {
    let mut device = enabled(1);
    let _ = set_power(&mut device, 3);
    let _ = device.config_write(PF, CONTROL, DwordWrite::full(0));
    let gone = Event::Changed { reset: Some(ResetKind::Conventional), powered: false };
    assert_eq!(events(&device)[0], [ASLEEP, gone]);
}

/// G15: slices begin where they are found.
#[test]
fn the_slice_of_a_vf_is_where_its_registers_are() {
    let device = enabled(3);
    for index in (0..3).map(VfIndex) {
        assert_eq!(device.locate(BAR, device.slice(BAR, index).unwrap() + 4), Some((index, 4)));
    }
    assert_eq!(device.slice(BAR, VfIndex(2)), Some(2 * SLICE));
    assert_eq!(device.slice(BarIndex::ALL[0], VfIndex(2)), None, "no such VF BAR");
    assert_eq!(device.slice(BAR, VfIndex(device.sriov().unwrap().total_vfs())), None, "no such VF");
}

/// G18, G43: conditions for the messages of each function.
#[test]
fn a_function_sends_by_its_bus_master_while_the_pf_is_in_d0() {
    let mut device = enabled(2);
    let senders = |device: &PfWithVfs<Fake>| [PF, vf(0), vf(1), vf(2), vf(9)].map(|rid| device.may_send(rid));
    assert_eq!(senders(&device), [false; 5]);
    let _ = device.config_write(vf(0), COMMAND, DwordWrite::full(4));
    assert_eq!(senders(&device), [false, true, false, false, false]);
    let _ = device.config_write(PF, COMMAND, DwordWrite::full(4));
    let _ = set_power(&mut device, 3);
    assert_eq!(senders(&device), [false; 5]);
    let _ = set_power(&mut device, 0);
    assert_eq!(senders(&device), [true, true, false, false, false]);
    let _ = device.config_write(PF, CONTROL, DwordWrite::full(0));
    assert_eq!(senders(&device), [true, false, false, false, false]);
}

/// Each refusal names the way out.
#[test]
fn a_refused_pf_or_vf_names_the_way_to_build_it() {
    let index = VfIndex(3);
    let errors = [
        (PfError::NotPf, "Role::Pf"),
        (PfError::Count { vfs: 1, total_vfs: TOTAL }, "give as many VFs as TotalVFs"),
        (PfError::NotVf(index), "Role::Vf"),
        (PfError::Class(index), "Identity::class"),
        (PfError::SubsystemVendor(index), "Identity::subsystem_vendor"),
        (PfError::Port(index), "the same PortType"),
        (PfError::Msix { index, error: MsixError::Vectors(0) }, "the bars of SriovShape"),
        (PfError::RoutingIds { rid: PF, error: SriovError::RoutingIds { total_vfs: TOTAL } }, "Topology::place"),
    ];
    for (error, way_out) in errors {
        let text = error.to_string();
        assert!(text.rsplit_once("; ").is_some_and(|(_, advice)| advice.contains(way_out)), "{text}");
    }
}

/// G38, G39: resets of the PF by the machine and by its own register.
#[test]
fn each_reset_of_the_pf_resets_its_vfs_once() {
    for kind in [ResetKind::Conventional, ResetKind::Flr] {
        let mut device = enabled(2);
        let outcome = device.reset(kind);
        assert_eq!((outcome.effects.vfs, outcome.reach), (Some(VfChange::Disabled { num_vfs: 2 }), Reach::Device));
        assert_eq!(outcome.stopping, [99, 0, 1]);
        assert_eq!(device.pf().events, [reset(kind)]);
        let outcome = device.reset(kind);
        assert_eq!((outcome.effects.vfs, outcome.stopping), (None, vec![99]), "they are gone already");
    }
    // Through its own register.
    let mut device = enabled(2);
    let control = Dword::containing(device.pf().config.pcie_offset() + 8);
    let outcome = device.config_write(PF, control, DwordWrite::full(0x8000));
    assert_eq!((outcome.reach, outcome.stopping), (Reach::Device, vec![99, 0, 1]));
    assert_eq!((outcome.effects.reset, device.num_visible()), (Some(ResetKind::Flr), 0));
}

/// G37: a VF among others.
#[test]
fn a_reset_of_a_vf_is_that_vfs_alone() {
    let mut device = enabled(3);
    let control = Dword::containing(device.vfs()[1].config.pcie_offset() + 8);
    let outcome = device.config_write(vf(1), control, DwordWrite::full(0x8000));
    assert_eq!((outcome.effects.reset, outcome.effects.vfs), (Some(ResetKind::Flr), None));
    assert_eq!((outcome.reach, outcome.stopping), (Reach::Function(vf(1)), vec![1]));
    assert_eq!((device.num_visible(), device.pf().events.len(), events(&device)[0].len()), (3, 0, 0));
}

/// G43: effects of the PF's power state on VFs.
#[test]
fn vfs_that_exist_follow_their_pf_into_d3hot_and_back() {
    let mut device = enabled(2);
    let _ = device.config_write(vf(0), COMMAND, DwordWrite::full(4));
    let before = device.config_read(vf(0), COMMAND);
    device.functions_mut().for_each(|function| function.events.clear());
    let outcome = set_power(&mut device, 3);
    assert_eq!((outcome.reach, outcome.stopping), (Reach::Device, vec![0, 1]));
    let _ = device.config_write(vf(1), COMMAND, DwordWrite::full(4));
    assert_eq!(set_power(&mut device, 3).reach, Reach::Function(PF), "it is in D3hot already");
    assert_eq!(set_power(&mut device, 0).reach, Reach::Device);
    assert_eq!(events(&device), [[ASLEEP, AWAKE].as_slice(), &[ASLEEP, ASLEEP, AWAKE], &[], &[]]);
    assert_eq!(device.config_read(vf(0), COMMAND), before);
}

/// G18: the PF's Command.
#[test]
fn the_pfs_own_enables_are_nothing_to_its_vfs() {
    let mut device = enabled(2);
    for command in [6, 0] {
        let outcome = device.config_write(PF, COMMAND, DwordWrite::full(command));
        assert_eq!((outcome.effects.queues, outcome.reach), (true, Reach::Function(PF)));
    }
    assert!(events(&device).concat().is_empty());
}

#[test]
fn a_removed_vf_reads_all_ones_until_vf_enable_is_cleared() {
    let mut device = enabled(3);
    let outcome = device.remove_vf(VfIndex(1)).unwrap();
    assert_eq!((outcome.reach, outcome.stopping), (Reach::Device, vec![1]), "it is reset");
    assert!(device.remove_vf(VfIndex(1)).is_none() && device.remove_vf(VfIndex(3)).is_none());
    let present = |device: &PfWithVfs<Fake>| [0, 1, 2].map(|index| device.config_read(vf(index), COMMAND) != ALL_ONES);
    assert_eq!(present(&device), [true, false, true]);
    assert_eq!(device.visible().map(|(index, _)| index.0).collect::<Vec<_>>(), [0, 2]);
    assert!(device.locate(BAR, SLICE).is_none() && device.locate(BAR, 2 * SLICE).is_some());
    let _ = device.config_write(PF, CONTROL, DwordWrite::full(0));
    let _ = device.config_write(PF, CONTROL, DwordWrite::full(9));
    assert_eq!(present(&device), [true; 3]);
}
