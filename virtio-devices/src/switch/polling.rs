//! The scheduling of a port's transmit queues: they are drained at the driver's next doorbell or, while it sends a
//! stream of frames and receives nothing, after a short time without doorbells.
//!
//! A worker that preempts the guest at each doorbell finds one frame each time, and each frame then costs an exit, two
//! thread switches and an interrupt at its receiver. So the frames of such a stream are collected for a while, as NICs
//! moderate interrupts. A request and its answer, and TCP with its acknowledgements, are not a stream.

use std::time::{Duration, Instant};

/// The longest time to collect frames, which is as long as NICs moderate interrupts.
const LONGEST: Duration = Duration::from_micros(100);
/// The shortest time.
const SHORTEST: Duration = Duration::from_micros(10);
/// The number of frames to collect: if more come in a time, the next one is shorter. A ring must not fill up.
pub(crate) const ENOUGH: u32 = 16;
/// Doorbells within this time of each other may be those of a stream.
const QUICK: Duration = Duration::from_micros(100);
/// The number of such doorbells, without reception in between, that make a stream.
const STREAM: u32 = 4;
/// The most doorbells that may be required, after attempts that collected nothing.
const DOUBTFUL: u32 = 256;
/// The fewest frames that are worth a wait.
const WORTHWHILE: u32 = 2;

/// The recent behaviour of a port's driver.
#[derive(Debug)]
pub(crate) struct Polling {
    mode: Mode,
    /// The number of quick doorbells in a row.
    streak: u32,
    /// The number of them that make a stream.
    needed: u32,
    /// The time at which the last frames were taken.
    last: Option<Instant>,
    /// Frames since then, or since the wait began.
    frames: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// The driver rings for its next frame.
    Bell,
    /// Doorbells are suppressed from now on: the queues are drained once more.
    Entering,
    /// Doorbells are suppressed, and the queues are drained at `until`, after `wait`.
    Gathering { until: Instant, wait: Duration },
}

/// The next step after a turn in which all of a port's transmit queues were drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Wait for a doorbell.
    Bell,
    /// Drain them again at once, which enables or suppresses doorbells.
    Again,
    /// Drain them after this time.
    Wait(Duration),
}

impl Polling {
    /// The state before the first doorbell.
    pub(crate) fn new() -> Self {
        Self { mode: Mode::Bell, streak: 0, needed: STREAM, last: None, frames: 0 }
    }

    /// True if doorbells are suppressed when the queues are drained.
    pub(crate) fn gathers(&self) -> bool {
        self.mode != Mode::Bell
    }

    /// Counts frames that were taken.
    pub(crate) fn took(&mut self, frames: usize) {
        self.frames = self.frames.saturating_add(u32::try_from(frames).unwrap_or(u32::MAX));
    }

    /// Returns the next step after the queues are drained. `heard` is true if the port received anything since the last
    /// time.
    pub(crate) fn drained(&mut self, heard: bool, now: Instant) -> After {
        match self.mode {
            Mode::Bell => self.rung(heard, now),
            Mode::Entering => self.wait(LONGEST, now),
            Mode::Gathering { until, .. } if now < until && !heard => After::Wait(until - now),
            Mode::Gathering { wait, .. } => self.gathered(wait, heard, now),
        }
    }

    fn rung(&mut self, heard: bool, now: Instant) -> After {
        // It was a doorbell of another queue.
        if std::mem::take(&mut self.frames) == 0 {
            return After::Bell;
        }
        let quick = self.last.replace(now).is_some_and(|last| now.saturating_duration_since(last) <= QUICK);
        if heard || !quick {
            self.streak = 0;
            return After::Bell;
        }
        self.streak += 1;
        if self.streak < self.needed {
            return After::Bell;
        }
        self.mode = Mode::Entering;
        After::Again
    }

    fn gathered(&mut self, wait: Duration, heard: bool, now: Instant) -> After {
        let frames = std::mem::take(&mut self.frames);
        if heard || frames < WORTHWHILE {
            let needed = if heard { self.needed } else { (2 * self.needed).min(DOUBTFUL) };
            let last = if frames == 0 { self.last } else { Some(now) };
            *self = Self { needed, last, ..Self::new() };
            return After::Again;
        }
        self.last = Some(now);
        self.needed = STREAM;
        let next = wait.saturating_mul(ENOUGH) / frames;
        self.wait(next.clamp(SHORTEST, LONGEST), now)
    }

    fn wait(&mut self, time: Duration, now: Instant) -> After {
        self.mode = Mode::Gathering { until: now + time, wait: time };
        After::Wait(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    /// Turns at which a frame was taken, `apart` from each other, until doorbells are suppressed.
    fn rings(polling: &mut Polling, now: &mut Instant, apart: Duration, heard: bool) -> Option<u32> {
        (1..1000).find(|_| {
            *now += apart;
            polling.took(1);
            polling.drained(heard, *now) == After::Again
        })
    }

    #[test]
    fn only_quick_unanswered_frames_count_as_a_stream() {
        let mut now = Instant::now();
        assert_eq!(rings(&mut Polling::new(), &mut now, 101 * US, false), None);
        assert_eq!(rings(&mut Polling::new(), &mut now, 50 * US, true), None);
        let mut polling = Polling::new();
        assert_eq!(rings(&mut polling, &mut now, 50 * US, false), Some(STREAM + 1));
        assert!(polling.gathers());
        assert_eq!(polling.drained(false, now), After::Wait(LONGEST));
        assert!(polling.gathers());
    }

    #[test]
    fn gathering_lasts_while_frames_arrive_and_shortens_under_load() {
        let mut now = Instant::now();
        let mut polling = Polling::new();
        rings(&mut polling, &mut now, 50 * US, false);
        polling.drained(false, now);
        for (frames, wait) in [(2, 100), (16, 100), (32, 50), (32, 25), (4, 100), (400, 10), (17, 10)] {
            // Another event has woken the worker.
            assert!(matches!(polling.drained(false, now), After::Wait(left) if left <= LONGEST));
            now += LONGEST;
            polling.took(frames);
            assert!(matches!(polling.drained(false, now), After::Wait(time) if time.as_micros() == wait), "{frames}");
        }
        now += LONGEST;
        polling.took(2);
        assert_eq!((polling.drained(true, now), polling.gathers()), (After::Again, false), "an answer");
        assert_eq!(rings(&mut polling, &mut now, 50 * US, false), Some(STREAM));
    }

    #[test]
    fn gathering_that_fails_is_tried_less_and_less_often() {
        let (mut polling, mut now) = (Polling::new(), Instant::now());
        let mut tries = Vec::new();
        for _ in 0..9 {
            tries.extend(rings(&mut polling, &mut now, 50 * US, false));
            polling.drained(false, now);
            now += LONGEST;
            polling.took(1);
            assert_eq!((polling.drained(false, now), polling.gathers()), (After::Again, false));
        }
        assert_eq!(tries, [5, 8, 16, 32, 64, 128, 256, 256, 256]);
    }
}
