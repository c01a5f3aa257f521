use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pci::VfPlacement;
use pci::spec::ALL_ONES;

use super::*;
use crate::Status;
use crate::testing::{Driver, FakeDevice, memory};

const QUEUES: &[u16] = &[256, 256, 64];
const PF: Rid = Rid::from_bits(3 << 3);
/// The SR-IOV capability in the PF's configuration space.
const SRIOV: u64 = 0x100;
const TOTAL: u16 = 4;
/// Bytes of a VF's slice of the registers' BAR.
const SLICE: u64 = 0x2000;

fn placement(total_vfs: u16) -> Placement {
    let vfs = VfPlacement { total_vfs, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
    Placement { rid: PF, vfs: Some(vfs) }
}

fn device(total_vfs: u16, new: fn(&[u16]) -> FakeDevice) -> NetSriov<FakeDevice> {
    let vfs = (0..total_vfs).map(|_| new(QUEUES)).collect();
    NetSriov::new(new(QUEUES), vfs, placement(total_vfs), &memory()).unwrap()
}

fn idle() -> NetSriov<FakeDevice> {
    device(TOTAL, FakeDevice::new)
}

fn threaded() -> NetSriov<FakeDevice> {
    device(TOTAL, FakeDevice::with_worker)
}

fn vf_rid(index: u16) -> Rid {
    Rid::from_bits(0x100 + index)
}

fn pf(device: &mut NetSriov<FakeDevice>) -> Driver<'_, NetSriov<FakeDevice>> {
    Driver::new(device, PF)
}

fn vf(device: &mut NetSriov<FakeDevice>, index: u16) -> Driver<'_, NetSriov<FakeDevice>> {
    Driver::of_vf(device, vf_rid(index), u64::from(index) * SLICE)
}

/// NumVFs, then VF Enable and VF MSE, as Linux does it.
fn enable(device: &mut NetSriov<FakeDevice>, num_vfs: u16) -> Effects {
    let mut pf = pf(device);
    let _ = pf.config_write(SRIOV + 0x10, 2, num_vfs.into());
    pf.config_write(SRIOV + 8, 2, 0x9)
}

fn disable(device: &mut NetSriov<FakeDevice>) -> Effects {
    pf(device).config_write(SRIOV + 8, 2, 0)
}

fn windows(device: &NetSriov<FakeDevice>) -> Vec<(WindowId, u64)> {
    let mut out = Vec::new();
    device.windows(&mut out);
    out.into_iter().map(|window| (window.id, window.len)).collect()
}

fn join(device: &mut NetSriov<FakeDevice>) -> usize {
    let stopping = device.take_stopping();
    let count = stopping.len();
    stopping.into_iter().for_each(|thread| thread.join().unwrap());
    count
}

fn running(device: &NetSriov<FakeDevice>) -> Vec<u16> {
    (0..TOTAL).filter(|index| device.vf(VfIndex(*index)).unwrap().is_running()).collect()
}

fn wait_for_kick(device: &NetSriov<FakeDevice>, index: u16) {
    let counters = &device.vf(VfIndex(index)).unwrap().device().counters;
    let end = Instant::now() + Duration::from_secs(10);
    while counters.kicks.load(Ordering::Acquire) == 0 {
        assert!(Instant::now() < end, "the worker of VF {index} is kicked when it starts");
        std::thread::yield_now();
    }
}

/// All that a guest can read of VF `index`, without side effects.
fn image(device: &mut NetSriov<FakeDevice>, index: u16) -> Vec<u32> {
    let config: Vec<_> = Dword::all().map(|reg| device.config_read(vf_rid(index), reg)).collect();
    let mut vf = vf(device, index);
    let common = (0..0x40).map(|offset| vf.bar_read(2, offset, if offset % 4 == 0 { 4 } else { 1 }));
    let mut image: Vec<_> = config.into_iter().chain(common).collect();
    image.extend((0..8).map(|offset| vf.bar_read(2, 0x200 + offset, 1)));
    // The MSI-X slices are 4 KiB.
    let base = u64::from(index) * 0x1000;
    for offset in (0..0x900).step_by(4) {
        let mut data = [0; 4];
        device.mmio_read(WindowId::VfBar(BarIndex::ALL[4]), base + offset, &mut data);
        image.push(u32::from_le_bytes(data));
    }
    image
}

/// G19: VFs that do not exist.
#[test]
fn a_hidden_vf_reads_all_ones_and_drops_writes() {
    let mut device = idle();
    for index in 0..TOTAL + 2 {
        assert!(Dword::all().all(|reg| device.config_read(vf_rid(index), reg) == ALL_ONES));
        assert!(vf(&mut device, index).set_bus_master(true).is_none());
        assert!(image(&mut device, index).iter().all(|value| matches!(*value, 0xff | ALL_ONES)));
    }
    let _ = enable(&mut device, TOTAL);
    let fresh = image(&mut device, 0);
    assert_eq!(vf(&mut device, 0).config_read(4, 2), 0, "the write to Command was dropped");
    let mut untouched = idle();
    let _ = enable(&mut untouched, TOTAL);
    assert_eq!(fresh, image(&mut untouched, 0));
}

/// G20: which routing IDs respond.
#[test]
fn exactly_the_first_num_vfs_routing_ids_respond() {
    for num_vfs in 0..=TOTAL {
        let mut device = idle();
        let effects = enable(&mut device, num_vfs);
        assert_eq!(effects.vfs, Some(VfChange::Enabled { num_vfs }));
        let responding: Vec<_> = (0..=u16::MAX)
            .map(Rid::from_bits)
            .filter(|rid| device.config_read(*rid, Dword::containing(8)) != ALL_ONES)
            .collect();
        let expected: Vec<_> = std::iter::once(PF).chain((0..num_vfs).map(vf_rid)).collect();
        assert_eq!(responding, expected);
    }
}

/// G6, B1: NumVFs above TotalVFs.
#[test]
fn more_vfs_than_there_are_cannot_be_enabled() {
    for num_vfs in [TOTAL + 1, u16::MAX] {
        let mut device = idle();
        assert_eq!(enable(&mut device, num_vfs).vfs, None);
        assert_eq!(device.num_visible(), 0);
        assert!(windows(&device).is_empty());
    }
}

/// G15: whose slice an access hits.
#[test]
fn an_access_to_the_slice_of_a_vf_hits_exactly_that_vf() {
    let mut device = idle();
    let _ = enable(&mut device, 3);
    for index in 0..3 {
        let _ = vf(&mut device, index).bar_write(2, 0x200, 4, 0xa0 + u32::from(index));
    }
    for index in 0..3 {
        assert_eq!(device.vf(VfIndex(index)).unwrap().device().config[0], 0xa0 + u8::try_from(index).unwrap());
        assert_eq!(vf(&mut device, index).bar_read(2, 0x200, 4), 0xa0 + u32::from(index));
    }
    assert_eq!(vf(&mut device, 3).bar_read(2, 0x200, 4), ALL_ONES);
    assert_eq!(device.pf().device().config, [0; 8]);
}

/// G16: reads and writes with each of VF Enable and VF MSE.
#[test]
fn vfs_decode_only_with_vf_enable_and_vf_mse() {
    for (control, decodes) in [(0, false), (1, false), (8, false), (9, true)] {
        let mut device = idle();
        let mut pf = pf(&mut device);
        let _ = pf.config_write(SRIOV + 0x10, 2, 2);
        let _ = pf.config_write(SRIOV + 8, 2, control);
        assert_eq!(windows(&device).len(), if decodes { 2 } else { 0 });
        assert_eq!(vf(&mut device, 0).bar_read(2, 0x12, 2) == 3, decodes, "Control {control}");
        let _ = vf(&mut device, 0).bar_write(2, 0x200, 4, 1);
        assert_eq!(device.vf(VfIndex(0)).unwrap().device().config[0] == 1, decodes);
    }
}

/// G13: slices of a larger System Page Size.
#[test]
fn a_larger_system_page_size_spreads_the_slices() {
    let mut device = idle();
    let _ = pf(&mut device).config_write(SRIOV + 0x20, 4, 1 << 4);
    let _ = enable(&mut device, 2);
    let (registers, msix) = (WindowId::VfBar(BarIndex::ALL[2]), WindowId::VfBar(BarIndex::ALL[4]));
    assert_eq!(windows(&device), [(registers, 0x2_0000), (msix, 0x2_0000)]);
    let mut second = Driver::of_vf(&mut device, vf_rid(1), 0x1_0000);
    assert_eq!(second.init(), 15);
    assert_eq!(second.bar_read(2, SLICE, 4), ALL_ONES, "a slice is larger than what the VF decodes");
    assert_eq!(running(&device), [1]);
}

/// G18: the PF's Command and its VFs.
#[test]
fn the_pfs_memory_space_and_bus_master_enables_do_not_gate_vfs() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    vf(&mut device, 0).init();
    let _ = pf(&mut device).config_write(4, 2, 0);
    assert_eq!(windows(&device).len(), 2);
    assert_eq!(vf(&mut device, 0).status(), 15);
    assert_eq!(running(&device), [0]);
}

#[test]
fn doorbells_of_vfs_lie_in_their_slices() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    pf(&mut device).init();
    vf(&mut device, 0).init();
    vf(&mut device, 2).init();
    let mut doorbells = Vec::new();
    device.doorbells(&mut doorbells);
    let places: Vec<_> = doorbells.iter().map(|doorbell| (doorbell.window, doorbell.offset)).collect();
    let bar = BarIndex::ALL[2];
    let of = |window, base: u64| (0..3).map(move |queue| (window, base + 0x1000 + 4 * queue));
    let expected =
        of(WindowId::Bar(bar), 0).chain(of(WindowId::VfBar(bar), 0)).chain(of(WindowId::VfBar(bar), 2 * SLICE));
    assert_eq!(places, expected.collect::<Vec<_>>());
    let _ = disable(&mut device);
    doorbells.clear();
    device.doorbells(&mut doorbells);
    assert_eq!(doorbells.len(), 3, "the PF's");
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 3);
}

fn set_up_msix(device: &mut NetSriov<FakeDevice>, index: u16) {
    let base = u64::from(index) * 0x1000;
    for vector in 0..4 {
        for (offset, value) in [(0, 0xfee0_0000u32), (8, u32::from(index) << 8 | vector), (12, 0)] {
            let at = base + u64::from(vector) * 16 + offset;
            let _ = device.mmio_write(WindowId::VfBar(BarIndex::ALL[4]), at, &value.to_le_bytes());
        }
    }
    let mut vf = vf(device, index);
    let msix = vf.capability(0x11, |_| true).unwrap();
    let _ = vf.config_write(msix + 2, 2, 0x8000);
}

/// B10: the requester of a VF's messages.
#[test]
fn messages_of_a_vf_carry_its_own_routing_id() {
    let mut device = idle();
    let _ = enable(&mut device, 2);
    vf(&mut device, 1).init();
    set_up_msix(&mut device, 1);
    let mut messages = Vec::new();
    device.messages(&mut messages);
    let sent: Vec<_> = messages.iter().map(|message| (message.requester, message.data)).collect();
    assert_eq!(sent, (0..4).map(|vector| (vf_rid(1), 0x100 | vector)).collect::<Vec<_>>());
}

/// What the VF `index` wants, as places of doorbells and as data of messages.
fn wants(device: &NetSriov<FakeDevice>, index: u16) -> (Vec<(WindowId, u64)>, Vec<u32>) {
    let (mut doorbells, mut messages) = (Vec::new(), Vec::new());
    device.vf_wants(vf_rid(index), &mut doorbells, &mut messages);
    assert!(doorbells.iter().map(|doorbell| doorbell.function).all(|rid| rid == vf_rid(index)));
    assert!(messages.iter().map(|message| message.requester).all(|rid| rid == vf_rid(index)));
    let places = doorbells.iter().map(|doorbell| (doorbell.window, doorbell.offset));
    (places.collect(), messages.iter().map(|message| message.data).collect())
}

#[test]
fn what_a_vf_wants_is_its_part_of_what_the_device_wants() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    pf(&mut device).init();
    for index in 0..3 {
        vf(&mut device, index).init();
        set_up_msix(&mut device, index);
    }
    let of_all = |device: &NetSriov<FakeDevice>| {
        let (mut doorbells, mut messages) = (Vec::new(), Vec::new());
        device.doorbells(&mut doorbells);
        device.messages(&mut messages);
        let places = doorbells.iter().filter(|doorbell| doorbell.window != WindowId::Bar(BarIndex::ALL[2]));
        let places = places.map(|doorbell| (doorbell.window, doorbell.offset)).collect::<Vec<_>>();
        (places, messages.iter().map(|message| message.data).collect::<Vec<_>>())
    };
    let of_each = |device: &NetSriov<FakeDevice>| {
        let each: Vec<_> = (0..4).map(|index| wants(device, index)).collect();
        (each.iter().flat_map(|of| of.0.clone()).collect(), each.iter().flat_map(|of| of.1.clone()).collect())
    };
    assert_eq!(of_all(&device).0.len(), 9);
    assert_eq!(of_all(&device), of_each(&device));
    let slice = WindowId::VfBar(BarIndex::ALL[2]);
    assert_eq!(device.vf_at(slice, 2 * SLICE + 8), Some(vf_rid(2)));
    assert_eq!(device.vf_at(slice, 3 * SLICE), None);
    assert_eq!(device.vf_at(WindowId::Bar(BarIndex::ALL[2]), 8), None, "what is written to the PF may concern all");
    // In D3hot nothing may be sent, and nothing runs.
    let power = pf(&mut device).capability(1, |_| true).unwrap();
    let _ = pf(&mut device).config_write(power + 4, 2, 3);
    assert_eq!(of_each(&device), (Vec::new(), Vec::new()));
    let _ = disable(&mut device);
    assert_eq!(of_each(&device), (Vec::new(), Vec::new()));
    let _ = device.reset(ResetKind::Conventional);
    join(&mut device);
}

/// G24: VFs that were in use and are enabled again.
#[test]
fn vfs_that_are_enabled_again_are_fresh() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    let fresh: Vec<_> = (0..3).map(|index| image(&mut device, index)).collect();
    for index in 0..3 {
        assert_eq!(vf(&mut device, index).init(), 15);
        set_up_msix(&mut device, index);
        let _ = vf(&mut device, index).bar_write(2, 0x200, 4, 7);
    }
    let effects = disable(&mut device);
    assert_eq!(effects.vfs, Some(VfChange::Disabled { num_vfs: 3 }));
    assert!(effects.windows && effects.messages && effects.queues);
    assert_eq!(join(&mut device), 3);
    assert!(running(&device).is_empty());
    let _ = enable(&mut device, 3);
    for (index, fresh) in (0..3).zip(&fresh) {
        assert_eq!(&image(&mut device, index), fresh, "VF {index}");
        assert_eq!(vf(&mut device, index).init(), 15);
    }
    let _ = disable(&mut device);
    join(&mut device);
}

/// G26: VFs in use while Control is written again and VF MSE changes.
#[test]
fn writing_control_again_and_toggling_mse_keeps_the_vfs() {
    let mut device = idle();
    let _ = enable(&mut device, 2);
    vf(&mut device, 0).init();
    for control in [9, 1, 9, 0xffff, 1] {
        let effects = pf(&mut device).config_write(SRIOV + 8, 2, control);
        assert_eq!(effects.vfs, None);
    }
    let _ = pf(&mut device).config_write(SRIOV + 8, 2, 9);
    assert_eq!(vf(&mut device, 0).status(), 15);
    assert_eq!(device.vf(VfIndex(0)).unwrap().device().starts, 1);
}

/// G29, G30, G31, G32, G33, G34, B12: the header and the capabilities of each VF.
#[test]
fn the_header_of_a_vf_is_a_vfs() {
    let mut device = idle();
    let _ = enable(&mut device, TOTAL);
    for index in 0..TOTAL {
        for offset in (0..0x40).step_by(4).filter(|offset| *offset != 4) {
            let before = vf(&mut device, index).config_read(offset, 4);
            let _ = vf(&mut device, index).config_write(offset, 4, ALL_ONES);
            assert_eq!(vf(&mut device, index).config_read(offset, 4), before, "offset {offset:#x} is read-only");
        }
        let mut vf = vf(&mut device, index);
        assert_eq!(vf.config_read(0, 4), ALL_ONES);
        let _ = vf.config_write(4, 4, ALL_ONES);
        assert_eq!(vf.config_read(4, 4), 0x0010_0004);
        let _ = vf.config_write(4, 2, 0);
        let zero = [0x0c, 0x10, 0x14, 0x18, 0x1c, 0x20, 0x24, 0x28, 0x30, 0x3c, 0x100];
        assert!(zero.iter().all(|offset| vf.config_read(*offset, 4) == 0));
        assert_eq!(vf.config_read(0x2c, 4), 0x1041_1af4);
        let pcie = vf.capability(0x10, |_| true).unwrap();
        assert_eq!(vf.config_read(pcie + 4, 4) >> 28 & 1, 1, "FLR");
        assert!(vf.capability(0x11, |_| true).is_some());
        assert_eq!(vf.config_read(8, 4), pf(&mut device).config_read(8, 4), "class and revision");
    }
}

/// G36: where a VF's virtio structures are.
#[test]
fn the_capabilities_of_a_vf_name_the_pfs_vf_bars() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    let vf_bars: Vec<_> = (0..6).filter(|bar| pf(&mut device).config_read(SRIOV + 0x24 + 4 * bar, 4) != 0).collect();
    assert_eq!(vf_bars, [2, 4]);
    for cfg_type in 1..=4 {
        let structure = vf(&mut device, 0).structure(cfg_type).unwrap();
        assert_eq!(structure.bar, 2);
        assert!(u64::from(structure.offset + structure.length) <= SLICE);
    }
}

#[test]
fn only_the_pf_offers_sr_iov() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    let features = |mut driver: Driver<'_, NetSriov<FakeDevice>>| driver.negotiate();
    assert_eq!(features(pf(&mut device)) >> 37 & 1, 1);
    assert_eq!(features(vf(&mut device, 0)) >> 37 & 1, 0);
}

/// G37: function level reset of a VF among others.
#[test]
fn a_function_level_reset_of_a_vf_leaves_its_siblings_alone() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    let fresh = image(&mut device, 1);
    pf(&mut device).init();
    (0..3).for_each(|index| assert_eq!(vf(&mut device, index).init(), 15));
    // A worker's first signals are pending bits of its function.
    (0..3).for_each(|index| wait_for_kick(&device, index));
    let siblings = [0, 2].map(|index| image(&mut device, index));
    let windows_before = windows(&device);
    let effects = vf(&mut device, 1).flr();
    assert_eq!((effects.vfs, effects.reset), (None, None));
    assert_eq!(join(&mut device), 1);
    assert_eq!(running(&device), [0, 2]);
    assert!(device.pf().is_running());
    assert_eq!(image(&mut device, 1), fresh);
    assert_eq!([0, 2].map(|index| image(&mut device, index)), siblings);
    assert_eq!(windows(&device), windows_before);
    assert_eq!(vf(&mut device, 1).init(), 15);
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 4);
}

/// G38, G39: resets of the PF by itself and with the system.
#[test]
fn a_reset_of_the_pf_takes_its_vfs_with_it() {
    for by_register in [false, true] {
        let mut device = threaded();
        let _ = enable(&mut device, 3);
        pf(&mut device).init();
        vf(&mut device, 0).init();
        vf(&mut device, 2).init();
        let effects = if by_register { pf(&mut device).flr() } else { device.reset(ResetKind::Conventional) };
        assert_eq!(effects.vfs, Some(VfChange::Disabled { num_vfs: 3 }));
        assert_eq!(join(&mut device), 3, "PF and two VFs ran");
        assert!(running(&device).is_empty() && !device.pf().is_running());
        assert!(windows(&device).is_empty());
        assert_eq!(device.sriov(), idle().sriov());
        let _ = enable(&mut device, 3);
        let mut fresh = idle();
        let _ = enable(&mut fresh, 3);
        for index in 0..3 {
            assert_eq!(image(&mut device, index), image(&mut fresh, index));
        }
    }
}

/// G40, G41: a driver's reset of the PF.
#[test]
fn a_virtio_reset_of_the_pf_leaves_the_vfs_running() {
    let mut device = idle();
    assert_eq!(pf(&mut device).init(), 15);
    let _ = enable(&mut device, 2);
    vf(&mut device, 1).init();
    let _ = pf(&mut device).set_status(0);
    assert_eq!((running(&device), device.num_visible()), (vec![1], 2));
    assert_eq!(pf(&mut device).init(), 15);
    assert_eq!(vf(&mut device, 1).status(), 15);
    let _ = pf(&mut device).set_status(0);
    let _ = disable(&mut device);
    assert_eq!(enable(&mut device, 3).vfs, Some(VfChange::Enabled { num_vfs: 3 }));
}

/// G43: VFs while their PF is in D3hot.
#[test]
fn vfs_follow_the_power_state_of_their_pf_and_keep_their_state() {
    let mut device = idle();
    let _ = enable(&mut device, 2);
    vf(&mut device, 0).init();
    set_up_msix(&mut device, 0);
    let before = image(&mut device, 0);
    let power = pf(&mut device).capability(0x01, |_| true).unwrap();
    let _ = pf(&mut device).config_write(power + 4, 2, 3);
    assert!(running(&device).is_empty());
    let mut messages = Vec::new();
    device.messages(&mut messages);
    assert!(messages.is_empty() && windows(&device).is_empty());
    assert_eq!(vf(&mut device, 0).bar_read(2, 0x14, 1), 0xff);
    // A VF whose Bus Master is set again must not run in its PF's sleep.
    let _ = vf(&mut device, 0).set_bus_master(false);
    let _ = vf(&mut device, 0).set_bus_master(true);
    assert!(running(&device).is_empty());
    let _ = pf(&mut device).config_write(power + 4, 2, 0);
    assert_eq!(running(&device), [0]);
    assert_eq!(image(&mut device, 0), before);
}

/// G22, B15: more VFs than a bus holds.
#[test]
fn a_thousand_vfs_appear_across_buses_and_each_has_its_slice() {
    let mut device = device(1024, FakeDevice::new);
    let _ = enable(&mut device, 1024);
    for index in [0, 255, 256, 1023] {
        assert_eq!(vf_rid(index).bus(), 1 + u8::try_from(index / 256).unwrap());
        assert_eq!(vf(&mut device, index).init(), 15);
        assert_eq!(device.vf(VfIndex(index)).unwrap().rid(), vf_rid(index));
        assert!(device.vf(VfIndex(index)).unwrap().is_running());
    }
    assert_eq!(windows(&device)[0].1, 1024 * SLICE);
    let _ = disable(&mut device);
    assert!((0..1024).all(|index| !device.vf(VfIndex(index)).unwrap().is_running()));
}

/// B18: one VF, stride 0.
#[test]
fn a_single_vf_needs_no_stride() {
    let vfs = VfPlacement { total_vfs: 1, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 0 };
    let placement = Placement { rid: PF, vfs: Some(vfs) };
    let device = NetSriov::new(FakeDevice::new(QUEUES), vec![FakeDevice::new(QUEUES)], placement, &memory());
    let mut device = device.unwrap();
    let _ = enable(&mut device, 1);
    assert_eq!(vf(&mut device, 0).init(), 15);
}

/// B8: many times on and off.
#[test]
fn a_thousand_times_on_and_off_leaves_nothing_behind() {
    let mut device = threaded();
    for _ in 0..1000 {
        let _ = enable(&mut device, 2);
        vf(&mut device, 1).init();
        let _ = disable(&mut device);
        assert_eq!(join(&mut device), 1);
    }
    assert_eq!(device.vf(VfIndex(1)).unwrap().device().counters.workers.load(Ordering::Acquire), 0);
}

/// B20: VFs that cannot be of one PF.
#[test]
fn a_vf_of_another_shape_is_named() {
    let new = |vfs: Vec<FakeDevice>, total| NetSriov::new(FakeDevice::new(QUEUES), vfs, placement(total), &memory());
    let error = |vfs, total| new(vfs, total).err().unwrap().to_string();
    let good = || FakeDevice::new(QUEUES);
    assert_eq!(
        error(vec![good(), good(), FakeDevice::new(&[256; 5])], 3),
        "VF 2 has 5 queues and VF 0 has 3; all VFs of a PF must have the same number"
    );
    assert_eq!(
        error(vec![good(), FakeDevice::new(&[256, 256, 3])], 2),
        "VF 1: queue 2: a size of 3 is not a power of two from 1 to 32768"
    );
    assert_eq!(error(vec![good()], 2), "1 VFs at a place that reserves 2");
    assert_eq!(error(vec![], 1), "0 VFs at a place that reserves 1");
}

#[path = "properties.rs"]
mod properties;

#[path = "state_tests.rs"]
mod state;

#[path = "model_tests.rs"]
mod model;
