//! Interrupts of an X550's driver that must not be lost: of a queue that stops, before a worker runs, while workers are
//! busy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::*;
use crate::frames::net_protocol::header::HEADER;
use crate::frames::policy::Head;
use crate::os::clock;
use crate::switch::frame::Frame;
use crate::switch::frame::body::Body;
use crate::switch::mailbox::WorkerMailbox;
use crate::switch::rx_run::{Delivery, DeliveryReason, RxScratch};
use crate::switch::switch_core::{Deferred, SwitchCore};
use crate::switch::table::Route;
use crate::testing::driver_queue::eventually;

/// Delivers a frame to VF 1 as a sender does whose batch has not ended: the driver has not been notified.
fn deliver_silently(card: &Card) {
    let open = card.switch.0.core().open_port(2).unwrap();
    let (bytes, memory, mut scratch) = (frame(mac(0), mac(1), 100), open.nic.memory.pass(), RxScratch::default());
    let head = Head::of(&bytes).unwrap();
    let new = head.unchanged();
    let known = new.bytes().len();
    let whole = Frame::new([0; HEADER], &new, head, bytes.len(), Ok(Route::One(2)));
    let mut rx = open.rx(0).unwrap().lock();
    let mut run = rx.start(open.receiver(), &memory, &mut scratch).unwrap().unwrap();
    let delivery = run.deliver(&whole, &Body::Private(&bytes[known..]), DeliveryReason::Sender);
    assert_eq!((delivery, run.finish().is_ok()), (Delivery::Done, true));
}

/// Gives VF 1's queues vector 0.
fn with_vector(card: &mut Card) {
    for (offset, value) in [(0x110, 7), (0x120, 0x8080), (0x108, 1)] {
        card.write_vf(offset, value);
    }
}

#[test]
fn a_queue_that_stops_reports_its_last_frames() {
    let mut card = Card::new();
    with_vector(&mut card);
    deliver_silently(&card);
    let interrupts = |card: &Card| card.counter(Place::Vf(1), Counter::Interrupts);
    assert_eq!(interrupts(&card), 0);
    // RXDCTL.ENABLE. The sender's batch ends later, and finds no queue.
    card.write(0x1028 + 0x80, 0);
    assert_eq!((interrupts(&card), card.frames(2).len()), (1, 1));
}

#[test]
fn a_broken_queue_reports_its_last_frames() {
    let mut card = Card::new();
    with_vector(&mut card);
    deliver_silently(&card);
    card.switch.0.core().open_port(2).unwrap().rx(0).unwrap().lock().give_up();
    card.run();
    card.send(0, &frame(mac(0), mac(1), 100));
    assert_eq!(card.counter(Place::Vf(1), Counter::Interrupts), 1);
}

/// A NIC on a switch with a thread, which starts with the first queue. The switch ends last.
fn threaded() -> (X550Sriov, Switch) {
    let spec = SwitchSpec {
        id: "nic".into(),
        mode: SwitchMode::Veb,
        ports: VFS + 1,
        workers: 1,
        uplink: None,
        uplink_rate: None,
    };
    let switch = Switch::new(spec).unwrap();
    let memory = Memory::new(GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap());
    let vfs = VfPlacement { total_vfs: VFS, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
    let spec = X550Spec { id: "nic".into(), model: X550Model::X550, mac: mac(9), total_vfs: VFS };
    let placement = Placement { segment: 0, rid: PF, vfs: Some(vfs) };
    (X550Sriov::new(spec, placement, &memory, switch.x550(mac(9), VFS)).unwrap(), switch)
}

fn write_all(device: &mut X550Sriov, registers: &[(u64, u32)]) {
    for (offset, value) in registers {
        let _ = device.mmio_write(WindowId::Bar(REGISTERS_BAR), *offset, &value.to_le_bytes());
    }
}

/// Writes by which vector 0 clears itself, and sends a message, which begins an interval.
const FIRST: [(u64, u32); 4] = [(0x810, 1), (0x820, 0xff8), (0x880, 1), (0x808, 1)];
/// Writes by which its cause is set again while it is masked.
const AGAIN: [(u64, u32); 3] = [(0x888, 1), (0x808, 1), (0x880, 1)];

/// X30: EITR.
#[test]
fn before_any_queue_runs_an_enable_is_answered_at_once() {
    let (mut device, _switch) = threaded();
    write_all(&mut device, &FIRST);
    write_all(&mut device, &AGAIN);
    let nic = device.nic();
    assert_eq!((nic.due(), nic.lock().save().vectors[0]), (None, 0), "the message was sent");
}

#[test]
fn an_enable_that_waits_wakes_the_thread_of_the_switch() {
    let (mut device, _switch) = threaded();
    let _ = device.config_write(PF, Dword::containing(4), DwordWrite::full(6));
    // A transmit ring of the PF starts the thread, which has nothing to wait for.
    write_all(&mut device, &[(0x6008, 128), (0x4a80, 1), (0x6028, 1 << 25)]);
    // At first it makes a table, and wakes by itself.
    for _ in 0..50 {
        eventually("an enable within the interval of a millisecond", || {
            write_all(&mut device, &FIRST);
            write_all(&mut device, &AGAIN);
            device.nic().due().is_some()
        });
        eventually("the end of the interval", || device.nic().due().is_none());
        assert_eq!(device.nic().lock().save().vectors[0], 0, "the message was sent");
    }
}

/// Interrupts that are always due.
struct AlwaysDue(Arc<AtomicU64>);

impl Deferred for AlwaysDue {
    fn due(&self) -> Option<Instant> {
        Some(clock::now())
    }

    fn send(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn messages_are_sent_between_the_turns_of_busy_ports() {
    let (mut lan, mut worker) = crate::switch::tests::rig::Lan::stepped(5);
    let sent = Arc::new(AtomicU64::new(0));
    lan.switch.0.core().send_interrupts_of(Box::new(AlwaysDue(Arc::clone(&sent))));
    // All ports have their first turn.
    worker.step(Some(Duration::ZERO));
    sent.store(0, Ordering::Relaxed);
    worker.step(Some(Duration::ZERO));
    let idle = sent.swap(0, Ordering::Relaxed);
    for port in 1..5 {
        lan.nics[usize::from(port)].queue(&frame(mac(port), mac(77), 60));
        lan.nics[usize::from(port)].kick();
    }
    worker.step(Some(Duration::ZERO));
    assert_eq!((idle, sent.load(Ordering::Relaxed)), (1, 1 + 4), "at the beginning, and after each turn");
}

#[test]
fn a_message_that_waits_wakes_all_workers() {
    let spec =
        SwitchSpec { id: "nic".into(), mode: SwitchMode::Veb, ports: 2, workers: 3, uplink: None, uplink_rate: None };
    let core = SwitchCore::new(spec).unwrap();
    let is_woken = |mailbox: &&WorkerMailbox| mailbox.wait(Some(Duration::ZERO), &mut Vec::new());
    let woken = || core.mailboxes().iter().filter(is_woken).count();
    while woken() != 0 {}
    core.watch_interrupts();
    assert_eq!(woken(), 3);
}
