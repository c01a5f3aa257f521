//! The uplink: a tap that connects the switch to others.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::spec::SwitchError;
use crate::backend::Tap;
use crate::device::failures::Failures;
use crate::frames::net_protocol::Offloads;
use crate::net::NetCounters;

/// The uplink of a switch. All workers send to it; one reads from it.
pub(crate) struct Uplink {
    tap: Tap,
    /// The tap's only queue.
    fd: OwnedFd,
    counters: Arc<NetCounters>,
    failures: Failures,
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
        let [queue] = tap.queues() else {
            return Err(SwitchError::UplinkQueues { name: tap.name().into(), queues: tap.queues().len() });
        };
        let failed = |source: io::Error| SwitchError::Uplink { name: tap.name().into(), source };
        let fd = {
            let queue = queue.lock();
            // Offloads are set per tap, not per receiver; frames that a receiver cannot take are segmented here.
            if queue.set_offloads(tap.offloads() - Offloads::UFO).is_err() {
                // A substitute has no offloads, and a tap that refuses both was deleted.
                let _ = queue.set_offloads(Offloads::empty());
            }
            queue.as_fd().try_clone_to_owned().map_err(failed)?
        };
        Ok(Self { tap, fd, counters: Arc::new(NetCounters::new()), failures: Failures::new(id, "uplink") })
    }

    /// The interface.
    pub(crate) fn name(&self) -> &str {
        self.tap.name()
    }

    /// The MTU in bytes, if known.
    pub(crate) fn mtu(&self) -> Option<u16> {
        self.tap.mtu()
    }

    /// The offloaded frames that it accepts.
    pub(crate) fn offloads(&self) -> Offloads {
        self.tap.offloads()
    }

    /// True if it was deleted.
    pub(crate) fn is_gone(&self) -> bool {
        self.tap.is_gone()
    }

    /// The current state.
    pub(crate) fn state(&self) -> UplinkState {
        match self.tap.queues().first().map(|queue| queue.lock().is_writable()) {
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

    /// Sends frames that announce a port's addresses behind it, with their headers.
    pub(crate) fn announce(&self, frames: &[Vec<u8>]) {
        if let Some(queue) = self.tap.queues().first() {
            queue.lock().announce(frames);
        }
    }

    /// Drops the frames that it holds from before drivers started.
    pub(crate) fn discard_stale(&self) -> u64 {
        self.tap.queues().first().map_or(0, |queue| queue.lock().discard_stale())
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
