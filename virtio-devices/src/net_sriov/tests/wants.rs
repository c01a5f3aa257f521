//! What VFs want wired: doorbells and messages.

use super::*;

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
