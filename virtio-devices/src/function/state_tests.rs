//! States that are restored, and states that are refused.

use super::*;
use crate::{DeviceSpecific, DeviceState, PositionState, VectorState};

type Change = fn(&mut DeviceState);

/// Pauses the function and saves it, through its text form.
fn save(function: &mut Plain) -> DeviceState {
    function.pause();
    join(function);
    let text = serde_json::to_string(&function.save().unwrap().unwrap()).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn restored(state: &DeviceState) -> Plain {
    let mut function = idle();
    function.restore(state).unwrap();
    function
}

fn messages(function: &Plain) -> Vec<(u16, u64, u32)> {
    let mut messages = Vec::new();
    function.messages(Reach::Device, &mut messages);
    messages.iter().map(|message| (message.requester.to_bits(), message.address, message.data)).collect()
}

/// A function in use: three queues with vectors, MSI-X, BARs, a written configuration.
fn used() -> Plain {
    let mut function = idle();
    let mut driver = driver(&mut function);
    let _ = driver.config_write(0x18, 4, 0x4000_0000);
    assert_eq!(driver.init(), 15);
    driver.enable_msix(4);
    let _ = driver.bar_write(2, 0x200, 4, 0x4433_2211);
    let _ = driver.common_write(0x16, 2, 1);
    for (n, (_, queue)) in (100..).zip(driver.device.run.as_ref().unwrap().queues()) {
        queue.lock().set_next_avail(n);
        queue.lock().set_next_used(0xff00 + n);
    }
    function
}

fn positions(function: &Plain) -> Vec<(u16, u16, u16)> {
    let position = |(n, queue): &(u16, crate::SharedQueue)| {
        let queue = queue.lock();
        (*n, queue.next_avail(), queue.next_used())
    };
    function.run.as_ref().unwrap().queues().iter().map(position).collect()
}

#[test]
fn a_restored_function_matches_the_saved_one_and_continues() {
    let mut old = used();
    let state = save(&mut old);
    let mut new = restored(&state);
    assert_eq!((image(&new), messages(&new)), (image(&old), messages(&old)));
    assert_eq!(messages(&new).len(), 4);
    let (mut windows, mut expected) = (Vec::new(), Vec::new());
    Device::windows(&new, &mut windows);
    Device::windows(&old, &mut expected);
    assert_eq!(windows, expected);
    assert_eq!((new.is_running(), new.device().starts), (false, 0), "it is paused");
    assert_eq!(save(&mut new), state);
    new.resume();
    assert_eq!(new.device().started, Some((VERSION_1 | FAKE_FEATURE, vec![0, 1, 2])));
    assert_eq!(positions(&new), [(0, 100, 0xff64), (1, 101, 0xff65), (2, 102, 0xff66)]);
    let queue = new.device().queues[2].1.lock();
    assert_eq!((queue.size(), queue.desc_table(), queue.used_ring()), (64, 0x2_0000, 0x2_c000));
}

#[test]
fn a_worker_resumes_at_the_position_that_was_saved() {
    let mut function = threaded();
    driver(&mut function).init();
    wait("the worker is kicked when it starts", || kicks(&function) == 1);
    let state = save(&mut function);
    let stood = state.function.positions.as_ref().unwrap()[0].next_avail;
    assert!(stood >= 1);
    let mut new = threaded();
    new.restore(&state).unwrap();
    new.resume();
    wait("the worker is kicked when it starts again", || kicks(&new) == 1);
    let position = save(&mut new).function.positions.unwrap()[0];
    assert_eq!(position, PositionState { queue: 0, next_avail: stood + 1, next_used: 0 });
}

#[test]
fn a_driver_in_the_midst_of_its_negotiation_finds_its_registers() {
    let mut old = idle();
    let mut driver = driver(&mut old);
    let _ = driver.set_status(3);
    for (offset, len, value) in
        [(0x08, 4, 3), (0x0c, 4, 0xffff_ffff), (0x08, 4, 1), (0x00, 4, 1), (0x16, 2, 2), (0x18, 2, 16), (0x24, 4, 9)]
    {
        let _ = driver.common_write(offset, len, value);
    }
    let _ = driver.common_write(0x1a, 2, 3);
    let _ = driver.common_write(0x1a, 2, 0xffff);
    let state = save(&mut old);
    assert_eq!(state.function.transport.vectors, [VectorState { vector: 3, signalled: false }]);
    let mut new = restored(&state);
    assert_eq!(image(&new), image(&old));
    new.resume();
    assert_eq!(self::driver(&mut new).init(), 15);
    assert!(new.is_running());
}

#[test]
fn pending_signals_are_restored_as_pending_bits_isr_and_reset() {
    let mut old = used();
    let interrupts = old.device().interrupts.clone().unwrap();
    let msix = driver(&mut old).capability(0x11, |_| true).unwrap();
    let _ = driver(&mut old).config_write(msix + 2, 2, 0xc000);
    interrupts.signal_queue(1);
    for queue in 1..=2 {
        let _ = driver(&mut old).common_write(0x16, 2, queue);
        let _ = driver(&mut old).common_write(0x1a, 2, u32::from(crate::NO_VECTOR));
    }
    interrupts.signal_queue(2);
    interrupts.ask_for_reset();
    let mut new = restored(&save(&mut old));
    let mut driver = driver(&mut new);
    assert_eq!(driver.bar_read(4, 0x800, 4), 0b101, "queue 1's, though nothing is mapped to it now, and config's");
    assert_eq!((driver.bar_read(2, 0x100, 1), driver.status()), (1 | 2, 15 | 64));
    new.resume();
    assert!(!new.is_running(), "its driver must reset it first");
}

#[test]
fn d3hot_and_a_clear_bus_master_enable_are_restored() {
    for (capability, offset, value, undo) in [(0x01, 4, 3, 0), (0x10, 4 - 0x40, 2, 6)] {
        let mut old = used();
        let at = u64::try_from(driver(&mut old).capability(capability, |_| true).unwrap() as i64 + offset).unwrap();
        let _ = driver(&mut old).config_write(at, 2, value);
        let mut new = restored(&save(&mut old));
        new.resume();
        assert!(!new.is_running() && messages(&new).is_empty());
        assert_eq!(image(&new), image(&old));
        let _ = driver(&mut new).config_write(at, 2, undo);
        assert!(new.is_running());
        assert_eq!((positions(&new)[0], messages(&new).len()), ((0, 100, 0xff64), 4));
    }
}

#[test]
fn queues_that_run_cannot_be_saved() {
    let mut function = threaded();
    driver(&mut function).init();
    wait("the worker holds its queues", || function.device().counters.workers.load(Ordering::Acquire) == 1);
    let text = function.save().unwrap_err().to_string();
    assert!(text.ends_with("pause it and wait until they have stopped before saving or restoring its state"), "{text}");
    let queue = Arc::clone(&function.run.as_ref().unwrap().queues()[2].1);
    function.pause();
    join(&mut function);
    let held = queue.lock();
    assert!(function.save().is_err(), "a worker that was asked to stop has not ended yet");
    drop(held);
    assert!(function.save().is_ok());
}

#[test]
fn a_restore_replaces_what_was_paused_and_refuses_what_runs() {
    let fresh = save(&mut idle());
    let mut function = threaded();
    driver(&mut function).init();
    assert!(matches!(function.restore(&fresh), Err(StateError::Running)));
    assert!(function.is_running(), "nothing happened");
    function.pause();
    assert_eq!(join(&mut function), 1);
    function.restore(&fresh).unwrap();
    assert_eq!(image(&function), image(&idle()));
    assert_eq!(save(&mut function), fresh);
    function.resume();
    assert_eq!(driver(&mut function).init(), 15);
    assert!(function.is_running());
}

#[test]
fn states_of_other_devices_are_refused_with_a_sentence() {
    let refused = |change: Change| {
        let mut state = save(&mut used());
        change(&mut state);
        let mut function = used();
        function.pause();
        let text = function.restore(&state).unwrap_err().to_string();
        assert_eq!(image(&function), image(&idle()), "{text}");
        assert_eq!(save(&mut function), save(&mut idle()), "{text}");
        text
    };
    for (change, what) in [
        ((|state| state.device_type = 2) as Change, "device types"),
        (|state| state.rid += 8, "addresses"),
        (|state| state.function.transport.queues.truncate(2), "numbers of virtqueues"),
        (|state| state.function.transport.vectors[3].vector = 4, "numbers of interrupt vectors"),
        (|state| state.function.device = DeviceSpecific::Config(vec![0; 9]), "configuration lengths"),
    ] {
        assert_eq!(refused(change), format!("saved state of a device with different {what}"));
    }
    let features = refused(|state| state.function.transport.driver_features[0] |= 1 << 3 | 1 << 7);
    let expected = "its driver uses the virtio feature bits 3, 7, which are not offered here; configure it as it was";
    assert_eq!(features, expected);
    let told = refused(|state| state.function.told.as_mut().unwrap().config.0[0] = 0xff);
    assert!(told.starts_with("its driver has read word "), "{told}");
    assert_eq!(refused(|state| state.version = 2), "saved state of version 2; this is version 1");
    let table = refused(|state| state.function.config.msix.as_mut().unwrap().table.truncate(3));
    assert_eq!(table, "saved state of a function with different MSI-X vectors");
}

#[test]
fn saved_state_that_no_driver_could_cause_is_refused() {
    let changes: [(Change, &str); 16] = [
        (|state| state.function.transport.status = 15 | 16, "the virtio registers"),
        (|state| state.function.transport.status = 64, "the virtio registers"),
        (|state| state.function.transport.status = 4, "the virtio registers"),
        (|state| state.function.transport.isr = 4, "the virtio registers"),
        (|state| state.function.transport.queues[0].size = 512, "the virtio registers"),
        (|state| state.function.transport.queues[0].size = 0, "the virtio registers"),
        (|state| state.function.transport.queues[1].size = 100, "the virtio registers"),
        (|state| state.function.transport.queues[1].descriptor = 8, "the virtio registers"),
        (|state| state.function.transport.queues[1].vector = 4, "the virtio registers"),
        (|state| state.function.transport.vectors.swap(0, 1), "the virtio registers"),
        (|state| state.function.transport.vectors.truncate(3), "the virtio registers"),
        (|state| state.function.transport.config_vector = 5, "the virtio registers"),
        (|state| state.function.transport.status = 11, "the positions of virtqueues"),
        (|state| state.function.positions = Some(Vec::new()), "the positions of virtqueues"),
        (|state| state.function.positions.as_mut().unwrap()[1].queue = 0, "the positions of virtqueues"),
        (|state| state.function.transport.queues[2].enabled = false, "the positions of virtqueues"),
    ];
    for (n, (change, what)) in changes.into_iter().enumerate() {
        let mut state = save(&mut used());
        change(&mut state);
        let mut function = used();
        function.pause();
        let error = function.restore(&state).unwrap_err().to_string();
        assert_eq!(error, format!("saved state with an impossible value in {what}"), "change {n}");
        assert_eq!(image(&function), image(&idle()), "change {n}");
    }
}
