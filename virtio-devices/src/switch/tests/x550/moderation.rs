//! Interrupts of an X550's driver that wait, and doorbells that a busy worker does not need.

use super::*;
use crate::os::clock::testing::StoppedClock;
use pci::BarIndex;

const VF: Place = Place::Vf(1);
const VF_QUEUE: u16 = 2;
/// The registers of VF 1 in the VFs' BAR 0.
const VF_REGISTERS: u64 = 0x4000;

impl Card {
    pub(super) fn write_vf(&mut self, offset: u64, value: u32) {
        let window = WindowId::VfBar(BarIndex::new(0).unwrap());
        let _ = self.device.mmio_write(window, VF_REGISTERS + offset, &value.to_le_bytes());
    }

    /// A card whose VF 1 has its queues at vector 0, which clears and masks itself, with an interval of 50 µs.
    fn moderated() -> Self {
        let mut card = Self::new();
        card.write(0x898, 1 << 30);
        for (offset, value) in [(0x110, 7), (0x114, 7), (0x120, 0x8080), (0x820, 200), (0x108, 1)] {
            card.write_vf(offset, value);
        }
        card
    }

    /// Interrupts that VF 1 has got.
    fn interrupts(&self) -> u64 {
        self.counter(VF, Counter::Interrupts)
    }
}

/// X30: EITR.
#[test]
fn a_frame_within_the_interval_interrupts_at_its_end() {
    let clock = StoppedClock::new();
    let mut card = Card::moderated();
    let to_vf = frame(mac(0), mac(1), 100);
    card.send(0, &to_vf);
    assert_eq!((card.interrupts(), card.device.nic().due()), (1, None));
    card.write_vf(0x108, 1);
    clock.advance(Duration::from_micros(20));
    card.send(0, &to_vf);
    assert_eq!((card.interrupts(), card.frames(VF_QUEUE).len()), (1, 2));
    assert_eq!(card.worker.timeout(None), Some(Duration::from_micros(30)));
    clock.advance(Duration::from_micros(30));
    card.run();
    assert_eq!(card.interrupts(), 2);
    // Masked by its message: the frame is reported at the next enable.
    clock.advance(Duration::from_micros(100));
    card.send(0, &to_vf);
    card.run();
    assert_eq!(card.interrupts(), 2);
}

#[test]
fn a_sent_frame_is_reported_when_one_arrives_or_late() {
    let clock = StoppedClock::new();
    let mut card = Card::moderated();
    card.send(VF_QUEUE, &frame(mac(1), mac(0), 100));
    assert_eq!((card.frames(0).len(), card.interrupts()), (1, 0));
    card.send(0, &frame(mac(0), mac(1), 100));
    assert_eq!(card.interrupts(), 1);
    card.write_vf(0x108, 1);
    card.send(VF_QUEUE, &frame(mac(1), mac(0), 100));
    clock.advance(Duration::from_micros(249));
    card.run();
    assert_eq!(card.interrupts(), 1);
    clock.advance(Duration::from_micros(1));
    card.run();
    assert_eq!(card.interrupts(), 2);
}

#[test]
fn a_pause_sends_the_interrupts_that_wait() {
    let _clock = StoppedClock::new();
    let mut card = Card::moderated();
    for _ in 0..2 {
        card.send(0, &frame(mac(0), mac(1), 100));
        card.write_vf(0x108, 1);
    }
    assert!(card.device.nic().due().is_some());
    drop(card.device.pause());
    assert_eq!(card.device.nic().due(), None);
    // The cause went with the message: nothing is left to be sent.
    let nic = card.device.nic().lock().save();
    assert_eq!(nic.vfs[1].vectors[0], 0);
}

#[test]
fn an_enable_that_waits_sets_the_time_of_a_worker() {
    let clock = StoppedClock::new();
    let mut card = Card::moderated();
    card.send(0, &frame(mac(0), mac(1), 100));
    // Software's cause, while the vector is masked.
    card.write_vf(0x104, 1);
    card.write_vf(0x108, 1);
    assert_eq!(card.worker.timeout(None), Some(Duration::from_micros(50)));
    clock.advance(Duration::from_micros(50));
    card.run();
    assert_eq!(card.interrupts(), 2);
}

#[test]
fn a_stream_of_frames_rings_no_doorbell() {
    let clock = StoppedClock::new();
    let mut card = Card::new();
    let away = frame(mac(1), mac(77), 60);
    for _ in 0..5 {
        card.send(VF_QUEUE, &away);
        clock.advance(Duration::from_micros(10));
    }
    assert_eq!(card.sent().len(), 5);
    let kicks = card.counter(VF, Counter::Kicks);
    for sent in [3, 4] {
        (0..sent).for_each(|_| card.send(VF_QUEUE, &away));
        assert_eq!((card.sent().len(), card.counter(VF, Counter::Kicks)), (0, kicks), "they are gathered");
        clock.advance(Duration::from_micros(100));
        card.run();
        assert_eq!(card.sent().len(), sent);
    }
    // A frame that arrives ends the stream; then each frame rings again.
    card.send(0, &frame(mac(0), mac(1), 60));
    clock.advance(Duration::from_micros(100));
    card.run();
    card.send(VF_QUEUE, &away);
    assert_eq!((card.sent().len(), card.counter(VF, Counter::Kicks)), (1, kicks + 1));
}

impl Card {
    /// Sends frames of VF 1 whose 60 bytes are in four descriptors each.
    fn send_in_quarters(&mut self, frames: usize) {
        let at = self.store(VF_QUEUE, &frame(mac(1), mac(77), 60));
        let part = data(15) & !(1 << 24 | 1 << 27);
        let one = [[at, 0, part, 60 << 14], [at + 15, 0, part, 0], [at + 30, 0, part, 0], [at + 45, 0, data(15), 0]];
        self.send_descriptors(VF_QUEUE, &one.repeat(frames));
    }
}

#[test]
fn a_small_ring_is_reported_before_it_is_full() {
    let _clock = StoppedClock::new();
    let mut card = Card::moderated();
    // A quarter of a ring of 32 descriptors.
    card.send_in_quarters(1);
    assert_eq!(card.interrupts(), 0);
    card.send_in_quarters(1);
    assert_eq!((card.interrupts(), card.sent().len()), (1, 2));
}

#[test]
fn a_stream_that_fills_a_small_ring_is_drained_more_often() {
    let clock = StoppedClock::new();
    let mut card = Card::new();
    for _ in 0..5 {
        card.send(VF_QUEUE, &frame(mac(1), mac(77), 60));
        clock.advance(Duration::from_micros(10));
    }
    let us = Duration::from_micros;
    // Half of the ring in 100 us, with four frames.
    for (frames, next) in [(2, 100), (4, 50)] {
        card.send_in_quarters(frames);
        clock.advance(us(100));
        card.worker.step(Some(Duration::ZERO));
        assert_eq!(card.worker.timeout(None).map(|wait| wait.min(us(100))), Some(us(next)), "{frames} frames");
    }
}

#[test]
fn a_bell_rings_once_until_it_is_heard() {
    let bell = crate::switch::port::Bell::default();
    assert_eq!((bell.ring(), bell.ring()), (true, false));
    bell.heard();
    assert!(bell.ring());
    bell.heard();
    bell.silence(true);
    assert!(!bell.ring());
    bell.silence(false);
    assert!(bell.ring());
}
