//! Log lines about peers that are not a source: rate-limited, with a count of the others.

use std::time::{Duration, Instant};

/// Limit on lines per [`PERIOD`].
const MOST: u32 = 10;
/// Period of the rate limit.
const PERIOD: Duration = Duration::from_secs(60);

/// Refusals of a target.
#[derive(Debug)]
pub(super) struct Refusals {
    since: Instant,
    written: u32,
    unwritten: u64,
    write: fn(String),
}

impl Refusals {
    /// Starts a period. `write` logs a line.
    pub(super) const fn new(now: Instant, write: fn(String)) -> Self {
        Self { since: now, written: 0, unwritten: 0, write }
    }

    /// Logs or counts a refusal.
    pub(super) fn add(&mut self, why: &str, now: Instant) {
        self.update(now);
        if self.written < MOST {
            self.written += 1;
            (self.write)(format!("refused a connection that is not from a source; still waiting for one: {why}"));
        } else {
            self.unwritten += 1;
        }
    }

    /// Starts a new period if the current one is over.
    pub(super) fn update(&mut self, now: Instant) {
        if now.saturating_duration_since(self.since) >= PERIOD {
            self.log_unwritten();
            (self.since, self.written) = (now, 0);
        }
    }

    /// Logs the number of refusals that were not logged.
    fn log_unwritten(&mut self) {
        if self.unwritten > 0 {
            let count = std::mem::take(&mut self.unwritten);
            (self.write)(format!("{count} more connections were refused"));
        }
    }
}

impl Drop for Refusals {
    fn drop(&mut self) {
        self.log_unwritten();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    #[test]
    fn a_flood_of_strangers_is_logged_by_its_number() {
        let lines = || LINES.take();
        let now = Instant::now();
        let mut refusals = Refusals::new(now, |line| LINES.with_borrow_mut(|lines| lines.push(line)));
        (0..1000).for_each(|_| refusals.add("no source", now));
        assert_eq!(lines().len(), MOST as usize);
        refusals.update(now + PERIOD);
        assert_eq!(lines(), ["990 more connections were refused"]);
        (0..11).for_each(|_| refusals.add("no source", now + PERIOD));
        assert_eq!(lines().len(), MOST as usize);
        drop(refusals);
        assert_eq!(lines(), ["1 more connections were refused"]);
    }
}
