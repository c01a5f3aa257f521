//! The time for which senders have waited for a receiver's buffers. It is counted for the receiver, over all of its
//! queues and senders.

use std::time::{Duration, Instant};

/// The time after which frames wait again for a receiver.
const PERIOD: Duration = Duration::from_secs(1);

/// The waits for a receiver.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// The beginning of the present period.
    began: Option<Instant>,
    /// The finished waits of this period.
    over: Duration,
}

impl Waits {
    /// Returns the beginning of the present period, which may be now.
    pub(crate) fn period(&mut self, now: Instant) -> Instant {
        match self.began {
            Some(began) if now.saturating_duration_since(began) < PERIOD => began,
            _ => {
                *self = Self { began: Some(now), over: Duration::ZERO };
                now
            }
        }
    }

    /// Returns the time that a frame may still wait, if a queue has been waiting since `since` (not at all if `None`)
    /// and all waits of a period may take `budget`; `None` if it may not. A wait begins with this.
    pub(crate) fn left(&mut self, since: &mut Option<Instant>, budget: Duration, now: Instant) -> Option<Duration> {
        let began = self.period(now);
        // A wait of an earlier period may have ended unnoticed: its sender may have changed its frame.
        let since = since.insert(since.filter(|since| *since >= began).unwrap_or(now));
        let waited = self.over + now.saturating_duration_since(*since);
        budget.checked_sub(waited).filter(|left| !left.is_zero())
    }

    /// Ends a queue's wait.
    pub(crate) fn end(&mut self, since: Instant, now: Instant) {
        let since = self.began.map_or(since, |began| began.max(since));
        self.over += now.saturating_duration_since(since);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(1);
    const US: Duration = Duration::from_micros(1);

    #[test]
    fn waits_of_all_queues_together_last_a_millisecond_in_a_second() {
        let (start, mut waits, mut queues) = (Instant::now(), Waits::default(), [None; 2]);
        assert_eq!(waits.left(&mut queues[0], BUDGET, start), Some(BUDGET));
        assert_eq!(waits.left(&mut queues[1], BUDGET, start), Some(BUDGET));
        let now = start + 400 * US;
        assert_eq!(waits.left(&mut queues[0], BUDGET, now), Some(600 * US));
        waits.end(queues[0].take().unwrap(), now);
        assert_eq!(waits.left(&mut queues[1], BUDGET, now), Some(200 * US));
        waits.end(queues[1].take().unwrap(), now);
        assert_eq!(waits.left(&mut queues[0], BUDGET, now), Some(200 * US));
        assert_eq!(waits.left(&mut queues[0], BUDGET, now + 200 * US), None);
        assert_eq!(waits.left(&mut queues[0], BUDGET, now + 300 * US), None);
        assert_eq!(waits.left(&mut queues[0], BUDGET, start + PERIOD), Some(BUDGET));
    }
}
