//! The state of the uplink, which the links of ports follow. A tap that is taken down sends no event, so it is polled.

use std::time::{Duration, Instant};

use super::uplink::{Uplink, UplinkState};
use crate::os::clock;

/// The time between two checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// The last check of the uplink.
pub(crate) struct UplinkWatch {
    /// The time of the next check.
    next: Instant,
    /// At the last check, it accepted no frames.
    doubtful: bool,
}

impl UplinkWatch {
    /// A watch that is due at once.
    pub(crate) fn new() -> Self {
        Self { next: clock::now(), doubtful: false }
    }

    /// The time until the next check.
    pub(crate) fn wait(&self) -> Duration {
        self.next.saturating_duration_since(clock::now())
    }

    /// Checks the uplink, if it is time. Returns true if it is up; `None` if it is too early or not certain: a buffer
    /// may be full once.
    pub(crate) fn look(&mut self, uplink: &Uplink) -> Option<bool> {
        if !self.wait().is_zero() {
            return None;
        }
        self.next = clock::now() + INTERVAL;
        uplink.failures().settle();
        self.judge(uplink.state())
    }

    fn judge(&mut self, state: UplinkState) -> Option<bool> {
        let doubted = std::mem::replace(&mut self.doubtful, state == UplinkState::Stuck);
        match state {
            UplinkState::Up => Some(true),
            UplinkState::Gone => Some(false),
            UplinkState::Stuck => doubted.then_some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uplink_is_down_when_it_takes_nothing_twice_or_is_gone() {
        let mut watch = UplinkWatch::new();
        let states = [
            (UplinkState::Up, Some(true)),
            (UplinkState::Stuck, None),
            (UplinkState::Up, Some(true)),
            (UplinkState::Stuck, None),
            (UplinkState::Stuck, Some(false)),
            (UplinkState::Stuck, Some(false)),
            (UplinkState::Up, Some(true)),
            (UplinkState::Gone, Some(false)),
        ];
        for (state, expected) in states {
            assert_eq!(watch.judge(state), expected, "{state:?}");
        }
    }
}
