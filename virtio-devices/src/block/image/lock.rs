//! The lock that a disk holds on its image: shared to read, exclusive to write.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use log::debug;

use super::access::{Access, LockGranularity};
use crate::block::error::BlockError;

/// Locks an image of `size` bytes, or extends the lock when the image has become larger. On a file system without
/// locks, no lock is needed.
///
/// # Errors
///
/// [`BlockError::InUse`], if another program holds a conflicting lock.
pub(super) fn lock(path: &Path, fd: BorrowedFd<'_>, access: Access, size: u64) -> Result<(), BlockError> {
    let len = match access.lock {
        LockGranularity::ByteRange => size,
        LockGranularity::Full => 0,
    };
    match try_lock(fd, access.read_only, 0, len) {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Err(BlockError::InUse(path.into()))
        }
        Err(error) => {
            debug!("{}: it cannot be locked: {error}", path.display());
            Ok(())
        }
    }
}

/// Releases all locks of this open file.
pub(super) fn unlock(path: &Path, fd: BorrowedFd<'_>) {
    if let Err(error) = set(fd, libc::F_UNLCK, 0, 0) {
        debug!("{}: it cannot be unlocked: {error}", path.display());
    }
}

/// Locks `len` bytes from `start`; length 0 means to the end.
pub(super) fn try_lock(fd: BorrowedFd<'_>, read_only: bool, start: u64, len: u64) -> io::Result<()> {
    set(fd, if read_only { libc::F_RDLCK } else { libc::F_WRLCK }, start, len)
}

fn set(fd: BorrowedFd<'_>, kind: libc::c_int, start: u64, len: u64) -> io::Result<()> {
    let offset = |bytes: u64| libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput);
    let lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: offset(start)?,
        l_len: offset(len)?,
        l_pid: 0,
    };
    // SAFETY: the kernel reads the lock's description, which lives through the call. The lock belongs to the open file,
    // not to the process: it ends when the last descriptor of the file is closed.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
