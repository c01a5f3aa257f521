//! Throttling of a guest that writes too fast: its vCPUs are held for a share of the time.

use std::time::{Duration, Instant};

/// Period of the throttle.
const PERIOD: Duration = Duration::from_millis(50);

/// Throttle: vCPUs held or running, and the time of the next change.
#[derive(Debug)]
pub(super) struct Throttle {
    is_slow: bool,
    until: Instant,
}

impl Throttle {
    /// Starts with running vCPUs.
    pub(super) fn new() -> Self {
        Self { is_slow: false, until: Instant::now() }
    }

    /// Applies `share`, in percent. Returns the new state of the vCPUs if it changes, true for held, and the time to
    /// the next change; `None` for the time once throttling is off.
    pub(super) fn follow(&mut self, share: u8, now: Instant) -> (Option<bool>, Option<Duration>) {
        if share == 0 {
            return (self.set(false), None);
        }
        let mut change = None;
        if now >= self.until {
            let time = if self.is_slow { 100_u8.saturating_sub(share) } else { share };
            self.until = now + PERIOD * time.into() / 100;
            change = self.set(!self.is_slow);
        }
        (change, Some(self.until.saturating_duration_since(now)))
    }

    fn set(&mut self, is_slow: bool) -> Option<bool> {
        (std::mem::replace(&mut self.is_slow, is_slow) != is_slow).then_some(is_slow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_throttled_by_their_share_and_released_at_the_end() {
        for share in [10, 50, 99] {
            let mut throttle = Throttle::new();
            let (mut now, mut held, mut is_slow) = (Instant::now(), Duration::ZERO, false);
            let began = now;
            for _ in 0..200 {
                let (change, time) = throttle.follow(share, now);
                is_slow = change.unwrap_or(is_slow);
                let time = time.unwrap();
                held += if is_slow { time } else { Duration::ZERO };
                now += time;
            }
            let part = held.as_secs_f64() / (now - began).as_secs_f64() * 100.0;
            assert!((part - f64::from(share)).abs() < 1.5, "{part} instead of {share}");
            let last = throttle.follow(0, now);
            assert_eq!(last, (is_slow.then_some(false), None));
            assert_eq!(throttle.follow(0, now), (None, None));
        }
    }
}
