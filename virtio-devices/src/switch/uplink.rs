//! The uplink: a tap that connects the switch to others.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwap, Guard};
use log::{info, warn};

use super::spec::SwitchError;
use super::uplink_policy::{UplinkPolicy, UplinkRules};
use crate::backend::{Health, Tap, TapSearch};
use crate::device::failures::Failures;
use crate::frames::net_protocol::Offloads;
use crate::net::NetCounters;

/// The uplink of a switch. All workers send to it; one reads from it.
pub(crate) struct Uplink {
    /// The switch's id.
    id: String,
    name: String,
    mtu: Option<u16>,
    offloads: Offloads,
    /// The tap; after a deletion, the deleted one until there is another of its name.
    live: ArcSwap<UplinkTap>,
    health: Arc<Health>,
    counters: Arc<NetCounters>,
    failures: Failures,
    /// The host's rules, if there are any.
    rules: OnceLock<UplinkRules>,
}

/// The tap of an uplink.
pub(crate) struct UplinkTap {
    tap: Tap,
    /// The tap's only queue.
    fd: Arc<OwnedFd>,
}

/// The state of an uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UplinkState {
    /// It accepts frames.
    Up,
    /// It accepts none: it is down, or the buffer limit of its owner is reached.
    Stuck,
    /// It was deleted.
    Gone,
}

impl Uplink {
    /// Takes a tap with one queue, and makes it deliver offloaded frames of all kinds that the switch `id` can segment.
    ///
    /// # Errors
    ///
    /// Fails if it has several queues, or refuses.
    pub(crate) fn new(tap: Tap, id: &str) -> Result<Self, SwitchError> {
        let (name, mtu, offloads) = (tap.name().to_owned(), tap.mtu(), tap.offloads());
        Ok(Self {
            id: id.to_owned(),
            name,
            mtu,
            offloads,
            live: ArcSwap::from_pointee(UplinkTap::new(tap, offloads)?),
            health: Arc::default(),
            counters: Arc::new(NetCounters::new()),
            failures: Failures::new(id, "uplink"),
            rules: OnceLock::new(),
        })
    }

    /// The tap, for a batch.
    pub(crate) fn tap(&self) -> Guard<Arc<UplinkTap>> {
        self.live.load()
    }

    /// The search for a new tap of its name.
    pub(crate) fn search(&self) -> TapSearch {
        self.tap().tap.search()
    }

    /// The record of its losses.
    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Records that its tap was deleted, or is still gone.
    pub(crate) fn lose(&self) {
        let Self { id, name, health, .. } = self;
        // Logged at powers of two, so that a flapping tap cannot fill the log.
        if health.set_lost(true) && health.losses().is_power_of_two() {
            let (losses, cure) = (health.losses(), self.cure());
            warn!("{id}: {name}, its switch's uplink, is lost ({losses} so far): it was deleted; {cure}");
        }
    }

    /// The way back after a deletion.
    fn cure(&self) -> String {
        let name = &self.name;
        match self.search().spec {
            Some(_) => format!("make it again: ip tuntap add {name} mode tap; ip link set {name} up"),
            None => "it was passed as a descriptor, so restart the VM with another".to_owned(),
        }
    }

    /// Records that it is up, or down.
    pub(crate) fn note_up(&self, up: bool) {
        let Self { id, name, health, .. } = self;
        // A deletion is logged as such, and does not count as set down.
        if health.is_lost() || !health.set_tap_down(!up) || !health.tap_downs().is_power_of_two() {
            return;
        }
        let downs = health.tap_downs();
        if up {
            info!("{id}: {name}, its switch's uplink, is up again");
        } else {
            let cure = format!("set it up: ip link set {name} up");
            warn!("{id}: {name}, its switch's uplink, is down ({downs} so far), and with it links; {cure}");
        }
    }

    /// Continues with a new tap of the same name.
    ///
    /// # Errors
    ///
    /// Fails if the tap does not suit. The uplink is lost then, as before.
    pub(crate) fn adopt(&self, tap: Tap) -> Result<(), SwitchError> {
        let Self { id, name, health, .. } = self;
        let tap = self.tap().tap.replaced_by(tap);
        // Batches in progress may still send to the deleted one.
        self.live.store(Arc::new(UplinkTap::new(tap, self.offloads)?));
        if health.set_lost(false) && health.losses().is_power_of_two() {
            info!("{id}: {name}, its switch's uplink, is back");
        }
        Ok(())
    }

    /// The switch's id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The interface.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The MTU in bytes, if known.
    pub(crate) fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    /// The offloaded frames that it accepts.
    pub(crate) fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// True if it was deleted.
    pub(crate) fn is_gone(&self) -> bool {
        self.tap().tap.is_gone()
    }

    /// The current state.
    pub(crate) fn state(&self) -> UplinkState {
        match self.tap().tap.queues().first().map(|queue| queue.lock().is_writable()) {
            _ if self.is_gone() => UplinkState::Gone,
            Some(true) => UplinkState::Up,
            Some(false) | None => UplinkState::Stuck,
        }
    }

    /// The traffic from it and to it.
    pub(crate) fn counters(&self) -> Arc<NetCounters> {
        Arc::clone(&self.counters)
    }

    /// The failures to send to it.
    pub(crate) fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Applies `policy` to all frames from now on. Only the first is kept.
    pub(crate) fn restrict(&self, policy: UplinkPolicy) {
        if !policy.is_open() {
            _ = self.rules.set(UplinkRules::new(policy));
        }
    }

    /// The host's rules, if there are any.
    pub(crate) fn rules(&self) -> Option<&UplinkRules> {
        self.rules.get()
    }

    /// Sends frames that announce a port's addresses behind it, with their headers.
    pub(crate) fn announce(&self, frames: &[Vec<u8>]) {
        let tap = self.tap();
        let Some(queue) = tap.tap.queues().first() else { return };
        let Some(rules) = self.rules() else { return queue.lock().announce(frames) };
        let (allowed, dropped): (Vec<_>, Vec<_>) =
            frames.iter().map(|frame| rules.announced(frame)).partition(Result::is_ok);
        dropped.into_iter().filter_map(Result::err).for_each(|reason| self.counters.add(reason, 1));
        queue.lock().announce(&allowed.into_iter().flatten().collect::<Vec<_>>());
    }

    /// Drops the frames that it holds from before drivers started.
    pub(crate) fn discard_stale(&self) -> u64 {
        self.tap().tap.queues().first().map_or(0, |queue| queue.lock().discard_stale())
    }
}

impl UplinkTap {
    fn new(tap: Tap, offloads: Offloads) -> Result<Self, SwitchError> {
        let [queue] = tap.queues() else {
            return Err(SwitchError::UplinkQueues { name: tap.name().into(), queues: tap.queues().len() });
        };
        let fd = {
            let queue = queue.lock();
            // Offloads are set per tap, not per receiver; frames that a receiver cannot take are segmented here.
            if queue.set_offloads(offloads - Offloads::UFO).is_err() {
                // A substitute has no offloads, and a tap that refuses both was deleted.
                let _ = queue.set_offloads(Offloads::empty());
            }
            // A worker, whose filter has no call for a copy, adopts a new tap.
            queue.shared()
        };
        Ok(Self { tap, fd })
    }
}

impl AsFd for UplinkTap {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
