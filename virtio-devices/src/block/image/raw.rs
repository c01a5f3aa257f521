//! A raw image: the disk's contents and nothing else.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use log::warn;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::access::{Access, ImageFormat};
use super::aligned_buffer::AlignedBuffer;
use super::file::{ImageFile, size_of};
use super::lock::{lock, unlock};
use crate::block::error::{BlockError, ResizeError};
use crate::block::geometry::{Geometry, MAX_BLOCK, SECTOR};
use crate::block::operation::Abilities;

/// The smallest block in bytes.
const MIN_BLOCK: u32 = 512;

/// The file of a raw image.
pub(crate) struct RawFile {
    fd: OwnedFd,
    path: PathBuf,
    access: Access,
    block_device: bool,
    zeroes_in_place: bool,
    /// The block size of a block device in bytes; 1 for a file.
    pub range_unit: u64,
    /// Unit of offsets, addresses and lengths, in bytes.
    alignment: u32,
    /// Unit of the disk's size, in bytes. A partial block at the end is not visible to the guest.
    block: u32,
}

impl RawFile {
    /// Opens the image in `file`, which is at `path`. Also returns its abilities.
    ///
    /// # Errors
    ///
    /// Fails if the file is not a raw image, or cannot be used.
    pub(crate) fn new(path: &Path, file: ImageFile, access: Access) -> Result<(Self, Abilities), BlockError> {
        let fail = |action| move |errno: Errno| BlockError::File { path: path.into(), action, source: errno.into() };
        let ImageFile { fd, stat, block_device } = file;
        let mut block_size = MIN_BLOCK;
        let mut physical = u32::try_from(stat.st_blksize).unwrap_or(MIN_BLOCK);
        if block_device {
            block_size = rustix::fs::ioctl_blksszget(&fd).map_err(fail("find its block size"))?;
            physical = rustix::fs::ioctl_blkpbszget(&fd).unwrap_or(block_size);
        }
        let range_unit = if block_device { block_size.into() } else { 1 };
        // The block size of a file is part of its contents, independent of the storage below it.
        let least = first_block(path, fd.as_fd(), block_size, access)?;
        let alignment = if access.direct { least } else { 1 };
        let physical = physical.max(alignment);
        let size = size_of(path, &fd)?;
        let unit = block_size.max(alignment);
        let blocks = whole_blocks(size, unit);
        if blocks == 0 {
            return Err(BlockError::Size { path: path.into(), size, block: unit });
        }
        if blocks < size {
            let rest = size - blocks;
            warn!("{}: the guest does not see the last {rest} bytes: blocks have {block_size}", path.display());
        }
        let geometry =
            Geometry { sectors: blocks / SECTOR, block_size, physical_exponent: exponent(physical, block_size) };
        // On a device that cannot zero, the kernel would write the whole range in one call.
        let zeroes_in_place = !block_device || device_zeroes(stat.st_rdev);
        let may_punch = !access.read_only && access.sparse && zeroes_in_place;
        let discard = may_punch && (block_device || punches_holes(fd.as_fd(), size, block_size));
        let abilities = Abilities { geometry, read_only: access.read_only, zero: !access.read_only, discard };
        let raw =
            Self { fd, path: path.into(), access, block_device, zeroes_in_place, range_unit, alignment, block: unit };
        raw.allocate(0, size)?;
        Ok((raw, abilities))
    }

    /// Unit of offsets in the file, and of addresses and lengths in memory: 1, or a block with direct I/O.
    pub(crate) fn alignment(&self) -> u32 {
        self.alignment
    }

    /// True if a call may zero a range without writing all of it.
    pub(crate) fn zeroes_in_place(&self) -> bool {
        self.zeroes_in_place
    }

    /// Flushes everything to the medium.
    ///
    /// # Errors
    ///
    /// The image cannot be flushed.
    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        let fail =
            |errno: Errno| BlockError::File { path: self.path.clone(), action: "be flushed", source: errno.into() };
        rustix::fs::fdatasync(&self.fd).map_err(fail)
    }

    /// Gives the lock up.
    pub(crate) fn release(&self) {
        unlock(&self.path, self.fd.as_fd());
    }

    /// Locks the image, which must have `size` bytes.
    ///
    /// # Errors
    ///
    /// Another program has it locked, or has changed the size. It is not locked then.
    pub(crate) fn take(&self, size: u64) -> Result<(), BlockError> {
        let found = size_of(&self.path, &self.fd)?;
        lock(&self.path, self.fd.as_fd(), self.access, found)?;
        if whole_blocks(found, self.block) != size {
            unlock(&self.path, self.fd.as_fd());
            return Err(BlockError::Changed { path: self.path.clone(), was: size, is: found });
        }
        if self.block_device {
            // This host's page cache may hold data from before another host wrote. A file system keeps the cache
            // coherent, a device does not. A failure means that nothing is cached.
            let _ = rustix::fs::fadvise(&self.fd, 0, None, rustix::fs::Advice::DontNeed);
        }
        Ok(())
    }

    /// Changes the size in bytes. Only the host can change a block device, which must have this size already.
    ///
    /// # Errors
    ///
    /// Fails if the image cannot have that size, and leaves the old one.
    pub(crate) fn resize(&self, size: u64) -> Result<(), ResizeError> {
        if self.access.read_only {
            return Err(ResizeError::ReadOnly);
        }
        if self.block_device {
            let own = rustix::fs::seek(&self.fd, SeekFrom::End(0))?;
            return if own == size { Ok(()) } else { Err(ResizeError::BlockDevice(own)) };
        }
        // The kernel would kill a process that exceeds its limit.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| size > limit) || i64::try_from(size).is_err() {
            return Err(ResizeError::TooLarge);
        }
        // Includes a partial last block.
        let old = rustix::fs::seek(&self.fd, SeekFrom::End(0))?;
        lock(&self.path, self.fd.as_fd(), self.access, size).map_err(|_| ResizeError::InUse)?;
        rustix::fs::ftruncate(&self.fd, size)?;
        if size > old
            && let Err(error) = self.allocate(old, size - old)
        {
            // Undone if the space cannot be allocated; if that fails, too, the disk still has its old size.
            let _ = rustix::fs::ftruncate(&self.fd, old);
            return Err(ResizeError::Space(error.to_string()));
        }
        Ok(())
    }

    /// Allocates the space of a part of a non-sparse file. Existing data stays.
    fn allocate(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        if self.access.sparse || self.access.read_only || self.block_device {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP) => {
                warn!("{}: sparse=off: its file system allocates no space ahead", self.path.display());
                Ok(())
            }
            Err(errno) => Err(BlockError::Space { path: self.path.clone(), source: errno.into() }),
        }
    }
}

impl AsFd for RawFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The size without a partial last block, in bytes.
fn whole_blocks(size: u64, block: u32) -> u64 {
    size - size % u64::from(block.max(1))
}

/// The size of physical blocks in blocks, as a power of two.
pub(super) fn exponent(physical: u32, block: u32) -> u8 {
    if !physical.is_power_of_two() || physical < block || physical > MAX_BLOCK {
        return 0;
    }
    // Both are powers of two of at most 16 bits.
    (physical.trailing_zeros() - block.trailing_zeros()) as u8
}

/// Reads the first block: with direct I/O, the smallest readable one of at least `least` bytes. Checks its signature.
fn first_block(path: &Path, fd: BorrowedFd<'_>, least: u32, access: Access) -> Result<u32, BlockError> {
    let mut buffer = AlignedBuffer::new(MAX_BLOCK as usize);
    let mut block = least;
    loop {
        match rustix::io::pread(fd, buffer.bytes(block as usize), 0) {
            Err(Errno::INTR) => {}
            Err(Errno::INVAL) if access.direct && block < MAX_BLOCK => block *= 2,
            Err(Errno::INVAL) if access.direct => return Err(BlockError::Direct(path.into())),
            Err(errno) => {
                return Err(BlockError::File { path: path.into(), action: "be read", source: errno.into() });
            }
            Ok(_) => break,
        }
    }
    match format(buffer.bytes(block as usize)) {
        Some(format) if access.format != ImageFormat::Raw => Err(BlockError::Format { path: path.into(), format }),
        _ => Ok(block),
    }
}

/// The format of an image that begins with `start`, unless it is raw.
pub(crate) fn format(start: &[u8]) -> Option<&'static str> {
    const FORMATS: [(&[u8], &str); 4] =
        [(b"QFI\xfb", "qcow2"), (b"vhdxfile", "VHDX"), (b"conectix", "VHD"), (b"KDMV", "VMDK")];
    FORMATS.iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, name)| *name)
}

/// True if ranges of the file can be freed. Tried beyond its end, where no data is lost.
fn punches_holes(fd: BorrowedFd<'_>, size: u64, block: u32) -> bool {
    rustix::fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, size, block.into()).is_ok()
}

/// True if a block device, or the device of a partition, can zero ranges itself.
fn device_zeroes(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    ["queue", "../queue"].iter().any(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes");
        fs::read_to_string(path).is_ok_and(|text| text.trim().parse().is_ok_and(|bytes: u64| bytes > 0))
    })
}
