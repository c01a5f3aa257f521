//! The state of the uplink, which the links of ports follow. A tap that is taken down sends no event, so it is polled.
//! A deleted tap is searched for by its name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{debug, warn};
use parking_lot::Mutex;

use super::uplink::{Uplink, UplinkState};
use crate::backend::{Tap, TapError};
use crate::device::worker::thread_name;
use crate::net::TapFinder;
use crate::os::clock;

/// The time between two checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// The last check of the uplink.
pub(crate) struct UplinkWatch {
    /// The time of the next check.
    next: Instant,
    /// At the last check, it accepted no frames.
    doubtful: bool,
    /// The search for a new tap, while the uplink is lost.
    finder: Option<TapFinder>,
    /// The tap that it has found.
    found: Arc<Mutex<Option<Tap>>>,
}

impl UplinkWatch {
    /// A watch that is due at once.
    pub(crate) fn new() -> Self {
        Self { next: clock::now(), doubtful: false, finder: None, found: Arc::default() }
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
        let state = uplink.state();
        if state == UplinkState::Gone {
            uplink.lose();
            self.search(uplink);
        }
        self.judge(state)
    }

    /// The tap that replaces the uplink's deleted one, once there is one. The next check is due then.
    pub(crate) fn take_found(&mut self) -> Option<Tap> {
        self.finder.as_ref()?;
        let found = self.found.lock().take();
        if found.is_some() {
            self.finder = None;
            self.next = clock::now();
        }
        found
    }

    /// Begins to search for a new tap, unless a search is running already, or there cannot be one.
    fn search(&mut self, uplink: &Uplink) {
        let search = uplink.search();
        if self.finder.is_some() || search.spec.is_none() {
            return;
        }
        let (id, name, health) = (uplink.id().to_owned(), search.name.clone(), Arc::clone(uplink.health()));
        let refused = move |error: &TapError| {
            if health.note_search() && health.losses().is_power_of_two() {
                warn!("{id}: {name}, its switch's uplink, is there again, and is tried each second: {error}");
            }
        };
        let place = Arc::clone(&self.found);
        let found = move |tap| *place.lock() = Some(tap);
        let finder = TapFinder::start(thread_name(uplink.id(), "tap", 0), search, refused, found);
        // Without a thread, the next check tries again.
        self.finder =
            finder.inspect_err(|error| debug!("{}: no thread to search for its uplink: {error}", uplink.id())).ok();
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
