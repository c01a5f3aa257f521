//! The clock of a watchdog.

use std::time::{Duration, Instant};

/// Called when the pings have ended. Must not block.
pub type Expiry = dyn Fn() + Send + Sync;

/// The times of a watchdog.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// Interval at which the watchdog checks the last ping.
    pub interval: Duration,
    /// The maximum age of the last ping at a check.
    pub limit: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { interval: Duration::from_secs(15), limit: Duration::from_secs(20) }
    }
}

/// A running clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    times: Times,
    last_ping: Instant,
    next_look: Instant,
}

impl Clock {
    /// Starts a clock, with a ping.
    pub(super) fn start(times: Times, now: Instant) -> Self {
        Self { times, last_ping: now, next_look: now + times.interval }
    }

    /// Notes a ping.
    pub(super) fn ping(&mut self, now: Instant) {
        self.last_ping = now;
    }

    /// Checks the last ping if it is time to. Returns true if the pings have ended.
    pub(super) fn look(&mut self, now: Instant) -> bool {
        if now < self.next_look {
            return false;
        }
        self.next_look = now + self.times.interval;
        now.saturating_duration_since(self.last_ping) > self.times.limit
    }

    /// Time until the next check.
    pub(super) fn until_look(&self, now: Instant) -> Duration {
        self.next_look.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_pings_are_found_at_the_first_check_after_20_seconds() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut clock = Clock::start(Times::default(), begin);
        assert_eq!(clock.until_look(at(5)), Duration::from_secs(10));
        assert!(!clock.look(at(14)) && !clock.look(at(15)), "the ping of the beginning is young enough");
        clock.ping(at(24));
        assert!(!clock.look(at(30)) && !clock.look(at(44)), "the second ping is, too; and it is not time to look");
        assert_eq!(clock.until_look(at(50)), Duration::ZERO);
        assert!(clock.look(at(45)));
        let mut silent = Clock::start(Times::default(), begin);
        assert!(!silent.look(at(15)) && !silent.look(at(29)) && silent.look(at(30)));
    }
}
