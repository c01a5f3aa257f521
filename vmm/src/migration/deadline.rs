//! Waits for a peer, with a deadline and cancellation.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use virtio_devices::Cancel;

/// Interval at which a wait checks if it is cancelled.
pub(crate) const CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Deadline of a wait, which can also be cancelled.
#[derive(Debug, Clone)]
pub(crate) struct Deadline {
    moment: Instant,
    cancel: Cancel,
}

impl Deadline {
    /// Sets the deadline `time` from now; `cancel` ends the wait early.
    pub(crate) fn after(time: Duration, cancel: &Cancel) -> Self {
        Self { moment: Instant::now() + time, cancel: cancel.clone() }
    }

    /// Checks that there is time left.
    ///
    /// # Errors
    ///
    /// Fails if the deadline has passed, or the wait was cancelled.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it was cancelled"));
        }
        if self.moment <= Instant::now() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the peer took too long"));
        }
        Ok(())
    }

    /// Waits until `fd` is ready for `what` or has an error.
    ///
    /// # Errors
    ///
    /// As [`Self::check`].
    pub(crate) fn ready(&self, fd: impl AsFd, what: PollFlags) -> io::Result<()> {
        loop {
            self.check()?;
            match rustix::event::poll(&mut [PollFd::new(&fd, what)], Some(&CHECK_INTERVAL)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sleeps for a short time.
    ///
    /// # Errors
    ///
    /// As [`Self::check`].
    pub(super) fn pause(&self) -> io::Result<()> {
        // A signal cuts the sleep short, which is harmless.
        let _ = rustix::event::poll(&mut [], Some(&CHECK_INTERVAL));
        self.check()
    }

    /// Returns a reader of `stream` that fails at the deadline.
    pub(crate) fn reads<S>(&self, stream: S) -> Timely<S> {
        Timely { stream, until: self.clone() }
    }
}

/// Reader with a deadline.
#[derive(Debug)]
pub(crate) struct Timely<S> {
    stream: S,
    until: Deadline,
}

impl<S: Read + AsFd> Read for Timely<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.until.ready(&self.stream, PollFlags::IN)?;
        self.stream.read(bytes)
    }
}
