use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pci::{Device, ResetKind};
use virtio_queue::QueueT;

use super::*;
use crate::testing::{Driver, FAKE_FEATURE, FakeDevice, Hosted, memory};
use crate::{Inspect, Lifecycle, NotResumed, Signals, StateError, StoppedBy};

type Plain = Hosted<VirtioFunction<FakeDevice>>;

const RID: Rid = Rid::from_bits(3 << 3);
const VERSION_1: u64 = 1 << 32;

fn function(device: FakeDevice) -> Plain {
    Hosted::new(VirtioFunction::plain(device, RID, memory()).unwrap())
}

fn idle() -> Plain {
    function(FakeDevice::new(&[256, 256, 64]))
}

fn threaded() -> Plain {
    function(FakeDevice::with_worker(&[256, 256, 64]))
}

fn driver(function: &mut Plain) -> Driver<'_, Plain> {
    Driver::new(function, RID)
}

fn wait(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

fn join(function: &mut Plain) -> usize {
    function.join()
}

fn kicks(function: &Plain) -> usize {
    function.device().counters.kicks.load(Ordering::Acquire)
}

/// G36: the virtio capabilities.
#[test]
fn all_five_capabilities_name_structures_within_their_bar() {
    let mut function = idle();
    let driver = driver(&mut function);
    let common = driver.structure(1).unwrap();
    assert_eq!((common.bar, common.offset, common.length), (2, 0, 0x40));
    let notify = driver.structure(2).unwrap();
    assert_eq!((notify.bar, notify.offset, notify.length), (2, 0x1000, 12));
    assert_eq!(driver.config_read(notify.capability + 16, 4), 4);
    let isr = driver.structure(3).unwrap();
    assert_eq!((isr.bar, isr.offset, isr.length), (2, 0x100, 1));
    let config = driver.structure(4).unwrap();
    assert_eq!((config.bar, config.offset, config.length), (2, 0x200, 0xe00));
    assert!(driver.structure(5).is_some());
    assert!(driver.capability(0x11, |_| true).is_some());
    assert_eq!(driver.config_read(0, 4), 0x1041_1af4);
    assert_eq!(driver.config_read(8, 4), 0x0200_0001);
}

#[test]
fn a_driver_gets_its_queues_to_run_by_memory_and_by_pci_cfg() {
    for without_memory in [false, true] {
        let mut function = idle();
        let mut driver = driver(&mut function);
        if without_memory {
            driver = driver.without_memory();
        }
        assert_eq!(driver.init(), 15);
        assert!(function.is_running());
        assert_eq!(function.device().started, Some((VERSION_1 | FAKE_FEATURE, vec![0, 1, 2])));
        assert_eq!(function.device().starts, 1);
    }
}

#[test]
fn only_the_queues_that_the_driver_enabled_are_started() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    let _ = driver.set_bus_master(true);
    driver.negotiate();
    driver.set_up_queue(2, 0);
    let _ = driver.set_status(15);
    assert_eq!(function.device().started.as_ref().unwrap().1, [2]);
}

#[test]
fn device_config_is_accessed_at_any_width_and_by_pci_cfg() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    let _ = driver.bar_write(2, 0x200, 4, 0x4433_2211);
    assert_eq!(driver.bar_read(2, 0x201, 1), 0x22);
    assert_eq!(driver.bar_read(2, 0x300, 4), 0);
    let mut driver = driver.without_memory();
    assert_eq!(driver.bar_read(2, 0x202, 2), 0x4433);
    let _ = driver.bar_write(2, 0x203, 1, 0xee);
    assert_eq!(driver.bar_read(2, 0x200, 4), 0xee33_2211);
}

#[test]
fn pci_cfg_makes_only_accesses_that_are_complete_and_aligned() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    let _ = driver.bar_write(2, 0x200, 4, 0x4433_2211);
    let cap = driver.structure(5).unwrap().capability;
    let aim = |driver: &mut Driver<_>, bar, offset, length| {
        let _ = driver.config_write(cap + 4, 1, bar);
        let _ = driver.config_write(cap + 8, 4, offset);
        let _ = driver.config_write(cap + 12, 4, length);
        driver.config_read(cap + 16, 4)
    };
    assert_eq!(aim(&mut driver, 2, 0x200, 4), 0x4433_2211);
    assert_eq!(aim(&mut driver, 2, 0x201, 1), 0x22);
    for (bar, offset, length) in
        [(2, 0x200, 0), (2, 0x200, 3), (2, 0x200, 8), (2, 0x201, 2), (6, 0x200, 4), (255, 0, 1)]
    {
        assert_eq!(aim(&mut driver, bar, offset, length), 0, "{length} bytes at {offset:#x} of BAR {bar}");
        assert!(driver.config_write(cap + 16, 4, u32::MAX).is_none());
    }
    assert_eq!(aim(&mut driver, 0, 0x200, 4), u32::MAX, "no such BAR decodes");
    assert_eq!(aim(&mut driver, 2, u32::MAX, 1), 0xff);
    assert_eq!(aim(&mut driver, 2, 0x200, 4), 0x4433_2211);
    let _ = driver.config_write(cap + 16, 2, 0xffff);
    let _ = driver.config_write(cap + 18, 2, 0xffff);
    assert_eq!(driver.bar_read(2, 0x200, 4), 0x4433_2211, "two halves are no access of four bytes");
}

#[test]
fn a_read_of_the_isr_by_either_way_clears_it() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    driver.init();
    for offset in [0x10, 0x1a] {
        let _ = driver.common_write(offset, 2, u32::from(crate::NO_VECTOR));
    }
    let interrupts = driver.device.device().interrupts.clone().unwrap();
    interrupts.signal_config();
    assert_eq!((driver.bar_read(2, 0x100, 1), driver.bar_read(2, 0x100, 1)), (2, 0));
    interrupts.signal_queue(2);
    let mut driver = driver.without_memory();
    assert_eq!((driver.bar_read(2, 0x100, 1), driver.bar_read(2, 0x100, 1)), (1, 0));
}

#[test]
fn accesses_outside_bars_read_all_ones_and_in_gaps_zero() {
    let mut function = idle();
    for (bar, offset, len, reads) in [
        (2, 0x40, 4, 0),
        (2, 0x101, 1, 0),
        (2, 0x1000, 2, 0),
        (2, 0x1fff, 1, 0),
        (2, 0x2000, 1, 0xff),
        (2, 0x1ffe, 4, u32::MAX),
        (4, 0xffc, 4, 0),
        (4, 0x1000, 4, u32::MAX),
        (0, 0, 4, u32::MAX),
        (2, u64::MAX, 4, u32::MAX),
    ] {
        assert_eq!(driver(&mut function).bar_read(bar, offset, len), reads, "BAR {bar} offset {offset:#x}");
        assert!(driver(&mut function).bar_write(bar, offset, len, u32::MAX).is_none());
    }
}

#[test]
fn a_function_answers_for_its_own_routing_id_only() {
    let mut function = idle();
    let other = RID.wrapping_add(1);
    let command = Dword::containing(4);
    assert_eq!(function.config_read(other, command), u32::MAX);
    let _ = function.config_write(other, command, DwordWrite::full(6));
    assert_eq!(function.config_read(RID, command) & 0xffff, 0);
}

#[test]
fn queues_need_driver_ok_and_bus_master() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    assert_eq!(driver.init(), 15);
    let effects = driver.set_bus_master(false);
    assert!(effects.queues && !driver.device.is_running());
    let stopped_by = |function: &Plain| function.function_status(None).unwrap().stopped_by;
    assert_eq!(stopped_by(driver.device), Some(StoppedBy::BusMaster));
    assert_eq!(driver.device.stop_reason(true), "Bus Master Enable is clear");
    let _ = driver.set_bus_master(true);
    assert!(driver.device.is_running());
    assert_eq!(stopped_by(driver.device), None);
    assert_eq!((driver.device.device().starts, driver.device.device().resets), (2, 1));
}

/// G43: queues in D3hot and back.
#[test]
fn queues_stop_in_d3hot_and_continue_in_d0() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    driver.init();
    driver.enable_msix(4);
    let power = driver.capability(0x01, |_| true).unwrap();
    let messages = |function: &Plain| {
        let mut out = Vec::new();
        function.messages(Reach::Device, &mut out);
        out.len()
    };
    assert_eq!(messages(driver.device), 4);
    let _ = driver.config_write(power + 4, 2, 3);
    assert!(!driver.device.is_running());
    assert_eq!(messages(driver.device), 0);
    assert_eq!(driver.device.function_status(None).unwrap().stopped_by, Some(StoppedBy::D3hot));
    assert_eq!(driver.status(), 15);
    let _ = driver.config_write(power + 4, 2, 0);
    assert!(driver.device.is_running());
    assert_eq!(messages(driver.device), 4);
}

#[test]
fn a_pause_keeps_the_queue_positions_and_a_reset_does_not() {
    let mut function = threaded();
    driver(&mut function).init();
    for n in 1..=3 {
        let _ = driver(&mut function).notify(0);
        wait("the worker sees its doorbell", || kicks(&function) >= n);
    }
    let _ = driver(&mut function).set_bus_master(false);
    assert_eq!(join(&mut function), 1);
    let position = function.run.as_ref().unwrap().queues()[1].1.lock().next_avail();
    assert!(position >= 3);
    let before = kicks(&function);
    let _ = driver(&mut function).set_bus_master(true);
    wait("a worker that starts again is kicked", || kicks(&function) > before);
    let _ = driver(&mut function).set_bus_master(false);
    assert_eq!(join(&mut function), 1);
    assert!(function.run.as_ref().unwrap().queues()[1].1.lock().next_avail() > position);

    let _ = driver(&mut function).set_status(0);
    driver(&mut function).init();
    let _ = driver(&mut function).set_bus_master(false);
    join(&mut function);
    assert!(function.run.as_ref().unwrap().queues()[1].1.lock().next_avail() <= 1);
}

#[test]
fn a_doorbell_by_memory_wakes_the_worker_of_its_queue() {
    let mut function = threaded();
    driver(&mut function).init();
    wait("the worker is kicked when it starts", || kicks(&function) == 1);
    for (queue, heard) in [(0, 2), (2, 3)] {
        assert!(driver(&mut function).notify(queue).is_none());
        wait("the worker sees its doorbell", || kicks(&function) == heard);
    }
    let _ = driver(&mut function).bar_write(2, 0x1000 + 3 * 4, 2, 3);
    let _ = driver(&mut function).bar_write(2, 0x1001, 2, 0);
    let _ = driver(&mut function).set_status(0);
    join(&mut function);
    assert_eq!(kicks(&function), 3, "there is no queue 3 and no doorbell between two");
}

#[test]
fn doorbells_are_those_of_the_queues_that_run() {
    let mut function = threaded();
    let doorbells = |function: &Plain| {
        let mut out = Vec::new();
        function.doorbells(Reach::Device, &mut out);
        out
    };
    assert!(doorbells(&function).is_empty());
    driver(&mut function).init();
    let running = doorbells(&function);
    let places: Vec<_> = running.iter().map(|doorbell| (doorbell.window, doorbell.offset)).collect();
    let window = WindowId::Bar(BarIndex::ALL[2]);
    assert_eq!(places, [(window, 0x1000), (window, 0x1004), (window, 0x1008)]);
    wait("the worker is kicked when it starts", || kicks(&function) == 1);
    running[1].eventfd.write(1).unwrap();
    wait("the worker sees the eventfd", || kicks(&function) == 2);
    let _ = driver(&mut function).set_bus_master(false);
    assert!(doorbells(&function).is_empty());
}

#[test]
fn only_sendable_messages_are_listed_with_the_routing_id() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    driver.init();
    let messages = |function: &Plain| {
        let mut out = Vec::new();
        function.messages(Reach::Device, &mut out);
        out.into_iter().map(|message| (message.requester, message.address, message.data)).collect::<Vec<_>>()
    };
    assert!(messages(driver.device).is_empty());
    driver.enable_msix(4);
    let all: Vec<_> = (0..4).map(|vector| (RID, 0xfee0_0000, 0x40 + vector)).collect();
    assert_eq!(messages(driver.device), all);
    assert!(driver.bar_write(4, 16 + 12, 4, 1).messages, "vector 1 is masked");
    assert_eq!(messages(driver.device), [all[0], all[2], all[3]]);
    let _ = driver.set_bus_master(false);
    assert!(messages(driver.device).is_empty());
}

#[test]
fn a_vector_that_nothing_is_mapped_to_has_no_message() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    let _ = driver.set_bus_master(true);
    driver.enable_msix(4);
    driver.negotiate();
    assert!(driver.common_write(0x10, 2, 3).messages);
    let messages = |function: &Plain| {
        let mut out = Vec::new();
        function.messages(Reach::Device, &mut out);
        out.iter().map(|message| message.data).collect::<Vec<_>>()
    };
    assert!(messages(driver.device).is_empty(), "nothing is sent before DRIVER_OK");
    assert!(driver.set_status(15).messages, "there are messages from now on");
    assert_eq!(messages(driver.device), [0x43]);
}

#[test]
fn a_signal_of_a_masked_vector_is_its_pending_bit_and_stays() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    driver.init();
    assert_eq!(driver.bar_read(4, 0x800, 4), 0);
    driver.device.device().interrupts.as_ref().unwrap().signal_queue(1);
    assert_eq!((driver.bar_read(4, 0x800, 4), driver.bar_read(4, 0x800, 4)), (0b100, 0b100));
    assert_eq!(driver.device.transport.interrupts().eventfd(2).unwrap().read().unwrap(), 1);
}

#[test]
fn a_sendable_vector_is_not_pending_and_its_signal_stays() {
    let mut function = idle();
    let mut driver = driver(&mut function);
    driver.init();
    driver.enable_msix(4);
    let eventfd = driver.device.transport.interrupts().eventfd(2).unwrap();
    // KVM sends a signal that waits in an eventfd when the eventfd is registered, and leaves the count there.
    eventfd.write(1).unwrap();
    assert_eq!(driver.bar_read(4, 0x800, 4), 0);
    let _ = driver.set_bus_master(false);
    assert_eq!(driver.bar_read(4, 0x800, 4), 0b100, "it has to wait again");
    let _ = driver.set_bus_master(true);
    let _ = driver.bar_write(4, 2 * 16 + 12, 4, 1);
    assert_eq!(driver.bar_read(4, 0x800, 4), 0b100, "as behind its mask");
    assert_eq!(eventfd.read().unwrap(), 1);
}

#[test]
fn a_start_that_fails_asks_for_a_reset_and_works_after_it() {
    let mut function = idle();
    function.device_mut().refuse = true;
    assert_eq!(driver(&mut function).init(), 15 | 64);
    assert!(!function.is_running());
    assert_eq!(function.start_failures(), 1);
    let signal = function.transport.interrupts().eventfd(0).unwrap().read();
    assert_eq!(signal.unwrap(), 1, "the driver is notified");
    let _ = driver(&mut function).set_bus_master(false);
    let _ = driver(&mut function).set_bus_master(true);
    assert_eq!(function.start_failures(), 1, "it is not tried again before a reset");
    function.device_mut().refuse = false;
    assert_eq!(driver(&mut function).init(), 15);
    assert!(function.is_running());
}

#[test]
fn a_virtio_reset_stops_the_queues_and_keeps_config_space() {
    let mut function = threaded();
    let mut driver = driver(&mut function);
    driver.init();
    driver.enable_msix(4);
    let effects = driver.set_status(0);
    assert!(effects.queues && effects.messages);
    assert_eq!(driver.status(), 0);
    assert_eq!(driver.config_read(4, 2), 6);
    let msix = driver.capability(0x11, |_| true).unwrap();
    assert_eq!(driver.config_read(msix + 2, 2) & 0x8000, 0x8000);
    assert_eq!(join(&mut function), 1);
    assert_eq!(function.device().counters.workers.load(Ordering::Acquire), 0);
    assert_eq!(function.device().resets, 2);
}

/// G37: function level reset while queues run.
#[test]
fn an_flr_under_running_workers_leaves_a_fresh_function() {
    let mut function = threaded();
    driver(&mut function).init();
    driver(&mut function).enable_msix(4);
    let effects = driver(&mut function).flr();
    assert!(effects.queues && effects.messages && effects.windows);
    assert_eq!(effects.reset, None, "it is done");
    assert_eq!(join(&mut function), 1);
    assert_eq!(image(&function), image(&idle()));
    assert_eq!(driver(&mut function).init(), 15);
    assert!(function.is_running());
}

#[test]
fn a_conventional_reset_equals_power_on_and_is_idempotent() {
    let mut function = threaded();
    driver(&mut function).init();
    for _ in 0..2 {
        let _ = function.reset(ResetKind::Conventional);
        assert_eq!(image(&function), image(&idle()));
    }
    assert_eq!(join(&mut function), 1);
}

/// B19: the end of a function without SR-IOV.
#[test]
fn a_function_that_is_dropped_leaves_no_worker_behind() {
    let mut function = threaded();
    driver(&mut function).init();
    let counters = Arc::clone(&function.device().counters);
    wait("the worker runs", || counters.workers.load(Ordering::Acquire) == 1);
    drop(function);
    wait("the worker ends", || counters.workers.load(Ordering::Acquire) == 0);
}

#[test]
fn a_device_whose_queues_cannot_be_is_refused() {
    let error = VirtioFunction::plain(FakeDevice::new(&[256, 100]), RID, memory()).err().unwrap();
    assert_eq!(error, FunctionError::Queue(QueueError::Size { queue: 1, size: 100 }));
}

/// Everything that a guest can read of a function without side effects.
fn image(function: &Plain) -> Vec<u32> {
    let config = Dword::all().map(|reg| function.config.read(reg));
    let word = |bar, offset, len: usize| {
        let mut data = [0; 4];
        function.bar_load(BarIndex::new(bar).unwrap(), offset, &mut data[..len]);
        u32::from_le_bytes(data)
    };
    let registers = (0..0x40).flat_map(|offset| [1, 2, 4].map(|len| word(2, offset, len)));
    let msix = (0..0x900).step_by(4).map(|offset| word(4, offset, 4));
    let device = (0..8).map(|offset| word(2, 0x200 + offset, 1));
    config.chain(registers).chain(msix).chain(device).collect()
}

#[path = "pause_tests.rs"]
mod pausing;

#[path = "state_tests.rs"]
mod state;
