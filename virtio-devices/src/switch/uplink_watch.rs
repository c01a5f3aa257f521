//! Whether the uplink is up, which the links of ports follow. A tap that is taken down signals nothing, so it is looked
//! at now and then.

use std::time::{Duration, Instant};

use super::uplink::{Uplink, UplinkState};
use crate::clock;

/// The time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// What is known of the uplink.
pub(crate) struct UplinkWatch {
    /// When to look again.
    next: Instant,
    /// At the last look, it took no frames.
    doubtful: bool,
}

impl UplinkWatch {
    /// Looks at once.
    pub(crate) fn new() -> Self {
        Self { next: clock::now(), doubtful: false }
    }

    /// How long until the next look.
    pub(crate) fn wait(&self) -> Duration {
        self.next.saturating_duration_since(clock::now())
    }

    /// Looks, if it is time. Returns whether the uplink is up, if that can be said: a buffer may be full once.
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
