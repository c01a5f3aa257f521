//! The file of an image: a regular file, or a block device of the host.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::access::Access;
use super::lock::lock;
use crate::block::error::BlockError;

/// An open, locked file.
pub(crate) struct ImageFile {
    /// The file.
    pub fd: OwnedFd,
    /// File status at the time of opening.
    pub stat: Stat,
    /// True for a block device.
    pub block_device: bool,
}

impl ImageFile {
    /// Opens and locks the file at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be used, or another program has locked it.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, BlockError> {
        let file = Self::open_unlocked(path, access)?;
        file.lock(path, access)?;
        Ok(file)
    }

    /// Opens the file at `path` without locking it: another program may have it locked.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be used.
    pub(crate) fn open_unlocked(path: &Path, access: Access) -> Result<Self, BlockError> {
        let fail = |action| move |errno: Errno| BlockError::File { path: path.into(), action, source: errno.into() };
        let mut flags = OFlags::CLOEXEC | if access.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        flags.set(OFlags::DIRECT, access.direct);
        // Opening a pipe would block.
        let fd = match rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
            Err(Errno::INVAL) if access.direct => return Err(BlockError::Direct(path.into())),
            result => result.map_err(|errno| BlockError::open(path, access.read_only, errno))?,
        };
        let stat = rustix::fs::fstat(&fd).map_err(fail("be looked at"))?;
        let block_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            other => return Err(BlockError::Kind { path: path.into(), kind: kind(other) }),
        };
        rustix::fs::fcntl_setfl(&fd, flags).map_err(fail("be set up"))?;
        Ok(Self { fd, stat, block_device })
    }

    fn lock(&self, path: &Path, access: Access) -> Result<(), BlockError> {
        lock(path, self.fd.as_fd(), access, size_of(path, &self.fd)?)
    }
}

/// The size of the file that is open at `path`, in bytes.
pub(super) fn size_of(path: &Path, fd: &OwnedFd) -> Result<u64, BlockError> {
    let fail = |errno: Errno| BlockError::File { path: path.into(), action: "find its size", source: errno.into() };
    rustix::fs::seek(fd, SeekFrom::End(0)).map_err(fail)
}

fn kind(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        _ => "file of another kind",
    }
}
