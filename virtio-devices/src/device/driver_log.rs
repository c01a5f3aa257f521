//! Lines of the log about the actions of a driver (`-vv`), at a limited rate: a guest can cause any number of them.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::rate_limiter::{RateLimit, RateLimiter};
use crate::os::clock;

/// The lines of a function: some fifty starts of a driver at once, then one per second.
const LINES: RateLimit = RateLimit { size: 1024, one_time_burst: 0, refill: Duration::from_secs(1024) };

/// The log of one function's driver.
pub struct DriverLog {
    /// The function, as lines begin.
    name: String,
    budget: Mutex<Budget>,
}

struct Budget {
    limiter: RateLimiter,
    /// Number of lines left out since the last line.
    missed: u64,
    /// Number of lines.
    logged: u64,
}

impl DriverLog {
    /// Creates the log of the function `name`.
    pub fn new(name: &str) -> Self {
        let limiter = RateLimiter::of_ops(LINES, clock::now());
        Self { name: name.to_string(), budget: Mutex::new(Budget { limiter, missed: 0, logged: 0 }) }
    }

    /// Logs `text`, unless too many lines were logged. Called with the device's lock held.
    pub(crate) fn log(&self, text: impl FnOnce() -> String) {
        if let Some(line) = self.line(text, clock::now()) {
            log::debug!("{line}");
        }
    }

    /// Number of lines logged so far.
    #[cfg(test)]
    pub(crate) fn logged(&self) -> u64 {
        self.budget.lock().logged
    }

    fn line(&self, text: impl FnOnce() -> String, now: Instant) -> Option<String> {
        let mut budget = self.budget.lock();
        if !budget.limiter.allows(1, now) {
            budget.missed = budget.missed.saturating_add(1);
            return None;
        }
        budget.limiter.take_op(now);
        budget.logged = budget.logged.saturating_add(1);
        let (name, text) = (&self.name, text());
        Some(match std::mem::take(&mut budget.missed) {
            0 => format!("{name}: {text}"),
            missed => format!("{name}: {text} ({missed} earlier lines not logged)"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_driver_are_limited_and_those_left_out_counted() {
        let (log, now) = (DriverLog::new("pf0v3"), clock::now());
        let line = |now| log.line(|| "driver status 1".to_string(), now);
        let logged = (0..5000).filter_map(|_| line(now)).count();
        assert!((1024..=1026).contains(&logged), "{logged}");
        let later = line(now + Duration::from_secs(3)).unwrap();
        assert_eq!(later, format!("pf0v3: driver status 1 ({} earlier lines not logged)", 5000 - logged));
        assert_eq!(line(now + Duration::from_secs(3)).unwrap(), "pf0v3: driver status 1");
    }
}
