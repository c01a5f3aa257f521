//! A PF with VFs as an Endpoint behind a root port. `G` and `B` numbers: docs/conformance.md.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::convert::Infallible;

use pci_sriov::testing::{Model, Observed, Op, Target};
use pci_sriov::{Device as _, Dword, DwordWrite, Effects, Outcome, Reach, ResetKind, Rid, VfChange};

mod bare;
use bare::{Bare, Device};

const ALL_ONES: u32 = u32::MAX;
const CONTROL: u16 = 0x108;
const NUM_VFS: u16 = 0x110;
const OFFSET_STRIDE: u16 = 0x114;
/// Offset of the PCI Express capability.
const PCIE: u16 = 0x40;

/// Routing of configuration requests by a root port: by bus number, and on its secondary bus only to device 0, unless
/// ARI Forwarding is enabled (`PCIe 6.2 §6.13`). Function 0 of the device behind it is the PF, on any bus.
struct Port {
    secondary: u8,
    subordinate: u8,
    ari_forwarding: bool,
    device: Device,
}

impl Port {
    fn new(total_vfs: u16) -> Self {
        let device = Bare::endpoint(Rid::from_bits(0x100), total_vfs).device;
        Self { secondary: 1, subordinate: 3, ari_forwarding: false, device }
    }

    fn forwards(&self, rid: Rid) -> bool {
        let on_secondary = rid.bus() == self.secondary && (self.ari_forwarding || rid.device() == 0);
        on_secondary || rid.bus() > self.secondary && rid.bus() <= self.subordinate
    }

    fn read(&self, rid: Rid, offset: u16) -> u32 {
        if self.forwards(rid) { self.device.config_read(rid, Dword::containing(offset)) } else { ALL_ONES }
    }

    fn write(&mut self, rid: Rid, offset: u16, value: u32) -> Effects {
        if !self.forwards(rid) {
            return Effects::NONE;
        }
        self.device.config_write(rid, Dword::containing(offset), DwordWrite::full(value)).effects
    }

    fn pf(&self) -> Rid {
        Rid::from_bus_devfn(self.secondary, 0)
    }

    /// Gives the bus another number; the device captures it with the next write (`§2.2.6.2`).
    fn renumber(&mut self, secondary: u8) {
        (self.secondary, self.subordinate) = (secondary, secondary + 2);
        let outcome = self.device.set_bus(secondary);
        assert!(outcome.reach == Reach::Device || outcome.is_none());
    }

    /// Enables ARI as Linux does: in the port, and then in the PF.
    fn enable_ari(&mut self) {
        self.ari_forwarding = true;
        assert!(self.write(self.pf(), CONTROL, 0x10).is_none());
    }

    fn enable_vfs(&mut self, num_vfs: u16) -> Effects {
        let control = self.read(self.pf(), CONTROL) & 0x10;
        let _ = self.write(self.pf(), NUM_VFS, num_vfs.into());
        self.write(self.pf(), CONTROL, control | 9)
    }

    /// The functions below the port that respond, including the PF.
    fn answering(&self) -> Vec<u16> {
        let all = 0..=u16::MAX;
        all.filter(|rid| self.read(Rid::from_bits(*rid), 8) != ALL_ONES).collect()
    }
}

/// Extended capabilities with their offsets, enumerated as software does.
fn extended(device: &Device, rid: Rid) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    let mut offset = 0x100;
    while offset != 0 {
        let head = device.config_read(rid, Dword::containing(offset));
        assert_eq!(head >> 16 & 0xf, 1, "version");
        found.push((u16::try_from(head & 0xffff).unwrap(), offset));
        offset = u16::try_from(head >> 20).unwrap();
    }
    found
}

/// G1: the chain of extended capabilities of an Endpoint.
#[test]
fn an_endpoint_has_sr_iov_ari_and_acs() {
    let mut port = Port::new(8);
    let pf = port.pf();
    assert_eq!(extended(&port.device, pf), [(0x0010, 0x100), (0x000e, 0x140), (0x000d, 0x148)]);
    assert_eq!(port.read(pf, PCIE) >> 16, 0x0002, "version 2, Device/Port Type 0");
    let _ = port.enable_vfs(8);
    let vf = Rid::from_bits(0x200);
    assert_eq!(extended(&port.device, vf), [(0x000e, 0x100), (0x000d, 0x108)]);
    assert_eq!(port.read(vf, PCIE), port.read(pf, PCIE), "VFs have the PF's type");
    assert!((0x150..0x1000).step_by(4).all(|offset| port.read(pf, offset) == 0));
}

/// B9: VFs are not in the chain of functions that ARI links.
#[test]
fn next_function_number_leads_to_no_vf() {
    let mut port = Port::new(8);
    port.enable_ari();
    let _ = port.enable_vfs(8);
    assert_eq!(port.read(port.pf(), 0x144), 0, "the PF is the last function");
    for vf in 0x101..0x109 {
        assert_eq!(port.read(Rid::from_bits(vf), 0x104), 0);
    }
}

#[test]
fn acs_and_ari_have_nothing_to_control() {
    let mut port = Port::new(1);
    let _ = port.enable_vfs(1);
    for (rid, offset) in [(0x100, 0x144), (0x100, 0x14c), (0x200, 0x104), (0x200, 0x10c)] {
        let rid = Rid::from_bits(rid);
        assert!(port.write(rid, offset, ALL_ONES).is_none());
        assert_eq!(port.read(rid, offset), 0, "{rid} {offset:#x}");
    }
}

/// G27: with and without ARI Forwarding, the port hides no VF, and only functions that do not exist are hidden.
#[test]
fn every_vf_is_reachable_with_and_without_ari_forwarding() {
    let mut port = Port::new(300);
    assert_eq!(port.enable_vfs(300).vfs, Some(VfChange::Enabled { num_vfs: 300 }));
    let expected: Vec<_> = std::iter::once(0x100).chain(0x200..0x200 + 300).collect();
    assert_eq!(port.answering(), expected, "on the buses behind the secondary one");
    let _ = port.write(port.pf(), CONTROL, 0);
    port.enable_ari();
    assert_eq!(port.enable_vfs(300).vfs, Some(VfChange::Enabled { num_vfs: 300 }));
    assert_eq!(port.answering(), (0x100..=0x100 + 300).collect::<Vec<_>>(), "directly behind the PF");
    port.ari_forwarding = false;
    let hidden: Vec<_> = (0x100..0x108).chain(0x200..=0x200 + 44).collect();
    assert_eq!(port.answering(), hidden, "a port without ARI Forwarding would hide function 8 and more");
    port.subordinate = 1;
    assert_eq!(port.answering(), (0x100..0x108).collect::<Vec<_>>(), "and all buses that are not below it");
}

/// G28: renumbering a bus moves the PF and its VFs.
#[test]
fn the_vfs_follow_their_pf_to_another_bus() {
    for ari in [false, true] {
        let mut port = Port::new(8);
        if ari {
            port.enable_ari();
        }
        let _ = port.enable_vfs(8);
        let first = if ari { 1 } else { 0x100 };
        for secondary in [1u8, 0x20, 0xf0] {
            port.renumber(secondary);
            let pf = u16::from(secondary) << 8;
            let expected: Vec<_> = std::iter::once(pf).chain(pf + first..pf + first + 8).collect();
            assert_eq!(port.answering(), expected);
            let vf = Rid::from_bits(pf + first + 5);
            let _ = port.write(vf, 4, 4);
            assert_eq!(port.read(vf, 4) & 0xffff, 4);
            let _ = port.write(vf, 4, 0);
        }
    }
}

/// G38, G39: resets of an Endpoint keep the state of its link and its port, or clear it.
#[test]
fn a_function_level_reset_keeps_the_link_and_the_hierarchy() {
    let mut port = Port::new(8);
    let pf = port.pf();
    let power_on: Vec<_> = Dword::all().map(|reg| port.device.config_read(pf, reg)).collect();
    port.enable_ari();
    for (offset, value) in [(0x50, 0x43), (0x68, 0x10), (0x70, 0x82)] {
        let _ = port.write(pf, offset, value);
    }
    let _ = port.enable_vfs(8);
    assert_eq!(port.write(pf, 0x48, 0x8000).vfs, Some(VfChange::Disabled { num_vfs: 8 }));
    let registers = [0x50, 0x68, 0x70, CONTROL, OFFSET_STRIDE].map(|offset| port.read(pf, offset));
    assert_eq!(registers, [0x0042_0043, 0, 0x82, 0x10, 0x0001_0001]);
    let _ = port.device.reset(ResetKind::Conventional);
    let after: Vec<_> = Dword::all().map(|reg| port.device.config_read(pf, reg)).collect();
    assert_eq!(after, power_on);
}

/// An endpoint in use, with and without ARI, and its model.
fn in_use(ari: bool) -> (Observed<Device>, Model) {
    let mut observed = Bare::endpoint(Rid::from_bits(0x100), 8);
    let mut model = Model::new(&mut observed.device, Rid::from_bits(0x100));
    let write = |offset, value| Op::ConfigWrite { target: Target::Pf, offset, len: 4, value };
    let ari = if ari { 0x10 } else { 0 };
    for op in [write(0x50, 0x43), write(0x70, 0x81), write(CONTROL, ari), write(NUM_VFS, 3), write(CONTROL, ari | 9)] {
        let _ = observed.apply(op);
        model.apply(op);
    }
    (observed, model)
}

/// An endpoint with one register that reads with bits inverted.
struct Liar<'a> {
    honest: &'a Device,
    offset: u16,
    bits: u32,
}

impl pci_sriov::Device for Liar<'_> {
    type Stopping = Infallible;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        let truth = self.honest.config_read(rid, reg);
        if rid == self.honest.rid() && reg.offset() == self.offset { truth ^ self.bits } else { truth }
    }

    fn config_write(&mut self, _rid: Rid, _reg: Dword, _write: DwordWrite) -> Outcome<Infallible> {
        Outcome::none()
    }

    fn mmio_read(&mut self, _window: pci_sriov::WindowId, _offset: u64, _data: &mut [u8]) {}

    fn mmio_write(&mut self, _window: pci_sriov::WindowId, _offset: u64, _data: &[u8]) -> Outcome<Infallible> {
        Outcome::none()
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.honest.may_send(rid)
    }

    fn windows(&self, out: &mut Vec<pci_sriov::Window>) {
        self.honest.windows(out);
    }

    fn reset(&mut self, _kind: ResetKind) -> Outcome<Infallible> {
        Outcome::none()
    }
}

#[test]
fn the_model_knows_an_endpoint_and_sees_its_lies() {
    for ari in [false, true] {
        let (observed, model) = in_use(ari);
        assert_eq!((observed.check(), model.compare(&observed.device, observed.device.rid())), (Ok(()), Ok(())));
        for (offset, bits) in
            [(0x50, 4), (0x50, 1 << 16), (0x68, 1), (0x70, 1), (CONTROL, 0x10), (OFFSET_STRIDE, 1), (0x144, 0x100)]
        {
            let liar = Liar { honest: &observed.device, offset, bits };
            assert!(model.compare(&liar, observed.device.rid()).is_err(), "{offset:#x} with ARI {ari}");
        }
    }
}
