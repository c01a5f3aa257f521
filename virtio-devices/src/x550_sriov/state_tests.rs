//! Saved state.

use super::*;
use crate::state::{DeviceSpecific, StateError, VectorState};

/// Pauses the device and saves it, and converts the state to text and back.
fn save(device: &mut Card) -> DeviceState {
    device.pause();
    device.join();
    let text = serde_json::to_string(&device.save().unwrap().unwrap()).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// 63 VFs in use, and a function with a pending bit of each kind.
fn used() -> (Card, Arc<NoPath>) {
    let (mut device, path) = enabled(63, 63);
    device.set_link(true);
    let _ = write(&mut device, Place::Pf, 0x18, 1 << 28 | 1 << 14);
    for place in std::iter::once(Place::Pf).chain((0..63).map(Place::Vf)) {
        set_up_msix(&mut device, place, 6);
        set_up_mailbox(&mut device, place);
        start(&mut device, place);
    }
    for index in [7u16, 62] {
        let _ = write_bar(&mut device, Place::Vf(index), VF_MSIX_BAR, 2 * 16 + 12, 1);
        let _ = write(&mut device, Place::Pf, 0x4b00 + 4 * u64::from(index), 1);
        let _ = write(&mut device, Place::Vf(index), 0x2fc, 1);
    }
    (device, path)
}

/// Images of all functions, windows, messages without their eventfds, and the NIC.
type Everything = (Vec<Vec<u32>>, Vec<Window>, Vec<(Rid, u64, u32)>, Nic);

/// Everything that a guest can read of all functions, and what the device needs from its host.
fn everything(device: &mut Card) -> Everything {
    let mut windows = Vec::new();
    device.windows(&mut windows);
    let messages = messages(device, Reach::Device);
    let messages = messages.iter().map(|message| (message.requester, message.address, message.data)).collect();
    let places = std::iter::once(Place::Pf).chain((0..63).map(Place::Vf));
    let images = places.map(|place| {
        let config: Vec<_> = Dword::all().map(|reg| device.config_read(rid_of(place), reg)).collect();
        let table = (0..0x60).step_by(4).map(|offset| read_bar(device, place, msix_bar(place), offset));
        let mut image: Vec<_> = config.into_iter().chain(table).collect();
        image.extend([0x2000, 0x2004].map(|offset| read_bar(device, place, msix_bar(place), offset)));
        image
    });
    let images = images.collect();
    let nic = device.nic().lock().clone();
    (images, windows, messages, nic)
}

#[test]
fn vfs_in_use_continue_unchanged_after_a_restore() {
    let (mut old, _) = used();
    let state = save(&mut old);
    let (mut new, path) = device(63);
    new.restore(&state).unwrap();
    assert_eq!(everything(&mut new), everything(&mut old));
    assert_eq!([7, 62, 8].map(|index| pending(&mut new, Place::Vf(index))), [4, 4, 0]);
    assert_eq!(path.running(), [], "paused");
    assert_eq!(path.take_calls(), [Call::Pools, Call::Queues]);
    assert_eq!(save(&mut new), state, "and is saved as the same");
    new.resume();
    assert_eq!(path.running().len(), 128);
    assert!(is_up(&new, None) && (0..63).all(|index| is_up(&new, Some(index))));
    // The VF's pending message is sent when it is unmasked.
    let _ = write_bar(&mut new, Place::Vf(62), VF_MSIX_BAR, 2 * 16 + 12, 0);
    assert_eq!(arrived(&new, Place::Vf(62)), [2]);
    let _ = disable(&mut new);
    assert_eq!((path.running().len(), new.join()), (2, 126));
}

#[test]
fn a_message_that_waits_is_sent_before_a_save() {
    let _clock = crate::os::clock::testing::StoppedClock::new();
    let (mut device, vf) = (used().0, Place::Vf(5));
    arrived(&device, vf);
    // Vector 2 clears itself, and has an interval. Its cause is set again while it is masked.
    for (offset, value) in [(0x110, 4), (0x828, 200), (0x104, 4), (0x10c, 4), (0x104, 4), (0x108, 4)] {
        let _ = write(&mut device, vf, offset, value);
    }
    assert_eq!((arrived(&device, vf), device.nic().due().is_some()), (vec![2], true));
    let mut state = save(&mut device);
    assert_eq!((arrived(&device, vf), nic(&mut state).vfs[5].vectors[0]), (vec![2], 0));
}

#[test]
fn a_device_at_power_on_is_saved_without_vfs() {
    let (mut device, _) = device(63);
    let state = save(&mut device);
    assert_eq!(state.vfs.as_ref().unwrap().changed, []);
    let (mut alone, _) = super::device(0);
    let state = save(&mut alone);
    assert!(state.vfs.is_none());
    super::device(0).0.restore(&state).unwrap();
}

#[test]
fn a_running_device_is_neither_saved_nor_restored() {
    let (mut device, path) = used();
    let state = save(&mut used().0);
    assert!(matches!(device.save(), Err(StateError::Running)));
    assert!(matches!(device.restore(&state), Err(StateError::Running)));
    assert_eq!(path.running().len(), 128, "nothing happened");
}

/// A change that makes a state impossible, and the error.
type Hostile = (fn(&mut DeviceState), &'static str);

fn nic(state: &mut DeviceState) -> &mut x550::NicState {
    let DeviceSpecific::X550(nic) = &mut state.function.device else { panic!("an X550") };
    nic
}

fn vfs(state: &mut DeviceState) -> &mut crate::VfsState {
    state.vfs.as_mut().unwrap()
}

fn hidden(state: &mut DeviceState) {
    state.function.config.sriov.as_mut().unwrap().num_vfs = 62;
}

const HOSTILE: [Hostile; 21] = [
    (|state| state.version = 2, "saved state of version 2; this is version 1"),
    (|state| state.device_type = 1, "saved state of a device with different device types"),
    (|state| state.function.device = DeviceSpecific::PowerOn, "saved state of a device with different device types"),
    (|state| state.rid += 8, "saved state of a device with different addresses"),
    (|state| state.vfs = None, "saved state of a device with different VFs"),
    (|state| vfs(state).total_vfs = 62, "saved state of a device with different VFs"),
    (|state| vfs(state).changed[62].index = 63, "saved state of a device with different VFs"),
    (|state| vfs(state).changed.swap(3, 4), "saved state with an impossible value in the order of VFs"),
    (|state| state.function.told = None, "saved state of a device with different promises"),
    (
        |state| state.function.told.as_mut().unwrap().promises[0].1 = "52:54:00:01:02:04".to_string(),
        "its driver has read mac 52:54:00:01:02:04, but the device here has 52:54:00:01:02:03; configure it as it was",
    ),
    (|state| state.function.transport.status = 1, "saved state of a device with different kinds of device"),
    (
        |state| vfs(state).changed[5].function.positions = Some(Vec::new()),
        "VF 5: saved state of a device with different kinds of device",
    ),
    (
        |state| vfs(state).changed[5].function.device = DeviceSpecific::Config(Vec::new()),
        "VF 5: saved state of a device with different kinds of device",
    ),
    (
        |state| {
            let pending = VectorState { vector: 3, signalled: true };
            vfs(state).changed[5].function.transport.vectors.push(pending);
        },
        "VF 5: saved state of a device with different numbers of interrupt vectors",
    ),
    (
        |state| {
            let pending = VectorState { vector: 2, signalled: true };
            vfs(state).changed[7].function.transport.vectors.push(pending);
        },
        "VF 7: saved state with an impossible value in the order of interrupt vectors",
    ),
    (
        |state| vfs(state).changed[62].function.config.command = 6,
        "VF 62: saved state with an impossible value in configuration space",
    ),
    (hidden, "VF 62: saved state with an impossible value in what is reset while no driver can see it"),
    (
        |state| {
            hidden(state);
            nic(state).vfs[62] = x550::VfState::default();
        },
        "VF 62: saved state with an impossible value in what is reset while no driver can see it",
    ),
    (
        |state| {
            hidden(state);
            vfs(state).changed.truncate(62);
        },
        "VF 62: saved state with an impossible value in what is reset while no driver can see it",
    ),
    (|state| nic(state).vfs.truncate(62), "saved state of a NIC with another number of VFs"),
    (
        |state| nic(state).registers.push((0x30000, 1)),
        "saved state of a NIC with an impossible value in offsets of registers",
    ),
];

#[test]
fn a_hostile_state_is_refused_and_leaves_the_device_fresh() {
    let good = save(&mut used().0);
    let (mut fresh, _) = device(63);
    let power_on = (save(&mut fresh), everything(&mut fresh));
    for (change, expected) in HOSTILE {
        let mut state = good.clone();
        change(&mut state);
        let (mut device, path) = used();
        device.pause();
        device.set_link(false);
        device.join();
        assert_eq!(device.restore(&state).unwrap_err().to_string(), expected);
        let state = save(&mut device);
        assert_eq!((state, everything(&mut device)), power_on, "{expected}");
        assert_eq!(path.running(), []);
        device.resume();
        assert!(path.running().is_empty() && !is_up(&device, None));
    }
}

#[test]
fn the_state_of_another_model_is_refused() {
    for (from, to, expected) in [
        (Model::X550, Model::X540, "saved state of an X550; this NIC is an X540"),
        (Model::X540, Model::X550, "saved state of an X540; this NIC is an X550"),
    ] {
        let mut state = save(&mut model(from, 4).0);
        assert_eq!(model(to, 4).0.restore(&state).unwrap_err().to_string(), expected);
        model(from, 4).0.restore(&state).unwrap();
        // A state whose parts are of different models is that of neither.
        state.device_type = to.devices()[0];
        assert!(matches!(model(from, 4).0.restore(&state), Err(StateError::Shape("device types"))));
    }
}

#[test]
fn states_of_other_devices_are_refused() {
    let state = save(&mut used().0);
    let mut other = pci::HostBridge::<()>::new(1, 2);
    assert!(other.restore(&state).is_err());
    let vfs = placement(0);
    let mut virtio = crate::VirtioFunction::plain(crate::testing::FakeDevice::new(&[16]), vfs.rid, memory()).unwrap();
    assert!(matches!(virtio.restore(&state), Err(StateError::Shape("device types"))));
    let state = virtio.save().unwrap().unwrap();
    assert!(matches!(device(4).0.restore(&state), Err(StateError::Shape("device types"))));
}
