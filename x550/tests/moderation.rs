//! Intervals of interrupts: messages that wait, and none that is lost.

mod common;

use common::{PF, nic, sent, write};
use x550::{Direction, Nic, Place};

const VF: Place = Place::Vf(1);
/// VTEIMS of vector 0.
const ENABLE: u64 = 0x108;
/// A queue of [`VF`], and one of the PF.
const QUEUES: (u16, u16) = (4, 127);

/// A NIC whose VF 1 has its queue at vector 0 and whose PF has queue 127 at vector 40, with intervals of 50 µs.
/// Vectors clear and mask themselves, and are enabled.
fn ready() -> Nic {
    let mut nic = nic();
    set_up(&mut nic);
    nic.set_time(1000);
    nic
}

/// Sets the NIC up after a reset of anything.
fn set_up(nic: &mut Nic) {
    for (place, offset, value) in [
        (PF, 0x18, 1 << 14),
        (PF, 0x11050, 2),
        (PF, 0x51b0, 1),
        (PF, 0x898, 1 << 30),
        (PF, 0x900 + 4 * 63, 0xa8a8_0000),
        (PF, 0xad4, u32::MAX),
        (PF, 0xaa4, u32::MAX),
        (PF, 0x12300 + 4 * 16, 200),
        (VF, 0x110, 7),
        (VF, 0x114, 7),
        (VF, 0x120, 0x8080),
        (VF, ENABLE, 7),
        (VF, 0x820, 200),
    ] {
        write(nic, place, offset, value);
    }
    assert_eq!((nic.owner(QUEUES.0), nic.owner(QUEUES.1)), ((VF, 0), (PF, 127)));
}

/// A reset, the messages that wait after it, and the time of the first; 0 without any.
type Reset = (fn(&mut Nic), &'static [(Place, u64)], u64);

fn received(nic: &mut Nic, queue: u16) -> Vec<(Place, u64)> {
    nic.queue_event(Direction::Receive, queue).vectors
}

/// The messages that are sent at the time `now` without an access.
fn sent_at(nic: &mut Nic, now: u64) -> Vec<(Place, u64)> {
    nic.set_time(now);
    nic.send_deferred().vectors
}

/// X30: EITR.
#[test]
fn another_cause_of_a_vector_leaves_its_queue_waiting() {
    // Queue 127 and all other causes share vector 0, which clears itself and is not masked by its message.
    let mut nic = nic();
    for (offset, value) in [(0x900 + 4 * 63, 0x8080_0000), (0xa00, 0x8000), (0x820, 200), (0x810, 1), (0x880, 1)] {
        write(&mut nic, PF, offset, value);
    }
    // A changed link, whose cause is set before or after it is enabled.
    for (now, registers) in [(1000, [0x808, 0x880]), (2000, [0x880, 0x808])] {
        nic.set_time(now);
        assert_eq!((received(&mut nic, QUEUES.1), received(&mut nic, QUEUES.1)), (vec![(PF, 1)], vec![]));
        assert_eq!(registers.map(|register| sent(&mut nic, PF, register, 1 << 20)), [vec![], vec![(PF, 1)]]);
        assert_eq!((nic.due(), sent_at(&mut nic, now + 49)), (Some(now + 50), vec![]));
        assert_eq!((sent_at(&mut nic, now + 50), nic.due()), (vec![(PF, 1)], None));
        [0x888, 0x800].into_iter().for_each(|register| write(&mut nic, PF, register, 1 << 20));
    }
}

/// X30: EITR.
#[test]
fn an_event_within_the_interval_is_sent_at_its_end() {
    for (place, queue, enable, bit, message) in
        [(VF, QUEUES.0, ENABLE, 1, (VF, 1)), (PF, QUEUES.1, 0xaa4, 1 << 8, (PF, 1 << 40))]
    {
        let mut nic = ready();
        assert_eq!((received(&mut nic, queue), nic.due()), (vec![message], None));
        assert_eq!(sent(&mut nic, place, enable, bit), [], "no cause");
        nic.set_time(1020);
        assert_eq!((received(&mut nic, queue), received(&mut nic, queue), nic.due()), (vec![], vec![], Some(1050)));
        assert_eq!((sent_at(&mut nic, 1049), sent_at(&mut nic, 1050)), (vec![], vec![message]));
        assert_eq!((nic.due(), sent_at(&mut nic, 2000)), (None, vec![]), "once");
        assert_eq!((sent(&mut nic, place, enable, bit), received(&mut nic, queue)), (vec![], vec![message]));
    }
}

#[test]
fn a_vector_that_is_masked_at_the_end_waits_for_its_enable() {
    let mut nic = ready();
    let first = received(&mut nic, QUEUES.0);
    assert_eq!((first, received(&mut nic, QUEUES.0), nic.due()), (vec![(VF, 1)], vec![], Some(1050)));
    assert_eq!((sent_at(&mut nic, 1050), nic.due()), (vec![], None), "it masked itself");
    assert_eq!(sent(&mut nic, VF, ENABLE, 1), [(VF, 1)]);
    // The message of the enable has begun an interval.
    assert_eq!((received(&mut nic, QUEUES.0), nic.due()), (vec![], Some(1100)));
    assert_eq!(sent(&mut nic, VF, ENABLE, 1), [], "an enable within the interval");
    write(&mut nic, VF, 0x10c, 1);
    assert_eq!(sent_at(&mut nic, 1100), [], "disabled by VTEIMC");
    assert_eq!(sent(&mut nic, VF, ENABLE, 1), [(VF, 1)]);
}

#[test]
fn a_cause_that_was_cleared_sends_nothing_at_the_end() {
    let mut nic = ready();
    received(&mut nic, QUEUES.0);
    write(&mut nic, VF, ENABLE, 1);
    received(&mut nic, QUEUES.0);
    write(&mut nic, VF, 0x100, 1);
    assert_eq!((sent_at(&mut nic, 1050), received(&mut nic, QUEUES.0)), (vec![], vec![(VF, 1)]));
}

#[test]
fn an_enable_that_must_wait_says_so_once() {
    let mut nic = ready();
    received(&mut nic, QUEUES.0);
    // Software's cause is not moderated, but its vector is disabled: nothing waits yet.
    assert_eq!((sent(&mut nic, VF, 0x104, 1), nic.due()), (vec![], None));
    let mut enable = || nic.write(VF, ENABLE, &1_u32.to_le_bytes()).moderation;
    assert_eq!((enable(), enable()), (true, false));
    assert_eq!((nic.due(), sent_at(&mut nic, 1050)), (Some(1050), vec![(VF, 1)]));
}

#[test]
fn causes_of_software_and_the_mailbox_do_not_wait() {
    let mut nic = ready();
    received(&mut nic, QUEUES.0);
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!(sent(&mut nic, VF, 0x104, 1), [(VF, 1)]);
    write(&mut nic, VF, 0x140, 0x80);
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!(sent(&mut nic, PF, 0x4b04, 1), [(VF, 1)]);
}

#[test]
fn without_an_interval_nothing_waits_and_a_new_one_ends_it() {
    let mut nic = ready();
    received(&mut nic, QUEUES.0);
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!(received(&mut nic, QUEUES.0), []);
    assert_eq!(sent(&mut nic, VF, 0x820, 400), [], "a longer one is for the next message");
    assert_eq!((nic.due(), sent(&mut nic, VF, 0x820, 0)), (Some(1050), vec![(VF, 1)]));
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!((received(&mut nic, QUEUES.0), nic.due()), (vec![(VF, 1)], None));
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!(nic.frames_sent(QUEUES.0, 1, 60).vectors, [(VF, 1)]);
}

#[test]
fn frames_that_were_sent_are_reported_with_the_next_message() {
    let mut nic = ready();
    write(&mut nic, PF, 0x6000 + 0x40 * 4 + 8, 512);
    assert_eq!((nic.frames_sent(QUEUES.0, 1, 60).vectors, nic.due()), (vec![], Some(1250)));
    assert_eq!((received(&mut nic, QUEUES.0), nic.due()), (vec![(VF, 1)], None));
    write(&mut nic, VF, ENABLE, 1);
    nic.set_time(2000);
    assert_eq!((nic.frames_sent(QUEUES.0, 1, 60).vectors, sent_at(&mut nic, 2249)), (vec![], vec![]));
    assert_eq!(sent_at(&mut nic, 2250), [(VF, 1)], "by itself");
    write(&mut nic, VF, ENABLE, 1);
    nic.set_time(3000);
    // A quarter of the ring, or many bytes.
    assert_eq!(
        (nic.frames_sent(QUEUES.0, 7, 60).vectors, nic.frames_sent(QUEUES.0, 1, 60).vectors),
        (vec![], vec![(VF, 1)])
    );
    write(&mut nic, VF, ENABLE, 1);
    nic.set_time(4000);
    assert_eq!(nic.frames_sent(QUEUES.0, 2, 129 << 10).vectors, [(VF, 1)]);
    assert_eq!(nic.frames_sent(128, 2, 129 << 10).vectors, []);
    let _ = nic.frames_sent(0, 1, 1);
    assert_eq!(nic.due(), None, "a queue without a vector");
}

#[test]
fn what_waits_is_sent_at_once_before_a_save() {
    let mut nic = ready();
    for queue in [QUEUES.0, QUEUES.1] {
        received(&mut nic, queue);
    }
    write(&mut nic, VF, ENABLE, 1);
    write(&mut nic, PF, 0xaa4, 1 << 8);
    for queue in [QUEUES.0, QUEUES.1] {
        assert_eq!(received(&mut nic, queue), []);
    }
    assert_eq!(nic.flush(Some(VF)).vectors, [(VF, 1)]);
    assert_eq!((nic.flush(None).vectors, nic.due()), (vec![(PF, 1 << 40)], None));
    let _ = nic.frames_sent(QUEUES.0, 1, 60);
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!(nic.flush(None).vectors, [(VF, 1)]);
    let state = nic.save();
    nic.restore(&state).unwrap();
    write(&mut nic, VF, ENABLE, 1);
    assert_eq!(received(&mut nic, QUEUES.0), [(VF, 1)], "no interval runs");
}

#[test]
fn resets_end_intervals_without_a_message() {
    // A message of each function, and another that waits for the end of its interval.
    let waits = || {
        let mut nic = ready();
        for (place, queue, enable, bit) in [(VF, QUEUES.0, ENABLE, 1), (PF, QUEUES.1, 0xaa4, 1 << 8)] {
            assert_eq!(received(&mut nic, queue).len(), 1);
            write(&mut nic, place, enable, bit);
            assert_eq!(received(&mut nic, queue), []);
        }
        nic
    };
    let both = vec![(PF, 1 << 40), (VF, 1)];
    assert_eq!(sent_at(&mut waits(), 5000), both, "without a reset");
    let resets: [Reset; 3] = [
        (|nic| drop(nic.reset_vf(1)), &[(PF, 1 << 40)], 1050),
        (|nic| write(nic, PF, 0, 1 << 26), &[(VF, 1)], 1050),
        (|nic| drop(nic.reset()), &[], 0),
    ];
    for (reset, left, due) in resets {
        let mut nic = waits();
        reset(&mut nic);
        assert_eq!(nic.due(), Some(due).filter(|due| *due != 0), "{left:?}");
        // A function that was reset can send a message again, although the old interval would not have ended.
        let mut later = nic.clone();
        set_up(&mut later);
        for (place, queue, message) in [(PF, QUEUES.1, 1 << 40), (VF, QUEUES.0, 1)] {
            let is_left = left.contains(&(place, message));
            assert_eq!(received(&mut later, queue).is_empty(), is_left, "{place:?}");
        }
        assert_eq!((sent_at(&mut nic, 5000), nic.due()), (left.to_vec(), None));
    }
}
