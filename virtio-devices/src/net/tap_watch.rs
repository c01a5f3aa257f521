//! The detection of a tap that was deleted or set down, whose frames this program moves, by the first pair's worker.
//!
//! The kernel reports the deletion of a tap by an error event of its descriptors, and that of a macvtap only on
//! request. So the worker checks the tap on an event, and every two seconds. A tap that is set down sends no event, but
//! accepts no frame; when it is set up, it accepts one, which is an event.

mod tap_finder;

use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{debug, info, warn};
use vmm_sys_util::eventfd::EventFd;

pub(crate) use self::tap_finder::TapFinder;
use super::pass::Shared;
use crate::backend::{Health, Successor, TapError, TapQueue, TapSearch};
use crate::device::worker::thread_name;
use crate::os::clock;

/// The interval at which a tap is checked.
const INTERVAL: Duration = Duration::from_secs(2);

/// The time for which a tap must accept no frame to count as down: its buffer may be full for a moment.
const PATIENCE: Duration = Duration::from_millis(500);

/// The parts that the loss of a tap concerns.
pub(crate) struct TapEnd {
    /// The NIC's id.
    pub id: String,
    /// The search for a new tap of the same name.
    pub search: TapSearch,
    /// The handover of the new tap.
    pub successor: Arc<Successor>,
    /// The state of the backend, which is lost while there is no tap.
    pub health: Arc<Health>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
}

/// A watch of the tap, during a run of the worker.
pub(crate) struct TapWatch<'e> {
    end: &'e TapEnd,
    /// The time of the next check.
    next: Instant,
    finder: Option<TapFinder>,
    /// The time since when the tap accepts no frame.
    doubted: Option<Instant>,
}

impl<'e> TapWatch<'e> {
    /// A watch that is due at once.
    pub(crate) fn new(end: &'e TapEnd) -> Self {
        Self { end, next: clock::now(), finder: None, doubted: None }
    }

    /// The time until the next check.
    pub(crate) fn wait(&self) -> Duration {
        self.next.saturating_duration_since(clock::now())
    }

    /// True if the tap is down, or seems to be: the next check is due when it accepts a frame.
    pub(crate) fn expects_up(&self) -> bool {
        self.doubted.is_some() || self.end.health.is_tap_down()
    }

    /// Makes the next check due at once.
    pub(crate) fn hurry(&mut self) {
        self.next = clock::now();
    }

    /// Checks `tap`, if it is time, and handles its loss and return. Returns true if it is back. Called outside a batch
    /// of frames.
    pub(crate) fn look(&mut self, tap: &mut TapQueue, shared: &Shared) -> bool {
        let is_due = self.wait().is_zero();
        if is_due {
            self.next = clock::now() + INTERVAL;
        }
        if tap.is_lost() {
            if is_due {
                self.search();
            }
            return false;
        }
        let was_lost = self.end.health.is_lost();
        if (is_due || was_lost) && tap.is_gone() {
            self.lose(tap, shared);
            return false;
        }
        if was_lost {
            self.restore(shared);
        }
        if is_due || was_lost {
            self.follow(tap.seems_down(), shared);
        }
        was_lost
    }

    /// Makes the link follow the tap, which accepts no frame if it `seems_down`.
    fn follow(&mut self, seems_down: bool, shared: &Shared) {
        let TapEnd { id, search, health, .. } = self.end;
        if !seems_down {
            self.doubted = None;
            if self.tell(false, shared) && health.tap_downs().is_power_of_two() {
                info!("{id}: its tap {} is up again", search.name);
            }
            return;
        }
        if health.is_tap_down() {
            return;
        }
        let now = clock::now();
        let certain = *self.doubted.get_or_insert(now) + PATIENCE;
        if now < certain {
            self.next = certain;
            return;
        }
        self.doubted = None;
        if self.tell(true, shared) && health.tap_downs().is_power_of_two() {
            let (name, downs) = (&search.name, health.tap_downs());
            let link = if health.follows_tap() { ", and its link with it" } else { "" };
            // Logged at powers of two, so that a flapping tap cannot fill the log.
            warn!("{id}: its tap {name} is down ({downs} so far){link}; set it up: ip link set {name} up");
        }
    }

    /// Records that the tap is down, or up, and notifies the driver. Returns true if that is a change.
    fn tell(&self, down: bool, shared: &Shared) -> bool {
        let health = &self.end.health;
        let changed = health.set_tap_down(down);
        if changed && health.follows_tap() {
            shared.state.changed();
            shared.interrupts.signal_config();
        }
        changed
    }

    fn lose(&mut self, tap: &mut TapQueue, shared: &Shared) {
        let TapEnd { id, search, health, .. } = self.end;
        tap.lose();
        self.doubted = None;
        health.set_tap_down(false);
        if shared.state.lose_link(true) {
            shared.interrupts.signal_config();
        }
        // A finder that has found this tap has ended.
        self.finder = None;
        if health.set_lost(true) {
            let (name, losses) = (&search.name, health.losses());
            // Logged at powers of two, so that a flapping tap cannot fill the log.
            if losses.is_power_of_two() {
                let until = match search.spec {
                    Some(_) => "until there is one of that name again",
                    None => "until it is given another (vm.set-vf)",
                };
                warn!("{id}: {name} is lost ({losses} so far): it was deleted; its link is down {until}");
            }
        }
        self.search();
    }

    /// Begins to search for a new tap, unless a search is running already, or there cannot be one.
    fn search(&mut self) {
        let TapEnd { id, search, successor, health, kick } = self.end;
        if self.finder.is_some() || search.spec.is_none() {
            return;
        }
        let (successor, kick) = (Arc::clone(successor), Arc::clone(kick));
        let (name, health, owner) = (search.name.clone(), Arc::clone(health), id.clone());
        let refused = move |error: &TapError| {
            // A guest can cause the search to begin again.
            if health.note_search() && health.losses().is_power_of_two() {
                warn!("{owner}: {name} is there again, and is tried each second until it can be opened: {error}");
            }
        };
        let found = move |tap| {
            successor.give(tap);
            // A full counter has woken the worker already.
            let _ = kick.write(1);
        };
        let finder = TapFinder::start(thread_name(id, "tap", 0), search.clone(), refused, found);
        // Without a thread, the next check tries again.
        self.finder = finder.inspect_err(|error| debug!("{id}: no thread to search for its tap: {error}")).ok();
    }

    fn restore(&mut self, shared: &Shared) {
        let TapEnd { id, search, health, .. } = self.end;
        self.finder = None;
        if health.set_lost(false) && health.losses().is_power_of_two() {
            info!("{id}: {} is back", search.name);
        }
        if shared.state.lose_link(false) {
            shared.interrupts.signal_config();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::backend::{Tap, TapSpec};
    use crate::net::testing::{Guest, eventually, namespace};

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().expect("this test needs ip: iproute2");
        assert!(status.success(), "ip {arguments}");
    }

    #[test]
    fn a_tap_that_is_lost_again_at_once_is_searched_for_again() {
        namespace::enter();
        ip("tuntap add flap0 mode tap");
        let name = Some("flap0".to_owned());
        let tap =
            Tap::open(&TapSpec { name, ip: None, mask: None, host_mac: None, mtu: None, queue_pairs: 1 }).unwrap();
        let guest = Guest::new(1, 16);
        let shared = guest.shared();
        let end = TapEnd {
            id: "_net0".into(),
            search: tap.search(),
            successor: Arc::clone(tap.successor()),
            health: Arc::default(),
            kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        };
        let mut queue = tap.queues()[0].lock();
        let mut watch = TapWatch::new(&end);
        // Does the worker's part at the end of the search: the tap exists again.
        let take = |queue: &mut TapQueue| {
            eventually("the end of the search", || end.kick.read().is_ok());
            queue.replace_by(end.successor.take(0).unwrap());
        };
        for _ in 0..3 {
            ip("link delete flap0");
            watch.hurry();
            assert!(!watch.look(&mut queue, &shared) && queue.is_lost());
            ip("tuntap add flap0 mode tap");
            take(&mut queue);
        }
        assert!(watch.look(&mut queue, &shared) && !queue.is_lost());
        assert_eq!(end.health.losses(), 1, "it was not back in between");
    }
}
