//! The MSI-X vectors of a function: an eventfd for each.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::os::eventfd::is_signalled;
use crate::transport::lost_interrupts::LostInterrupts;

/// The vectors of a function.
///
/// All of them have an eventfd from the start: a driver learns nothing of one that cannot be opened later. An eventfd
/// that is signalled while its vector is masked keeps the signal: it is the vector's pending bit (`PCIe 6.2 §7.7.2.5`).
#[derive(Debug)]
pub(crate) struct Vectors {
    eventfds: Box<[Arc<EventFd>]>,
    lost: LostInterrupts,
}

impl Vectors {
    /// Opens the eventfds of `count` vectors.
    ///
    /// # Errors
    ///
    /// Fails if the host has no file descriptor left.
    pub(crate) fn new(count: u16) -> io::Result<Self> {
        let new = |_| Ok(Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?));
        let eventfds = (0..count).map(new).collect::<io::Result<_>>()?;
        Ok(Self { eventfds, lost: LostInterrupts::default() })
    }

    /// The number of vectors.
    pub(crate) fn count(&self) -> u16 {
        u16::try_from(self.eventfds.len()).unwrap_or(u16::MAX)
    }

    /// The eventfd of `vector`.
    pub(crate) fn eventfd(&self, vector: u16) -> Option<&Arc<EventFd>> {
        self.eventfds.get(usize::from(vector))
    }

    /// Signals the vectors whose bits are set.
    pub(crate) fn signal(&self, vectors: u64) {
        for (vector, eventfd) in (0..).zip(&self.eventfds).filter(|(vector, _)| vectors >> vector & 1 != 0) {
            if !self.lost.loses(vector) {
                // A full counter means that a signal is pending already.
                let _ = eventfd.write(1);
            }
        }
    }

    /// True if a signal waits in the eventfd of `vector`.
    pub(crate) fn is_signalled(&self, vector: u16) -> bool {
        self.eventfd(vector).is_some_and(|eventfd| is_signalled(eventfd))
    }

    /// Makes `vector`, which is not signalled, pending if `pending` is true. It cannot be lost.
    pub(crate) fn set_pending(&self, vector: u16, pending: bool) {
        if let Some(eventfd) = self.eventfd(vector).filter(|_| pending) {
            // A counter without a signal is not full.
            let _ = eventfd.write(1);
        }
    }

    /// Discards all signals, as a reset of the function does.
    pub(crate) fn clear(&self) {
        for eventfd in &self.eventfds {
            // One that is not signalled has nothing to read.
            let _ = eventfd.read();
        }
    }

    /// Loses the next `count` interrupts of `vector`, or of all vectors, of the function `name`, because the host asks
    /// for it.
    pub(crate) fn lose(&self, name: String, vector: Option<u16>, count: u32) {
        self.lost.arm(name, vector, count);
    }
}
