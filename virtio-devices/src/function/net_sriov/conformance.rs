//! A PF and its VFs as seen by a guest's drivers and a VMM: through windows, doorbells and messages. `G` and `B`
//! numbers: docs/conformance.md.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::NetSriov;
use crate::testing::{Driver, FakeDevice, Hosted, memory};
use crate::{Message, Signals};
use pci::spec::ALL_ONES;
use pci::{
    BarIndex, Device, Dword, Effects, Placement, Reach, ResetKind, Rid, VfChange, VfIndex, VfPlacement, WindowId,
};

type Nic = Hosted<NetSriov<FakeDevice>>;

const PF: Rid = Rid::from_bits(3 << 3);
/// The SR-IOV capability in the PF's configuration space.
const SRIOV: u64 = 0x100;
const CONTROL: u64 = SRIOV + 8;
/// Bytes of a VF's slices of VF BAR2 and VF BAR4 with pages of 4 KiB.
const SLICES: [(u8, u64); 2] = [(2, 0x2000), (4, 0x1000)];

fn nic(total_vfs: u16, new: fn(&[u16]) -> FakeDevice) -> Nic {
    let device = || new(&[256, 256, 64]);
    let vfs = VfPlacement { total_vfs, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
    let placement = Placement { segment: 0, rid: PF, vfs: Some(vfs) };
    Hosted::new(NetSriov::new(device(), (0..total_vfs).map(|_| device()).collect(), placement, &memory()).unwrap())
}

fn rid(index: u16) -> Rid {
    Rid::from_bits(0x100 + index)
}

fn pf(nic: &mut Nic) -> Driver<'_, Nic> {
    Driver::new(nic, PF)
}

fn vf(nic: &mut Nic, index: u16) -> Driver<'_, Nic> {
    Driver::of_vf(nic, rid(index), u64::from(index) * 0x2000)
}

fn enable(nic: &mut Nic, num_vfs: u16) -> Effects {
    let _ = pf(nic).config_write(SRIOV + 0x10, 2, num_vfs.into());
    pf(nic).config_write(CONTROL, 2, 9)
}

fn disable(nic: &mut Nic) -> Effects {
    pf(nic).config_write(CONTROL, 2, 0)
}

fn place(nic: &mut Nic, bar: u8, base: u64) {
    for (half, register) in [(base, 0), (base >> 32, 4)] {
        let value = u32::try_from(half & 0xffff_ffff).unwrap();
        let _ = pf(nic).config_write(SRIOV + 0x24 + 4 * u64::from(bar) + register, 4, value);
    }
}

fn join(nic: &mut Nic) -> usize {
    nic.join()
}

fn config(nic: &Nic, rid: Rid) -> Vec<u32> {
    Dword::all().map(|reg| nic.config_read(rid, reg)).collect()
}

/// The window that a VMM finds at an address, and the offset in it.
fn find(nic: &Nic, address: u64) -> Option<(WindowId, u64)> {
    let mut windows = Vec::new();
    nic.windows(&mut windows);
    let found = windows.iter().find(|window| (window.base..window.base + window.len).contains(&address))?;
    Some((found.id, address - found.base))
}

/// Reads the value at an address, as a guest does.
fn read(nic: &mut Nic, address: u64) -> u32 {
    let mut data = [0xff; 4];
    if let Some((window, offset)) = find(nic, address) {
        nic.mmio_read(window, offset, &mut data);
    }
    u32::from_le_bytes(data)
}

fn write(nic: &mut Nic, address: u64, value: u32) {
    if let Some((window, offset)) = find(nic, address) {
        let _ = nic.mmio_write(window, offset, &value.to_le_bytes());
    }
}

fn messages(nic: &Nic) -> Vec<Message> {
    let mut out = Vec::new();
    nic.messages(Reach::Device, &mut out);
    out
}

/// Enables all four vectors of VF `index` in its MSI-X table.
fn enable_msix(nic: &mut Nic, index: u16) {
    for vector in 0..4 {
        for (dword, value) in [(0, 0xfee0_0000u32), (8, vector), (12, 0)] {
            let at = u64::from(index) * 0x1000 + u64::from(vector) * 16 + dword;
            let _ = nic.mmio_write(WindowId::VfBar(BarIndex::ALL[4]), at, &value.to_le_bytes());
        }
    }
    let mut vf = vf(nic, index);
    let msix = vf.capability(0x11, |_| true).unwrap();
    let _ = vf.config_write(msix + 2, 2, 0x8000);
}

/// G15, B16: VF BARs above 4 GiB, and an access to the memory of each VF by its address.
#[test]
fn each_vf_is_reached_by_its_own_addresses_above_4_gib() {
    let mut nic = nic(8, FakeDevice::new);
    let base = 0x80_0000_0000;
    place(&mut nic, 2, base);
    place(&mut nic, 4, base + 0x10_0000);
    let _ = enable(&mut nic, 7);
    for index in 0..7u16 {
        write(&mut nic, base + u64::from(index) * 0x2000 + 0x200, 0xa0 + u32::from(index));
        write(&mut nic, base + 0x10_0000 + u64::from(index) * 0x1000 + 8, 0xb0 + u32::from(index));
    }
    for index in 0..7u16 {
        let device = nic.vf(VfIndex(index)).unwrap().device();
        assert_eq!(u16::from(device.config[0]), 0xa0 + index);
        assert_eq!(read(&mut nic, base + u64::from(index) * 0x2000 + 0x200), 0xa0 + u32::from(index));
        assert_eq!(read(&mut nic, base + 0x10_0000 + u64::from(index) * 0x1000 + 8), 0xb0 + u32::from(index));
    }
    assert_eq!(read(&mut nic, base + 7 * 0x2000 + 0x200), ALL_ONES, "VF 7 of 8 is not enabled");
    assert_eq!(read(&mut nic, 0x200), ALL_ONES, "nothing was cut to 32 bits");
}

/// G17: a VF BAR that moves while VFs are in use, across 4 GiB, half by half.
#[test]
fn a_vf_bar_that_moves_takes_all_vfs_with_it() {
    let mut nic = nic(4, FakeDevice::new);
    place(&mut nic, 4, 0x2000_0000);
    let _ = enable(&mut nic, 4);
    let places = [0xf000_0000u64, 0x1_0000_0000, 0x80_4000_0000, 0xc000_0000, 0x100_0000_0000];
    place(&mut nic, 2, places[0]);
    for index in 0..4 {
        assert_eq!(vf(&mut nic, index).init(), 15);
        write(&mut nic, places[0] + u64::from(index) * 0x2000 + 0x200, 0xa0 + u32::from(index));
    }
    for (from, to) in places.iter().zip(&places[1..]) {
        let halves = [(4 * 2, to & 0xffff_ffff), (4 * 2 + 4, to >> 32)];
        for (register, half) in halves {
            let offset = SRIOV + 0x24 + register;
            let changes = u64::from(pf(&mut nic).config_read(offset, 4) & !0xf) != half;
            let effects = pf(&mut nic).config_write(offset, 4, u32::try_from(half).unwrap());
            assert_eq!(effects.windows, changes, "{to:#x}: the VMM is told");
        }
        for index in 0..4u16 {
            let slice = u64::from(index) * 0x2000;
            assert_eq!(find(&nic, from + slice), None, "nothing is left at {from:#x}");
            assert_eq!(read(&mut nic, to + slice + 0x200), 0xa0 + u32::from(index), "VF {index} is at {to:#x}");
        }
    }
    assert!((0..4).all(|index| nic.vf(VfIndex(index)).unwrap().device().starts == 1), "no queue was stopped");
}

/// G25: VFs respond in time while the PF's queues are busy.
#[test]
fn the_last_of_a_thousand_vfs_answers_at_once() {
    let mut nic = nic(1024, FakeDevice::with_worker);
    assert_eq!(pf(&mut nic).init(), 15);
    let mut doorbells = Vec::new();
    nic.doorbells(Reach::Device, &mut doorbells);
    let (kick, stop) = (Arc::clone(&doorbells[0].eventfd), Arc::new(AtomicBool::new(false)));
    let load = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(Ordering::Acquire) {
                kick.write(1).unwrap();
                std::thread::yield_now();
            }
        }
    });
    let mut fastest = Duration::MAX;
    let until = Instant::now() + Duration::from_secs(60);
    for round in 0.. {
        if round >= 10 && (fastest < Duration::from_millis(100) || Instant::now() > until) {
            break;
        }
        let begin = Instant::now();
        assert_eq!(enable(&mut nic, 1024).vfs, Some(VfChange::Enabled { num_vfs: 1024 }));
        assert_eq!(nic.config_read(rid(1023), Dword::containing(8)), 0x0200_0001);
        fastest = fastest.min(begin.elapsed());
        // At once again, faster than any driver.
        let _ = disable(&mut nic);
        assert_eq!(nic.config_read(rid(1023), Dword::containing(8)), ALL_ONES);
        let _ = enable(&mut nic, 1024);
        assert_eq!(vf(&mut nic, 1023).init(), 15);
        let _ = disable(&mut nic);
        assert_eq!(join(&mut nic), 1);
    }
    // The delay that Linux allows. The fastest round counts: the machine may be busy during the others.
    assert!(fastest < Duration::from_millis(100), "{fastest:?}");
    stop.store(true, Ordering::Release);
    load.join().unwrap();
    let _ = nic.reset(ResetKind::Conventional);
    assert_eq!(join(&mut nic), 1);
}

/// G35: nothing shares a page with MSI-X, for every supported System Page Size.
#[test]
fn msi_x_shares_no_page_with_virtios_registers() {
    for bit in [0, 1, 4, 6, 8, 10] {
        let mut nic = nic(2, FakeDevice::new);
        let _ = pf(&mut nic).config_write(SRIOV + 0x20, 4, 1 << bit);
        let page = 0x1000u64 << bit;
        for (bar, base) in [(2, 0x1_0000_0000), (4, 0x2_0000_0000)] {
            place(&mut nic, bar, base);
        }
        let _ = enable(&mut nic, 2);
        let mut windows = Vec::new();
        nic.windows(&mut windows);
        let base = |bar: u8, index: u64| {
            let window = windows.iter().find(|window| window.id == WindowId::VfBar(BarIndex::ALL[usize::from(bar)]));
            let window = window.unwrap();
            (window.base + index * window.len / 2, window.len / 2)
        };
        let pages = |index: u64, bar: u8, offset: u64, len: u64| {
            let (base, slice) = base(bar, index);
            assert!(offset + len <= slice, "within the slice");
            (base + offset) / page..=(base + offset + len - 1) / page
        };
        let mut msix = Vec::new();
        let mut registers = Vec::new();
        for index in 0..2 {
            let vf = Driver::of_vf(&mut nic, rid(index), 0);
            let capability = vf.capability(0x11, |_| true).unwrap();
            let vectors = u64::from(vf.config_read(capability + 2, 2) & 0x7ff) + 1;
            for (register, len) in [(4, vectors * 16), (8, vectors.div_ceil(64) * 8)] {
                let place = vf.config_read(capability + register, 4);
                let [bar, ..] = (place & 7).to_le_bytes();
                msix.push(pages(index.into(), bar, u64::from(place & !7), len));
            }
            for structure in (1..=4).map(|cfg_type| vf.structure(cfg_type).unwrap()) {
                let (offset, length) = (u64::from(structure.offset), u64::from(structure.length));
                registers.push(pages(index.into(), structure.bar, offset, length));
            }
        }
        for (a, b) in msix.iter().flat_map(|a| registers.iter().map(move |b| (a, b))) {
            assert!(a.end() < b.start() || b.end() < a.start(), "{a:x?} and {b:x?} of {page:#x}");
        }
    }
}

/// G36: bounds and alignment of the virtio structures of each VF, and their VF BAR.
#[test]
fn vf_virtio_structures_are_aligned_and_within_their_bar() {
    let mut nic = nic(4, FakeDevice::new);
    let _ = enable(&mut nic, 4);
    for index in 0..4 {
        let structures = (1..=4).map(|cfg_type| (cfg_type, vf(&mut nic, index).structure(cfg_type).unwrap()));
        for (cfg_type, structure) in structures.collect::<Vec<_>>() {
            let at = SRIOV + 0x24 + 4 * u64::from(structure.bar);
            let _ = pf(&mut nic).config_write(at, 4, ALL_ONES);
            let slice = !(pf(&mut nic).config_read(at, 4) & !0xf) + 1;
            assert!(slice != 0 && structure.offset + structure.length <= slice);
            assert_eq!(structure.offset % if cfg_type == 2 { 2 } else { 4 }, 0, "structure {cfg_type}");
        }
        let notify = vf(&mut nic, index).structure(2).unwrap();
        let multiplier = vf(&mut nic, index).config_read(notify.capability + 16, 4);
        place(&mut nic, 2, 0);
        for queue in 0..3 {
            let mut vf = vf(&mut nic, index);
            let _ = vf.common_write(0x16, 2, queue);
            assert!(vf.common_read(0x1e, 2) * multiplier + 2 <= notify.length);
        }
        assert!(vf(&mut nic, index).structure(5).is_some());
        assert_eq!(vf(&mut nic, index).common_read(0x12, 2), 3);
    }
}

/// G42: a kernel that finds the previous kernel's VFs enabled, with their drivers' queues running.
#[test]
fn new_kernel_gets_fresh_vfs_without_leftovers_of_the_old() {
    let mut nic = nic(3, FakeDevice::with_worker);
    assert_eq!(pf(&mut nic).init(), 15);
    let _ = enable(&mut nic, 3);
    let fresh: Vec<_> = (0..3).map(|index| config(&nic, rid(index))).collect();
    for index in 0..3 {
        assert_eq!(vf(&mut nic, index).init(), 15);
        enable_msix(&mut nic, index);
    }
    let old = messages(&nic).into_iter().map(|message| Arc::downgrade(&message.eventfd)).collect::<Vec<_>>();
    assert_eq!(old.len(), 12);
    // The new kernel resets the PF's virtio side when its driver binds, and has found VF Enable set before.
    assert_eq!(pf(&mut nic).config_read(CONTROL, 2), 9);
    assert_eq!(disable(&mut nic).vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert_eq!(join(&mut nic), 3);
    assert!(old.iter().all(|eventfd| eventfd.upgrade().is_none()), "the old VFs' eventfds are closed");
    let mut doorbells = Vec::new();
    nic.doorbells(Reach::Device, &mut doorbells);
    assert!(doorbells.iter().all(|doorbell| matches!(doorbell.window, WindowId::Bar(_))), "the PF's alone");
    assert_eq!(pf(&mut nic).init(), 15);
    let _ = enable(&mut nic, 3);
    assert!(messages(&nic).is_empty());
    for (index, fresh) in (0..3).zip(&fresh) {
        assert_eq!(&config(&nic, rid(index)), fresh);
        assert_eq!(vf(&mut nic, index).status(), 0);
        assert_eq!(vf(&mut nic, index).init(), 15);
    }
    let _ = nic.reset(ResetKind::Conventional);
    assert_eq!(join(&mut nic), 5, "three VFs and the PF, whose first worker ended at its second start");
}

/// B11: the end of a PF whose VFs are enabled and in use.
#[test]
fn a_pf_that_is_unplugged_takes_its_running_vfs_with_it() {
    let mut nic = nic(4, FakeDevice::with_worker);
    assert_eq!(pf(&mut nic).init(), 15);
    let _ = enable(&mut nic, 4);
    (0..4).for_each(|index| assert_eq!(vf(&mut nic, index).init(), 15));
    let counters: Vec<_> = std::iter::once(nic.pf())
        .chain((0..4).map(|index| nic.vf(VfIndex(index)).unwrap()))
        .map(|function| Arc::clone(&function.device().counters))
        .collect();
    let workers = || counters.iter().map(|counters| counters.workers.load(Ordering::Acquire)).sum::<usize>();
    let wait = |count| {
        let end = Instant::now() + Duration::from_secs(10);
        while workers() != count {
            assert!(Instant::now() < end, "{} workers", workers());
            std::thread::yield_now();
        }
    };
    wait(5);
    drop(nic);
    wait(0);
}

/// B13: the resources that VFs release when they are disabled.
#[test]
fn a_pf_is_intact_after_its_vfs_went_and_came_again() {
    let mut nic = nic(4, FakeDevice::new);
    assert_eq!(pf(&mut nic).init(), 15);
    let before = config(&nic, PF);
    for num_vfs in [4, 1, 3] {
        let _ = enable(&mut nic, num_vfs);
        vf(&mut nic, 0).init();
        let _ = disable(&mut nic);
        let _ = pf(&mut nic).config_write(SRIOV + 0x10, 2, 0);
        assert_eq!(config(&nic, PF), before);
        assert!(nic.pf().is_running());
        assert_eq!((nic.pf().device().starts, pf(&mut nic).status()), (1, 15));
    }
}

/// B14: the sizes of a VF BAR according to the PF and to the VF.
#[test]
fn vf_bar_decodes_exactly_up_to_the_last_byte_of_127_vfs() {
    let mut nic = nic(127, FakeDevice::new);
    for (bar, slice) in SLICES {
        let base = u64::from(bar) << 32;
        place(&mut nic, bar, base);
        let _ = enable(&mut nic, 127);
        let end = base + 127 * slice;
        for (address, decoded) in [(end - 4, true), (end, false), (base, true), (base - 4, false)] {
            assert_eq!(read(&mut nic, address) != ALL_ONES, decoded, "BAR {bar} {address:#x}");
        }
        let (window, offset) = find(&nic, end - 1).unwrap();
        let mut last = [0xff];
        nic.mmio_read(window, offset, &mut last);
        assert_eq!(last, [0]);
        let _ = disable(&mut nic);
    }
}
