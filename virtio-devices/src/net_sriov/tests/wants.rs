//! Doorbells and messages that VFs need wired.

use parking_lot::Mutex;

use super::*;
use crate::{DOORBELL_PAGE, DoorbellPage, DoorbellPages};

#[test]
fn doorbells_of_vfs_lie_in_their_slices() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    pf(&mut device).init();
    vf(&mut device, 0).init();
    vf(&mut device, 2).init();
    let mut doorbells = Vec::new();
    device.doorbells(Reach::Device, &mut doorbells);
    let places: Vec<_> = doorbells.iter().map(|doorbell| (doorbell.window, doorbell.offset)).collect();
    let bar = BarIndex::ALL[2];
    let of = |window, base: u64| (0..3).map(move |queue| (window, base + 0x1000 + 4 * queue));
    let expected =
        of(WindowId::Bar(bar), 0).chain(of(WindowId::VfBar(bar), 0)).chain(of(WindowId::VfBar(bar), 2 * SLICE));
    assert_eq!(places, expected.collect::<Vec<_>>());
    let _ = disable(&mut device);
    doorbells.clear();
    device.doorbells(Reach::Device, &mut doorbells);
    assert_eq!(doorbells.len(), 3, "the PF's");
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 3);
}

#[test]
fn all_vfs_have_pages_for_their_doorbells_if_one_can_use_them() {
    let mut vfs = vec![FakeDevice::with_worker(QUEUES), FakeDevice::with_worker(QUEUES)];
    vfs[1].pages = Some(DoorbellPages::default());
    let mut device = Hosted::new(NetSriov::new(FakeDevice::new(QUEUES), vfs, placement(2), &memory()).unwrap());
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&told);
    let observer: Arc<DoorbellObserver> = Arc::new(move |rid| heard.lock().push(rid));
    device.observe_doorbells(&observer);
    let _ = enable(&mut device, 2);
    assert!(windows(&device).contains(&(WindowId::VfBar(BarIndex::ALL[2]), 2 * 0x4000)));
    assert_eq!(pf(&mut device).structure(2).unwrap().length, 3 * 4);
    for index in 0..2 {
        let slice = u64::from(index) * 0x4000;
        let mut vf = Driver::of_vf(&mut device, vf_rid(index), slice);
        assert_eq!(vf.structure(2).unwrap().length, 3 * 0x1000);
        vf.init();
        let mut doorbells = Vec::new();
        device.doorbells(Reach::Function(vf_rid(index)), &mut doorbells);
        let places: Vec<_> = doorbells.iter().map(|doorbell| (doorbell.offset, doorbell.page.is_some())).collect();
        assert_eq!(places, [0x1000, 0x2000, 0x3000].map(|offset| (slice + offset, false)));
    }
    let file = rustix::fs::memfd_create("doorbell", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 2 * DOORBELL_PAGE).unwrap();
    let page = Arc::new(DoorbellPage::map(&file, 1).unwrap());
    device.vf(VfIndex(1)).unwrap().device().pages.as_ref().unwrap().set([(1, page)]);
    assert_eq!(*told.lock(), [vf_rid(1)]);
    let mut doorbells = Vec::new();
    device.doorbells(Reach::Device, &mut doorbells);
    let paged: Vec<_> = doorbells.iter().filter(|doorbell| doorbell.page.is_some()).collect();
    assert_eq!(
        paged.iter().map(|doorbell| (doorbell.function, doorbell.offset)).collect::<Vec<_>>(),
        [(vf_rid(1), 0x6000)]
    );
    let _ = disable(&mut device);
    doorbells.clear();
    device.doorbells(Reach::Device, &mut doorbells);
    assert!(doorbells.is_empty());
    assert_eq!(join(&mut device), 2);
}

/// B10: the requester of a VF's messages.
#[test]
fn messages_of_a_vf_carry_its_own_routing_id() {
    let mut device = idle();
    let _ = enable(&mut device, 2);
    vf(&mut device, 1).init();
    set_up_msix(&mut device, 1);
    let mut messages = Vec::new();
    device.messages(Reach::Device, &mut messages);
    let sent: Vec<_> = messages.iter().map(|message| (message.requester, message.data)).collect();
    assert_eq!(sent, (0..4).map(|vector| (vf_rid(1), 0x100 | vector)).collect::<Vec<_>>());
}

/// The needs of the VF `index`: addresses of doorbells, and data of messages.
fn wants(device: &Nic, index: u16) -> (Vec<(WindowId, u64)>, Vec<u32>) {
    let (mut doorbells, mut messages) = (Vec::new(), Vec::new());
    device.doorbells(Reach::Function(vf_rid(index)), &mut doorbells);
    device.messages(Reach::Function(vf_rid(index)), &mut messages);
    assert!(doorbells.iter().map(|doorbell| doorbell.function).all(|rid| rid == vf_rid(index)));
    assert!(messages.iter().map(|message| message.requester).all(|rid| rid == vf_rid(index)));
    let places = doorbells.iter().map(|doorbell| (doorbell.window, doorbell.offset));
    (places.collect(), messages.iter().map(|message| message.data).collect())
}

#[test]
fn the_wants_of_a_vf_are_its_part_of_those_of_the_device() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    pf(&mut device).init();
    for index in 0..3 {
        vf(&mut device, index).init();
        set_up_msix(&mut device, index);
    }
    let of_all = |device: &Nic| {
        let (mut doorbells, mut messages) = (Vec::new(), Vec::new());
        device.doorbells(Reach::Device, &mut doorbells);
        device.messages(Reach::Device, &mut messages);
        let places = doorbells.iter().filter(|doorbell| doorbell.window != WindowId::Bar(BarIndex::ALL[2]));
        let places = places.map(|doorbell| (doorbell.window, doorbell.offset)).collect::<Vec<_>>();
        (places, messages.iter().map(|message| message.data).collect::<Vec<_>>())
    };
    let of_each = |device: &Nic| {
        let each: Vec<_> = (0..4).map(|index| wants(device, index)).collect();
        (each.iter().flat_map(|of| of.0.clone()).collect(), each.iter().flat_map(|of| of.1.clone()).collect())
    };
    assert_eq!(of_all(&device).0.len(), 9);
    assert_eq!(of_all(&device), of_each(&device));
    let slice = WindowId::VfBar(BarIndex::ALL[2]);
    let reach = |device: &mut Nic, window, offset| device.mmio_write(window, offset, &[0]).reach;
    assert_eq!(reach(&mut device, slice, 2 * SLICE + 8), Reach::Function(vf_rid(2)));
    assert_eq!(reach(&mut device, slice, 3 * SLICE), Reach::Nothing);
    assert_eq!(reach(&mut device, WindowId::Bar(BarIndex::ALL[2]), 8), Reach::Function(PF));
    // In D3hot a VF sends nothing, and nothing runs.
    let power = pf(&mut device).capability(1, |_| true).unwrap();
    let _ = pf(&mut device).config_write(power + 4, 2, 3);
    assert_eq!(of_each(&device), (Vec::new(), Vec::new()));
    let _ = disable(&mut device);
    assert_eq!(of_each(&device), (Vec::new(), Vec::new()));
    let _ = device.reset(ResetKind::Conventional);
    join(&mut device);
}
