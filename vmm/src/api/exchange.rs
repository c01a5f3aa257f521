//! The state of a connection's current request, and limits on the resources that the requests of all connections use.

use std::io::IoSliceMut;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use crate::api::Failure;
use crate::error_kind::ErrorKind;
use crate::heap;

/// The most file descriptors that requests hold until they are answered, over all connections: enough for the largest
/// NIC (one for each of 254 vCPUs).
pub const MOST_FDS: usize = 256;
/// The most descriptors that the kernel passes with one message (`SCM_MAX_FD`).
const FDS_PER_MESSAGE: usize = 253;
const RECEIVE: RecvFlags = RecvFlags::DONTWAIT.union(RecvFlags::CMSG_CLOEXEC);
/// The most requests with bodies above [`SMALL_BODY`] at the same time.
const MOST_LARGE_BODIES: usize = 2;
/// The largest body, in bytes, that does not count against [`MOST_LARGE_BODIES`].
pub(crate) const SMALL_BODY: usize = 64 << 10;
/// Bytes of bodies that are read before their memory is returned to the host.
const READ_PER_RETURN: usize = 1 << 20;

/// The descriptors and memory in use by all connections.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    fds: AtomicUsize,
    /// Locked while descriptors are received: they are open before they are counted.
    receiving: Mutex<()>,
    large_bodies: AtomicUsize,
    /// Locked while a body is parsed: that takes many times its size.
    reading: Mutex<()>,
    /// Bytes read since memory was last returned.
    read: AtomicUsize,
}

/// Adds `count` to `used`, unless the sum exceeds `most`. Returns true if it was added.
fn take(used: &AtomicUsize, count: usize, most: usize) -> bool {
    let add = |used: usize| used.checked_add(count).filter(|sum| *sum <= most);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

impl Budget {
    /// A permit for a large body, or `None` if all are taken.
    pub(super) fn large_body(self: &Arc<Self>) -> Option<LargeBody> {
        take(&self.large_bodies, 1, MOST_LARGE_BODIES).then(|| LargeBody(self.clone()))
    }

    /// Waits for the turn to parse a body, which ends when the result is dropped.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.reading.lock()
    }

    /// Records that a request with a body of `length` bytes is done, and returns memory from time to time.
    pub(super) fn done(&self, length: usize) {
        let read = self.read.fetch_add(length, Ordering::Relaxed).saturating_add(length);
        if length > SMALL_BODY || read > READ_PER_RETURN {
            self.read.store(0, Ordering::Relaxed);
            heap::give_back();
        }
    }
}

/// A permit for a request with a large body, until it is done.
#[derive(Debug)]
pub(crate) struct LargeBody(Arc<Budget>);

impl Drop for LargeBody {
    fn drop(&mut self) {
        self.0.large_bodies.fetch_sub(1, Ordering::Relaxed);
    }
}

/// File descriptors received by SCM_RIGHTS with a request that is not complete.
#[derive(Debug)]
pub(crate) struct Descriptors {
    fds: Vec<OwnedFd>,
    lost: Option<Lost>,
    budget: Arc<Budget>,
}

/// Reason why descriptors of a request were closed before it was complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The request has more than [`MOST_FDS`].
    TooMany,
    /// Other requests, complete or not, hold too many.
    Busy,
    /// The kernel dropped them: this process can have no more.
    Limit,
}

impl From<Lost> for Failure {
    fn from(lost: Lost) -> Self {
        let (kind, why) = match lost {
            Lost::TooMany => (ErrorKind::Invalid, format!("a request has at most {MOST_FDS}; pass fewer")),
            Lost::Busy => {
                (ErrorKind::Busy, format!("requests in progress hold {MOST_FDS}, which is the limit; try again"))
            }
            Lost::Limit => (ErrorKind::Host, "the limit of open files is reached; raise it (ulimit -n)".to_string()),
        };
        Self::new(kind, format!("file descriptors of the request were lost: {why}"))
    }
}

impl Descriptors {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self { fds: Vec::new(), lost: None, budget }
    }

    /// Adds a descriptor, or closes it if there are too many.
    pub(super) fn push(&mut self, fd: OwnedFd) {
        if self.fds.len() == MOST_FDS {
            self.lost = Some(Lost::TooMany);
        } else if take(&self.budget.fds, 1, MOST_FDS) {
            self.fds.push(fd);
        } else {
            self.lost.get_or_insert(Lost::Busy);
        }
    }

    /// Receives bytes without waiting, with the descriptors that come with them, up to the limit.
    ///
    /// # Errors
    ///
    /// Fails with the system's error.
    pub(super) fn receive(&mut self, from: impl AsFd, bytes: &mut [u8]) -> Result<usize, Errno> {
        let budget = self.budget.clone();
        let _receiving = budget.receiving.lock();
        let room = MOST_FDS.saturating_sub(budget.fds.load(Ordering::Relaxed)).min(FDS_PER_MESSAGE);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
        // The kernel drops descriptors without space here before they are open.
        let space = space.get_mut(..rustix::cmsg_space!(ScmRights(room))).unwrap_or_default();
        let mut control = RecvAncillaryBuffer::new(space);
        let received = recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut control, RECEIVE)?;
        let mut count = 0;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                for fd in fds {
                    count += 1;
                    self.push(fd);
                }
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            self.lose(count < room);
        }
        Ok(received.bytes)
    }

    /// Records that the kernel dropped descriptors: with `is_limit`, because it could not open them, or else because
    /// there was no room.
    fn lose(&mut self, is_limit: bool) {
        let why = match () {
            () if is_limit => Lost::Limit,
            () if self.fds.len() == MOST_FDS => Lost::TooMany,
            () => Lost::Busy,
        };
        self.lost.get_or_insert(why);
    }

    /// Takes the descriptors for the request that is now complete. They are counted until the second value is dropped.
    ///
    /// # Errors
    ///
    /// Fails if some were lost; the others are closed.
    pub(super) fn take(&mut self) -> Result<(Vec<OwnedFd>, Passed), Lost> {
        let fds = mem::take(&mut self.fds);
        let passed = Passed { count: fds.len(), budget: self.budget.clone() };
        self.lost.take().map_or(Ok((fds, passed)), Err)
    }
}

/// The number of descriptors of a complete request, until that is answered.
#[derive(Debug)]
pub(crate) struct Passed {
    count: usize,
    budget: Arc<Budget>,
}

impl Drop for Passed {
    fn drop(&mut self) {
        self.budget.fds.fetch_sub(self.count, Ordering::Relaxed);
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        self.budget.fds.fetch_sub(self.fds.len(), Ordering::Relaxed);
    }
}

/// The phase of a connection's current request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No part of a request has arrived.
    Idle,
    /// A part of a request has arrived, the first byte at this time.
    Receiving(Instant),
    /// The answer is being written since this time, or has just been written.
    Answering(Instant),
}

/// State that a connection's socket, its service and the server share.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub phase: Phase,
    /// True if the socket has not taken all bytes of the answer.
    pub is_unsent: bool,
    /// True if bytes that are not a request followed a request that was answered.
    pub is_refused: bool,
    /// True if a request was answered on this connection.
    pub has_answered: bool,
    pub descriptors: Descriptors,
}

impl Exchange {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self {
            phase: Phase::Idle,
            is_unsent: false,
            is_refused: false,
            has_answered: false,
            descriptors: Descriptors::new(budget),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn all_connections_share_a_bounded_number_of_descriptors() {
        let budget = Arc::new(Budget::default());
        let (mut first, mut second) = (Descriptors::new(budget.clone()), Descriptors::new(budget.clone()));
        for _ in 0..MOST_FDS - 1 {
            first.push(descriptor());
        }
        let take = |descriptors: &mut Descriptors| descriptors.take().map(|(fds, _)| fds.len());
        second.push(descriptor());
        assert_eq!(take(&mut second), Ok(1));
        second.push(descriptor());
        second.push(descriptor());
        assert_eq!(take(&mut second), Err(Lost::Busy));
        first.push(descriptor());
        first.push(descriptor());
        assert_eq!(take(&mut first), Err(Lost::TooMany));
        first.lose(true);
        assert_eq!(take(&mut first), Err(Lost::Limit));
        second.push(descriptor());
        assert_eq!(take(&mut second), Ok(1));
        assert_eq!(budget.fds.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn descriptors_of_a_complete_request_count_until_it_is_answered() {
        let budget = Arc::new(Budget::default());
        let (mut first, mut second) = (Descriptors::new(budget.clone()), Descriptors::new(budget));
        for _ in 0..MOST_FDS {
            first.push(descriptor());
        }
        let (_fds, under_way) = first.take().unwrap();
        second.push(descriptor());
        assert_eq!(second.take().map(|(fds, _)| fds.len()), Err(Lost::Busy));
        drop(under_way);
        second.push(descriptor());
        assert_eq!(second.take().map(|(fds, _)| fds.len()), Ok(1));
    }

    #[test]
    fn descriptors_for_which_there_is_no_room_are_never_open_here() {
        let budget = Arc::new(Budget::default());
        budget.fds.store(MOST_FDS - 3, Ordering::Relaxed);
        let mut descriptors = Descriptors::new(budget.clone());
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let many = [near.as_fd(); FDS_PER_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&many)));
        let bytes = [std::io::IoSlice::new(b"PUT")];
        assert_eq!(rustix::net::sendmsg(&far, &bytes, &mut control, rustix::net::SendFlags::empty()), Ok(3));
        assert_eq!(descriptors.receive(&near, &mut [0; 8]), Ok(3));
        assert_eq!(descriptors.fds.len(), 3);
        assert_eq!(descriptors.take().map(|(fds, _)| fds.len()), Err(Lost::Busy));
        assert_eq!(budget.fds.load(Ordering::Relaxed), MOST_FDS - 3);
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
