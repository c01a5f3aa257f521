//! The uplink: a tap that connects the switch to others.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::spec::SwitchError;
use crate::backend::Tap;
use crate::failures::Failures;
use crate::net::NetCounters;
use crate::net_protocol::Offloads;

/// The uplink of a switch. All workers send to it; one reads from it.
pub(crate) struct Uplink {
    tap: Tap,
    /// The tap's only queue.
    fd: OwnedFd,
    counters: Arc<NetCounters>,
    failures: Failures,
}

/// Whether an uplink takes frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UplinkState {
    /// It takes frames.
    Up,
    /// It takes none: it is down, or its owner has limited its buffer, which is full.
    Stuck,
    /// It was deleted.
    Gone,
}

impl Uplink {
    /// Takes a tap with one queue, and has it deliver offloaded frames of all kinds that the switch `id` can divide.
    ///
    /// # Errors
    ///
    /// When it has several, or refuses.
    pub(crate) fn new(tap: Tap, id: &str) -> Result<Self, SwitchError> {
        let [queue] = tap.queues() else {
            return Err(SwitchError::UplinkQueues { name: tap.name().into(), queues: tap.queues().len() });
        };
        let failed = |source: io::Error| SwitchError::Uplink { name: tap.name().into(), source };
        let fd = {
            let queue = queue.lock();
            // It is a setting of the tap, not of a receiver: what one does not take is made one that it does.
            if queue.set_offloads(tap.offloads() - Offloads::UFO).is_err() {
                // A stand-in has no offloads, and a tap that refuses both is gone.
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

    /// Its MTU in bytes, where that is known.
    pub(crate) fn mtu(&self) -> Option<u16> {
        self.tap.mtu()
    }

    /// The offloaded frames that it takes.
    pub(crate) fn offloads(&self) -> Offloads {
        self.tap.offloads()
    }

    /// Whether it was deleted.
    pub(crate) fn is_gone(&self) -> bool {
        self.tap.is_gone()
    }

    /// Whether it takes frames now.
    pub(crate) fn state(&self) -> UplinkState {
        match self.tap.queues().first().map(|queue| queue.lock().is_writable()) {
            _ if self.is_gone() => UplinkState::Gone,
            Some(true) => UplinkState::Up,
            Some(false) | None => UplinkState::Stuck,
        }
    }

    /// What came from it and went there.
    pub(crate) fn counters(&self) -> Arc<NetCounters> {
        Arc::clone(&self.counters)
    }

    /// What it fails to send.
    pub(crate) fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Sends frames that announce a port's addresses behind it, with their headers.
    pub(crate) fn announce(&self, frames: &[Vec<u8>]) {
        if let Some(queue) = self.tap.queues().first() {
            queue.lock().announce(frames);
        }
    }

    /// Drops the frames that it holds from before there were drivers.
    pub(crate) fn discard_stale(&self) -> u64 {
        self.tap.queues().first().map_or(0, |queue| queue.lock().discard_stale())
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
