//! A PF and its VFs, accessed by a guest through the topology and both ways to configuration space. `G` and `B`
//! numbers: docs/conformance.md.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::rc::Rc;

use pci_sriov::spec::ALL_ONES;
use pci_sriov::{
    ConfigPorts, ConfigTarget, Device as _, Dword, DwordWrite, Effects, Placement, ResetKind, Rid, Topology, VfChange,
    VfIndex, Window, ecam_read, ecam_write,
};

mod bare;
use bare::{Bare, Device, PF};

/// The SR-IOV capability, from the start of configuration space.
const SRIOV: u64 = 0x100;
const CONTROL: u64 = SRIOV + 8;
const NUM_VFS: u64 = SRIOV + 0x10;

/// A PF behind its own lock, as in a VMM, and the effects of its last write.
struct Target {
    device: RefCell<Device>,
    last: RefCell<Effects>,
}

struct Shared(Rc<Target>);

impl ConfigTarget for Shared {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.0.device.borrow().config_read(rid, reg)
    }

    fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite) {
        *self.0.last.borrow_mut() = self.0.device.borrow_mut().config_write(rid, reg, write).effects;
    }
}

/// A segment with one PF in slot 3.
struct Segment {
    topology: Topology<Shared>,
    pf: Rc<Target>,
}

impl Segment {
    fn new(total_vfs: u16) -> Self {
        let mut topology = Topology::new(127);
        let placement: Placement = topology.place(Some(3), total_vfs).unwrap();
        assert_eq!((placement.rid, placement.vfs.unwrap().first_vf_offset), (PF, 0xe8), "as the device has it");
        let device = RefCell::new(Bare::with_vfs(total_vfs).device);
        let pf = Rc::new(Target { device, last: RefCell::new(Effects::NONE) });
        topology.plug(placement, Shared(Rc::clone(&pf))).unwrap();
        Self { topology, pf }
    }

    fn read(&self, rid: Rid, offset: u64, len: usize) -> u32 {
        let mut data = [0; 4];
        ecam_read(&self.topology, u64::from(rid.to_bits()) << 12 | offset, &mut data[..len]);
        u32::from_le_bytes(data)
    }

    fn write(&self, rid: Rid, offset: u64, len: usize, value: u32) -> Effects {
        *self.pf.last.borrow_mut() = Effects::NONE;
        ecam_write(&self.topology, u64::from(rid.to_bits()) << 12 | offset, &value.to_le_bytes()[..len]);
        *self.pf.last.borrow()
    }

    /// Sets NumVFs, then VF Enable and VF MSE, as Linux does.
    fn enable(&self, num_vfs: u16) -> Effects {
        let _ = self.write(PF, NUM_VFS, 2, num_vfs.into());
        self.write(PF, CONTROL, 2, 9)
    }

    fn disable(&self) -> Effects {
        self.write(PF, CONTROL, 2, 0)
    }

    fn image(&self, rid: Rid) -> Vec<u32> {
        Dword::all().map(|reg| self.read(rid, reg.offset().into(), 4)).collect()
    }

    fn windows(&self) -> Vec<Window> {
        let mut out = Vec::new();
        self.pf.device.borrow().windows(&mut out);
        out
    }
}

fn vf(index: u16) -> Rid {
    Rid::from_bits(0x100 + index)
}

/// G19: VFs that do not exist, of any number.
#[test]
fn without_vf_enable_no_vf_answers() {
    let segment = Segment::new(300);
    let before = segment.image(PF);
    for index in (0..512).map(vf) {
        for (offset, len) in [(0, 4), (4, 2), (0x48, 2), (0x100, 4), (0xfff, 1)] {
            assert!(segment.write(index, offset, len, 0x8004).is_none());
            assert_eq!(segment.read(index, offset, len), ALL_ONES >> (32 - 8 * len), "{index} {offset:#x}");
        }
    }
    assert_eq!(segment.image(PF), before);
    let _ = segment.enable(300);
    assert_eq!(segment.image(vf(299)), segment.image(vf(0)), "nothing was kept of the writes");
    assert_eq!(segment.read(vf(0), 4, 2), 0);
}

/// G20, G22: routing IDs of VFs on two buses, and no response at all others.
#[test]
fn exactly_the_enabled_vfs_answer_on_the_whole_segment() {
    for num_vfs in [0, 1, 7, 256, 257, 300] {
        let segment = Segment::new(300);
        assert_eq!(segment.enable(num_vfs).vfs, Some(VfChange::Enabled { num_vfs }));
        let answering: Vec<_> =
            (0..=u16::MAX).map(Rid::from_bits).filter(|rid| segment.read(*rid, 8, 4) != ALL_ONES).collect();
        let expected: Vec<_> = std::iter::once(PF).chain((0..num_vfs).map(vf)).collect();
        assert_eq!(answering, expected);
    }
}

/// G23: the ports and ECAM at functions above 0 and devices above 0, for reads and writes.
#[test]
fn the_ports_and_ecam_reach_the_same_function_of_a_vf_bus() {
    let segment = Segment::new(256);
    let _ = segment.enable(256);
    let mut ports = ConfigPorts::default();
    for rid in (0..256).map(vf) {
        let address = 1 << 31 | u32::from(rid.to_bits()) << 8 | 4;
        ports.write(&segment.topology, 0, &address.to_le_bytes());
        ports.write(&segment.topology, 4, &[4, 0]);
        assert_eq!(segment.read(rid, 4, 2), 4, "{rid}");
        let mut data = [0; 4];
        ports.read(&segment.topology, 4, &mut data);
        assert_eq!(u32::from_le_bytes(data), segment.read(rid, 4, 4));
        let others = (0..256).map(vf).filter(|other| *other != rid);
        assert!(others.into_iter().all(|other| segment.read(other, 4, 2) == 0), "{rid} alone");
        let _ = segment.write(rid, 4, 2, 0);
        ports.read(&segment.topology, 4, &mut data);
        assert_eq!(data, [0, 0, 0x10, 0]);
    }
}

/// G24, B6: VFs in use are disabled, and other numbers of them are enabled.
#[test]
fn vfs_of_each_incarnation_are_as_new() {
    let segment = Segment::new(8);
    let _ = segment.enable(8);
    let fresh = segment.image(vf(0));
    for (num_vfs, next) in [(8, 3), (3, 8), (8, 1), (1, 8)] {
        for rid in (0..num_vfs).map(vf) {
            let _ = segment.write(rid, 4, 2, 4);
            let _ = segment.write(rid, 0x7c, 4, 0xc000_0000);
            assert_ne!(segment.image(rid), fresh);
        }
        assert_eq!(segment.disable().vfs, Some(VfChange::Disabled { num_vfs }));
        assert_eq!(segment.read(PF, NUM_VFS, 2), num_vfs.into(), "NumVFs stays");
        assert_eq!(segment.enable(next).vfs, Some(VfChange::Enabled { num_vfs: next }));
        for index in 0..8 {
            let image = segment.image(vf(index));
            assert_eq!(image == fresh, index < next, "VF {index} of {next}");
        }
    }
}

/// G26: writes of VF Enable's present value, of every width, and toggling of VF MSE.
#[test]
fn vfs_in_use_stay_as_they_are_while_control_is_written_again() {
    let segment = Segment::new(8);
    let _ = segment.enable(5);
    let _ = segment.write(vf(4), 4, 2, 4);
    let before = segment.image(vf(4));
    for (len, value) in [(1, 9), (2, 9), (4, 9), (2, 1), (4, 0xffff_0001), (1, 9), (2, 0xffff)] {
        assert_eq!(segment.write(PF, CONTROL, len, value).vfs, None);
        assert_eq!(segment.windows().len(), if value & 8 == 0 { 0 } else { 3 });
    }
    assert_eq!(segment.image(vf(4)), before);
    assert!(segment.disable().vfs.is_some());
    assert!(segment.disable().is_none(), "0 again");
}

/// G37: function level reset of a VF, as Linux does it, with others in use.
#[test]
fn a_function_level_reset_of_a_vf_changes_nothing_else() {
    let segment = Segment::new(8);
    let fresh = {
        let _ = segment.enable(8);
        segment.image(vf(0))
    };
    let _ = segment.write(PF, SRIOV + 0x2c, 4, 0x4000_0000);
    let _ = segment.write(PF, 4, 2, 6);
    for rid in (0..8).map(vf) {
        let _ = segment.write(rid, 4, 2, 4);
        let _ = segment.write(rid, 0x7c, 4, 0x8000_0000);
    }
    let (pf, sibling, windows) = (segment.image(PF), segment.image(vf(5)), segment.windows());
    let effects = segment.write(vf(4), 0x48, 2, 0x8000);
    assert_eq!((effects.reset, effects.vfs), (Some(ResetKind::Flr), None));
    assert_eq!(segment.image(vf(4)), fresh);
    assert_eq!((segment.image(PF), segment.image(vf(5)), segment.windows()), (pf, sibling, windows));
}

/// G38, G39, B7: resets of a PF after writes to all of its registers, by itself and with the system.
#[test]
fn each_reset_of_the_pf_leaves_the_image_of_power_on() {
    let power_on = Segment::new(8).image(PF);
    for flr in [false, true] {
        let segment = Segment::new(8);
        for (offset, value) in [(0x04, 0x546), (0x0c, 0x10), (0x48, 0x7fff), (0x7c, 0xc000_0000)] {
            let _ = segment.write(PF, offset, 4, value);
        }
        let _ = segment.write(PF, SRIOV + 0x20, 4, 0x10);
        for bar in 0..6 {
            let _ = segment.write(PF, 0x10 + 4 * bar, 4, 0x4567_0000);
            let _ = segment.write(PF, SRIOV + 0x24 + 4 * bar, 4, 0x1234_0000);
        }
        let _ = segment.enable(8);
        assert_ne!(segment.image(PF), power_on);
        let effects = if flr {
            segment.write(PF, 0x48, 2, 0x8000)
        } else {
            segment.pf.device.borrow_mut().reset(ResetKind::Conventional).effects
        };
        assert_eq!(effects.vfs, Some(VfChange::Disabled { num_vfs: 8 }));
        assert_eq!(segment.image(PF), power_on);
        assert!(segment.windows().is_empty());
        assert!((0..8).all(|index| segment.read(vf(index), 8, 4) == ALL_ONES));
    }
}

/// G42: a kernel that finds VFs enabled by the previous one.
#[test]
fn a_new_kernel_turns_the_vfs_off_and_finds_new_ones_later() {
    let segment = Segment::new(8);
    let _ = segment.enable(8);
    let fresh = segment.image(vf(7));
    let _ = segment.write(vf(7), 4, 2, 4);
    // Linux reads VF Enable, clears it, chooses the page size, sizes the VF BARs, and counts the buses.
    assert_eq!(segment.read(PF, CONTROL, 2) & 1, 1);
    assert_eq!(segment.disable().vfs, Some(VfChange::Disabled { num_vfs: 8 }));
    let _ = segment.write(PF, SRIOV + 0x20, 4, 1);
    for num_vfs in (0..=8).rev() {
        let _ = segment.write(PF, NUM_VFS, 2, num_vfs);
        assert_eq!(segment.read(PF, SRIOV + 0x14, 4), 0x0001_00e8);
    }
    assert_eq!(segment.enable(8).vfs, Some(VfChange::Enabled { num_vfs: 8 }));
    assert_eq!(segment.image(vf(7)), fresh);
}

/// G25: the largest number of VFs in a segment.
#[test]
fn all_vfs_of_all_buses_answer_as_soon_as_they_are_enabled() {
    let total = 127 * 256;
    let segment = Segment::new(total);
    for _ in 0..2 {
        assert_eq!(segment.enable(total).vfs, Some(VfChange::Enabled { num_vfs: total }));
        for index in [0, 255, 256, total - 1] {
            assert_eq!(segment.read(vf(index), 8, 4), 0x0200_0001);
        }
        assert_eq!(segment.read(vf(total), 8, 4), ALL_ONES);
        let _ = segment.disable();
    }
}

/// G29, B12: software that looks for VFs by their Vendor ID finds none, and they have no pin.
#[test]
fn every_vf_reads_all_ones_where_its_ids_are() {
    let segment = Segment::new(300);
    let _ = segment.enable(300);
    for rid in (0..300).map(vf) {
        assert_eq!((segment.read(rid, 0, 4), segment.read(rid, 0x3c, 4)), (ALL_ONES, 0));
        assert_ne!(segment.read(rid, 4, 4), ALL_ONES, "Linux polls Command after a function level reset");
        let _ = segment.write(rid, 0, 4, 0);
        assert_eq!(segment.read(rid, 0, 4), ALL_ONES);
    }
}

/// G15, B16: memory of each VF by its address, with VF BARs above 4 GiB.
#[test]
fn an_address_above_4_gib_belongs_to_the_vf_of_its_slice() {
    let segment = Segment::new(8);
    for (bar, high) in [(2, 0x80), (4, 0x90)] {
        let _ = segment.write(PF, SRIOV + 0x24 + 4 * bar, 4, 0xf000_0000);
        let _ = segment.write(PF, SRIOV + 0x28 + 4 * bar, 4, high);
    }
    let _ = segment.enable(5);
    let windows = segment.windows();
    let device = segment.pf.device.borrow();
    let sriov = device.sriov().unwrap();
    for (id, base, slice) in [(2, 0x80_f000_0000, 0x2000), (4, 0x90_f000_0000, 0x1000)] {
        let bar = pci_sriov::BarIndex::new(id).unwrap();
        let window = windows.iter().find(|window| window.id == pci_sriov::WindowId::VfBar(bar)).unwrap();
        assert_eq!((window.base, window.len), (base, 5 * slice));
        for index in 0..5 {
            let address = base + u64::from(index) * slice + 0x123;
            assert_eq!(sriov.locate(bar, address - window.base), Some((VfIndex(index), 0x123)));
        }
        assert_eq!(sriov.locate(bar, 5 * slice), None, "the sixth of eight is not enabled");
    }
}
