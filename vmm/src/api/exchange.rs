//! What is on its way over one connection, and how much of it all connections together may have on its way.

use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// File descriptors that have come for requests that are not complete, over all connections: what the largest NIC takes (one for
/// each of 254 vCPUs).
pub const MOST_FDS: usize = 256;
/// Bodies above [`SMALL_BODY`] that are received or read at the same time.
const MOST_LARGE_BODIES: usize = 2;
/// The bytes of a body that any request may have at any time.
pub(crate) const SMALL_BODY: usize = 64 << 10;

/// What all connections share of the process's descriptors and memory.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    fds: AtomicUsize,
    large_bodies: AtomicUsize,
}

/// Adds `count` to what is in use, unless that makes more than `most`.
fn take(used: &AtomicUsize, count: usize, most: usize) -> bool {
    let add = |used: usize| used.checked_add(count).filter(|sum| *sum <= most);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

impl Budget {
    /// The right to have a large body in memory, or `None` while others have it.
    pub fn large_body(self: &Arc<Self>) -> Option<LargeBody> {
        take(&self.large_bodies, 1, MOST_LARGE_BODIES).then(|| LargeBody(self.clone()))
    }
}

/// The right to have a large body in memory.
#[derive(Debug)]
pub(crate) struct LargeBody(Arc<Budget>);

impl Drop for LargeBody {
    fn drop(&mut self) {
        self.0.large_bodies.fetch_sub(1, Ordering::Relaxed);
    }
}

/// File descriptors that came, by SCM_RIGHTS, with the bytes of a request that is not complete.
#[derive(Debug)]
pub(crate) struct Descriptors {
    fds: Vec<OwnedFd>,
    lost: bool,
    budget: Arc<Budget>,
}

impl Descriptors {
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { fds: Vec::new(), lost: false, budget }
    }

    /// Adds one, or closes it if there are too many.
    pub fn push(&mut self, fd: OwnedFd) {
        if take(&self.budget.fds, 1, MOST_FDS) {
            self.fds.push(fd);
        } else {
            self.lost = true;
        }
    }

    /// Remembers that the host could not give all that were sent.
    pub fn lose(&mut self) {
        self.lost = true;
    }

    /// Gives those that have come to the request that is complete. `None` if some were lost; the others are closed then.
    pub fn take(&mut self) -> Option<Vec<OwnedFd>> {
        self.budget.fds.fetch_sub(self.fds.len(), Ordering::Relaxed);
        let fds = mem::take(&mut self.fds);
        (!mem::take(&mut self.lost)).then_some(fds)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        self.budget.fds.fetch_sub(self.fds.len(), Ordering::Relaxed);
    }
}

/// How far a connection is with its current request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing of a request has come.
    Idle,
    /// A part of a request has come, the first of it then.
    Receiving(Instant),
    /// The answer is decided, and is being written since then; or it was the last thing that happened.
    Answering(Instant),
}

/// What a connection's socket, its service and the server know of each other.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub phase: Phase,
    /// Whether there are bytes of the answer that the socket has not taken.
    pub is_unsent: bool,
    /// Whether a request was answered on this connection.
    pub has_answered: bool,
    pub descriptors: Descriptors,
}

impl Exchange {
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { phase: Phase::Idle, is_unsent: false, has_answered: false, descriptors: Descriptors::new(budget) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn all_connections_together_hold_a_bounded_number_of_descriptors() {
        let budget = Arc::new(Budget::default());
        let (mut first, mut second) = (Descriptors::new(budget.clone()), Descriptors::new(budget.clone()));
        for _ in 0..MOST_FDS - 1 {
            first.push(descriptor());
        }
        second.push(descriptor());
        assert_eq!(second.take().map(|fds| fds.len()), Some(1));
        second.push(descriptor());
        second.push(descriptor());
        assert!(second.take().is_none());
        drop(first);
        second.push(descriptor());
        assert_eq!(second.take().map(|fds| fds.len()), Some(1));
        assert_eq!(budget.fds.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn large_bodies_wait_for_no_one_and_are_few() {
        let budget = Arc::new(Budget::default());
        let held: Vec<_> = (0..MOST_LARGE_BODIES).map(|_| budget.large_body()).collect();
        assert!(held.iter().all(Option::is_some));
        assert!(budget.large_body().is_none());
        drop(held);
        assert!(budget.large_body().is_some());
    }
}
