//! A pseudo-terminal: this end, and the path of the other.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

/// A pseudo-terminal in raw mode.
#[derive(Debug)]
pub(crate) struct Pty {
    ours: OwnedFd,
    path: PathBuf,
}

impl Pty {
    /// Opens a new pseudo-terminal, whose other end is not open.
    ///
    /// # Errors
    ///
    /// Fails if the host has none left.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags)?;
        grantpt(&ours)?;
        unlockpt(&ours)?;
        let path = PathBuf::from(OsString::from_vec(ptsname(&ours, Vec::new())?.into_bytes()));
        // Raw mode. Opening and closing the other end once makes it report a hang-up.
        let theirs = rustix::fs::open(&path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        let mut settings = tcgetattr(&theirs)?;
        settings.make_raw();
        tcsetattr(&theirs, OptionalActions::Now, &settings)?;
        let flags = rustix::fs::fcntl_getfl(&ours)?;
        rustix::fs::fcntl_setfl(&ours, flags | OFlags::NONBLOCK)?;
        Ok(Self { ours, path })
    }

    /// The path of the other end.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// True if the other end is open, or has left input.
    pub(crate) fn is_open(&self) -> bool {
        let mut fds = [PollFd::new(&self.ours, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let told = poll(&mut fds, Some(&at_once)).is_ok();
        let [fd] = fds;
        told && (fd.revents().contains(PollFlags::IN) || !fd.revents().contains(PollFlags::HUP))
    }
}

impl AsFd for Pty {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }
}
