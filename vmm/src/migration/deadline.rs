//! Waits for a peer that end at a moment, or before it when nobody wants them any more.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use virtio_devices::Cancel;

/// Interval at which a wait checks if it is cancelled.
pub(crate) const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// End of a wait.
#[derive(Debug, Clone)]
pub(crate) struct Deadline {
    moment: Instant,
    cancel: Cancel,
}

impl Deadline {
    /// In so much `time`, or when `cancel` says so.
    pub(crate) fn after(time: Duration, cancel: &Cancel) -> Self {
        Self { moment: Instant::now() + time, cancel: cancel.clone() }
    }

    /// Checks that there is time left.
    ///
    /// # Errors
    ///
    /// There is none, or the wait is not wanted any more.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it is not wanted any more"));
        }
        if self.moment <= Instant::now() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the peer took too long"));
        }
        Ok(())
    }

    /// Waits until `fd` is ready for `what`, or has failed.
    ///
    /// # Errors
    ///
    /// As [`Self::check`].
    pub(crate) fn ready(&self, fd: impl AsFd, what: PollFlags) -> io::Result<()> {
        loop {
            self.check()?;
            match rustix::event::poll(&mut [PollFd::new(&fd, what)], Some(&LOOK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for a moment.
    ///
    /// # Errors
    ///
    /// As [`Self::check`].
    pub(super) fn pause(&self) -> io::Result<()> {
        // A signal makes it shorter.
        let _ = rustix::event::poll(&mut [], Some(&LOOK));
        self.check()
    }

    /// Reader of `stream` that fails at the deadline.
    pub(crate) fn reads<S>(&self, stream: S) -> Timely<S> {
        Timely { stream, until: self.clone() }
    }
}

/// Reads until a moment.
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
