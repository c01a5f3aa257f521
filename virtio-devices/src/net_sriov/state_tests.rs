//! Pauses and saved state of a PF with VFs.

use super::*;

#[test]
fn a_pause_holds_for_vfs_that_are_enabled_during_it() {
    let mut device = threaded();
    let _ = enable(&mut device, 2);
    pf(&mut device).init();
    vf(&mut device, 1).init();
    device.pause();
    assert_eq!(join(&mut device), 2);
    assert!(running(&device).is_empty() && !device.pf().is_running());
    let _ = disable(&mut device);
    let _ = enable(&mut device, 3);
    assert_eq!(vf(&mut device, 2).init(), 15);
    assert!(running(&device).is_empty());
    device.resume();
    assert_eq!(running(&device), [2]);
    assert!(device.pf().is_running());
    let _ = device.reset(ResetKind::Conventional);
    assert_eq!(join(&mut device), 2);
}

#[test]
fn vfs_of_a_pf_in_d3hot_stay_stopped_after_a_pause() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    vf(&mut device, 0).init();
    device.pause();
    let power = pf(&mut device).capability(0x01, |_| true).unwrap();
    let _ = pf(&mut device).config_write(power + 4, 2, 3);
    device.resume();
    assert!(running(&device).is_empty());
    let _ = pf(&mut device).config_write(power + 4, 2, 0);
    assert_eq!(running(&device), [0]);
}

/// Pauses the device and saves it, and converts the state to text and back.
pub(super) fn save(device: &mut Nic) -> DeviceState {
    device.pause();
    join(device);
    let text = serde_json::to_string(&device.save().unwrap().unwrap()).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn restored(state: &DeviceState) -> Nic {
    let mut device = device(state.vfs.as_ref().unwrap().total_vfs, FakeDevice::new);
    device.restore(state).unwrap();
    device
}

/// Images of all functions, windows, and messages without their eventfds.
type Everything = (Vec<Vec<u32>>, Vec<Window>, Vec<(Rid, u64, u32)>);

/// Everything that a guest can read of the functions, and everything that the device needs from its host.
pub(super) fn everything(device: &mut Nic) -> Everything {
    let mut windows = Vec::new();
    device.windows(&mut windows);
    let mut messages = Vec::new();
    device.messages(Reach::Device, &mut messages);
    let messages = messages.iter().map(|message| (message.requester, message.address, message.data)).collect();
    let mut images: Vec<_> = (0..TOTAL + 1).map(|index| image(device, index)).collect();
    images.push(Dword::all().map(|reg| device.config_read(PF, reg)).collect());
    let mut pf = pf(device);
    images.push((0..0x40).map(|offset| pf.bar_read(2, offset, if offset % 4 == 0 { 4 } else { 1 })).collect());
    images.push((0..0x900).step_by(4).map(|offset| pf.bar_read(4, offset, 4)).collect());
    (images, windows, messages)
}

/// VFs in use: all four enabled at a page size of 8 KiB, two with drivers, one of them with a pending signal.
fn used() -> Nic {
    let mut device = idle();
    let mut driver = pf(&mut device);
    for (offset, value) in
        [(4, 6), (0x18, 0x1000_0000), (0x120, 2), (0x12c, 0x4000_0000), (0x130, 1), (0x134, 0x5000_0000)]
    {
        let _ = driver.config_write(offset, 4, value);
    }
    driver.init();
    let _ = enable(&mut device, TOTAL);
    for index in [1, 3] {
        assert_eq!(vf(&mut device, index).init(), 15);
        let msix = vf(&mut device, index).capability(0x11, |_| true).unwrap();
        let _ = vf(&mut device, index).config_write(msix + 2, 2, 0x8000);
        let functions = &device.functions.vfs()[usize::from(index)];
        let (_, queue) = &functions.device().queues[0];
        virtio_queue::QueueT::set_next_avail(&mut *queue.lock(), 700 + index);
        functions.device().interrupts.as_ref().unwrap().signal_queue(index - 1);
    }
    let _ = vf(&mut device, 2).bar_write(2, 0x200, 1, 7);
    device
}

fn next_avail(device: &Nic, index: u16) -> u16 {
    virtio_queue::QueueT::next_avail(&*device.functions.vfs()[usize::from(index)].device().queues[0].1.lock())
}

/// G64, U4: VFs that are enabled.
#[test]
fn vfs_with_drivers_continue_unchanged_after_a_restore() {
    let mut old = used();
    let state = save(&mut old);
    let mut new = restored(&state);
    assert_eq!(everything(&mut new), everything(&mut old));
    assert_eq!(new.functions.num_visible(), TOTAL);
    assert!(running(&new).is_empty());
    new.resume();
    assert_eq!((running(&new), new.pf().is_running()), (vec![1, 3], true));
    assert_eq!([1, 3].map(|index| next_avail(&new, index)), [701, 703]);
    assert_eq!([1, 3].map(|index| vf(&mut new, index).status()), [15, 15]);
    // VF Enable has no edge: NumVFs is locked, and writing the present value of Control does nothing.
    let _ = pf(&mut new).config_write(SRIOV + 0x10, 2, 1);
    assert!(pf(&mut new).config_write(SRIOV + 8, 2, 9).is_none());
    assert_eq!((new.functions.num_visible(), running(&new)), (TOTAL, vec![1, 3]));
    let _ = disable(&mut new);
    let _ = enable(&mut new, TOTAL);
    let mut fresh = used();
    let _ = disable(&mut fresh);
    let _ = enable(&mut fresh, TOTAL);
    assert_eq!(everything(&mut new).0, everything(&mut fresh).0);
}

/// G64: the pending bits of a restored VF.
#[test]
fn a_signal_that_waits_in_a_vf_is_still_its_pending_bit() {
    let mut new = restored(&save(&mut used()));
    let mut data = [0; 4];
    // The MSI-X slices are 8 KiB, like the System Page Size.
    new.mmio_read(WindowId::VfBar(BarIndex::ALL[4]), 3 * 0x2000 + 0x800, &mut data);
    assert_eq!(u32::from_le_bytes(data), 1 << 3);
}

#[test]
fn vfs_as_at_power_on_cost_nothing_in_a_state() {
    let mut device = device(1024, FakeDevice::new);
    let reserved = serde_json::to_string(&save(&mut device)).unwrap();
    assert!(reserved.len() < 4096, "{} bytes", reserved.len());
    device.resume();
    let _ = enable(&mut device, 1024);
    for index in [5, 1023] {
        assert_eq!(vf(&mut device, index).init(), 15);
    }
    let state = save(&mut device);
    let changed: Vec<_> = state.vfs.as_ref().unwrap().changed.iter().map(|vf| vf.index).collect();
    assert_eq!(changed, [5, 1023]);
    let mut new = restored(&state);
    new.resume();
    assert!(new.functions.vfs()[1023].is_running() && !new.functions.vfs()[1022].is_running());
    assert_eq!(new.functions.num_visible(), 1024);
}

#[test]
fn a_restore_over_vfs_in_use_replaces_them() {
    let mut device = threaded();
    let _ = enable(&mut device, 3);
    (0..3).for_each(|index| assert_eq!(vf(&mut device, index).init(), 15));
    let state = save(&mut used());
    assert_eq!(device.restore(&state).unwrap_err().to_string(), StateError::Running.to_string());
    assert_eq!(running(&device), [0, 1, 2], "nothing happened");
    device.pause();
    assert_eq!(join(&mut device), 3);
    device.restore(&state).unwrap();
    assert_eq!(everything(&mut device), everything(&mut used()));
    assert_eq!(save(&mut device), state);
}

#[test]
fn state_of_another_pf_or_vf_is_refused_and_device_stays_fresh() {
    type Change = fn(&mut DeviceState);
    fn vfs(state: &mut DeviceState) -> &mut crate::VfsState {
        state.vfs.as_mut().unwrap()
    }
    fn sriov(state: &mut DeviceState) -> &mut pci::SriovState {
        state.function.config.sriov.as_mut().unwrap()
    }
    let changes: [(Change, &str); 11] = [
        (|state| state.vfs = None, "saved state of a device with different VFs"),
        (|state| vfs(state).total_vfs = 5, "saved state of a device with different VFs"),
        (|state| vfs(state).first_vf_offset += 8, "saved state of a device with different VFs"),
        (|state| vfs(state).changed[2].index = 4, "saved state of a device with different VFs"),
        (|state| vfs(state).changed.swap(0, 1), "saved state with an impossible value in the order of VFs"),
        (|state| state.function.config.sriov = None, "saved state of a function with different SR-IOV"),
        (|state| sriov(state).num_vfs = 5, "saved state with an impossible value in SR-IOV"),
        (
            |state| vfs(state).changed[0].function.config.command = 6,
            "VF 1: saved state with an impossible value in configuration space",
        ),
        (
            |state| sriov(state).control = 8,
            "VF 1: saved state with an impossible value in what is reset while no driver can see it",
        ),
        (
            |state| {
                sriov(state).num_vfs = 1;
                vfs(state).changed.remove(0);
            },
            "VF 2: saved state with an impossible value in what is reset while no driver can see it",
        ),
        (
            |state| vfs(state).changed[2].function.transport.queues.truncate(1),
            "VF 3: saved state of a device with different numbers of virtqueues",
        ),
    ];
    for (change, expected) in changes {
        let mut state = save(&mut used());
        change(&mut state);
        let mut device = threaded();
        let _ = enable(&mut device, 2);
        vf(&mut device, 1).init();
        device.pause();
        assert_eq!(join(&mut device), 1);
        assert_eq!(device.restore(&state).unwrap_err().to_string(), expected);
        assert_eq!(everything(&mut device), everything(&mut idle()));
        assert_eq!(save(&mut device), save(&mut idle()));
    }
    let mut plain = VirtioFunction::plain(FakeDevice::new(QUEUES), PF, memory()).unwrap();
    let error = plain.restore(&save(&mut used())).unwrap_err();
    assert_eq!(error.to_string(), "saved state of a device with different VFs");
    assert_eq!(
        pci::HostBridge::<()>::new(1, 2).restore(&save(&mut used())).unwrap_err().to_string(),
        "saved state of a device with different functions"
    );
    assert!(pci::HostBridge::<()>::new(1, 2).save().unwrap().is_none());
}
