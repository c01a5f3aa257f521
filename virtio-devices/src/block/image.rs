//! A disk's image, in any format.

pub(super) mod access;
pub(super) mod aligned_buffer;
pub(super) mod file;
pub(super) mod lock;
pub(crate) mod qcow2;
pub(super) mod raw;
pub(super) mod writes;

use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use log::warn;
use parking_lot::Mutex;

use self::access::{Access, ImageFormat};
use self::file::ImageFile;
use self::qcow2::{Qcow2, stands_alone};
use self::raw::RawFile;
use self::writes::Writes;
use super::error::{BlockError, ResizeError};
use super::geometry::{Geometry, MAX_BLOCK, SECTOR};
use super::operation::Abilities;
use super::zeroing::{Lacking, Zeroing};

/// An open image. It is locked unless released ([`Self::release`]): a writer excludes all others.
pub(crate) struct Image {
    #[cfg(not(test))]
    contents: Contents,
    #[cfg(test)]
    pub contents: Contents,
    /// Abilities at its size on opening.
    abilities: Abilities,
    /// True if it is locked. The mutex is held while that changes.
    held: Mutex<bool>,
    /// Size in sectors, which [`Self::resize`] changes.
    sectors: AtomicU64,
    /// The block size in bytes that the driver reads: the image's own, or the one that a restored driver uses
    /// ([`Self::serve_blocks`]).
    block: AtomicU32,
    /// The size of physical blocks, in blocks, as a power of two; likewise.
    physical_exponent: AtomicU8,
    /// The order of writes of less than a block of the storage.
    writes: Writes,
    /// Unit of offsets in the file, and of addresses and lengths in memory: 1, or a block of the storage if I/O
    /// bypasses the page cache. The disk's own blocks may be smaller.
    pub alignment: usize,
    /// The zeroing methods that the storage lacks.
    pub lacking: Lacking,
    /// True if the image is raw only because of its first bytes. The driver may then not write another format's
    /// signature there: the next opening would take the image for that format.
    pub keeps_raw: bool,
    /// The methods of [`Self::lacking`] for which calls are refused.
    #[cfg(test)]
    pub refused: Vec<Zeroing>,
    /// True if unaligned calls fail, as with direct I/O.
    #[cfg(test)]
    pub strict: bool,
    /// Delay of each MiB that a worker's own thread transfers: a slow medium, for tests.
    #[cfg(test)]
    pub slowness: std::time::Duration,
}

/// The contents by format, with the object that executes calls.
pub(crate) enum Contents {
    /// The disk's contents and nothing else.
    Raw(RawFile),
    /// QEMU's format.
    Qcow2(Qcow2),
}

impl Image {
    /// Opens and locks the image at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the file is not an image of this format, or cannot be used.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, BlockError> {
        Self::of(path, ImageFile::open(path, access)?, access, true)
    }

    /// Opens the image at `path`, which another program writes; [`Self::take`] locks it later. Checks what can be
    /// checked now.
    ///
    /// # Errors
    ///
    /// As [`Self::open`], except for the lock.
    pub(crate) fn open_unlocked(path: &Path, access: Access) -> Result<Self, BlockError> {
        // Readers do not exclude each other.
        if access.read_only {
            return Self::open(path, access);
        }
        Self::of(path, ImageFile::open_unlocked(path, access)?, access, false)
    }

    fn of(path: &Path, file: ImageFile, mut access: Access, is_held: bool) -> Result<Self, BlockError> {
        if access.format == ImageFormat::Unknown && stands_alone(path, &file.fd)? {
            warn!("{}: begins like a qcow2 image, and is used as one; say image_type=qcow2", path.display());
            access.format = ImageFormat::Qcow2 { backing_files: false };
        }
        let (keeps_raw, lacking) = (access.format == ImageFormat::Unknown, Lacking::default());
        let (contents, abilities) = match access.format {
            ImageFormat::Unknown | ImageFormat::Raw => {
                let (raw, abilities) = RawFile::new(path, file, access)?;
                if !raw.zeroes_in_place() {
                    lacking.note(Zeroing::InPlace);
                }
                (Contents::Raw(raw), abilities)
            }
            ImageFormat::Qcow2 { .. } => {
                let open = if is_held { Qcow2::open } else { Qcow2::closed };
                let image = open(path, file.fd, access)?;
                let abilities = image.abilities();
                if !image.has_zero_clusters() {
                    lacking.note(Zeroing::InPlace);
                }
                (Contents::Qcow2(image), abilities)
            }
        };
        let alignment = if let Contents::Raw(raw) = &contents { raw.alignment() as usize } else { 1 };
        let Geometry { sectors, block_size, physical_exponent } = abilities.geometry;
        #[cfg(test)]
        let slowness = std::time::Duration::ZERO;
        Ok(Self {
            contents,
            abilities,
            held: Mutex::new(is_held),
            sectors: AtomicU64::new(sectors),
            block: AtomicU32::new(block_size),
            physical_exponent: AtomicU8::new(physical_exponent),
            writes: Writes::default(),
            alignment,
            lacking,
            keeps_raw,
            #[cfg(test)]
            refused: Vec::new(),
            #[cfg(test)]
            strict: false,
            #[cfg(test)]
            slowness,
        })
    }

    /// Sleeps for the time that a transfer of `bytes` bytes takes.
    #[cfg(test)]
    pub(crate) fn dawdle(&self, bytes: usize) {
        std::thread::sleep(self.slowness.mul_f64(bytes as f64 / f64::from(1 << 20)));
    }

    /// Refuses a call that direct I/O refuses, or one that uses a missing zeroing method.
    #[cfg(test)]
    pub(crate) fn admit(&self, call: &super::call::Call<'_>) -> std::io::Result<()> {
        use super::call::Call;
        let (iovecs, offset) = match call {
            Call::Read(iovecs, offset) | Call::Write { iovecs, offset, .. } => (*iovecs, *offset),
            Call::Sync => return Ok(()),
            Call::Zero { unmap, .. } => {
                let way = if *unmap { Zeroing::Hole } else { Zeroing::InPlace };
                let refused = self.refused.contains(&way);
                return if refused { Err(rustix::io::Errno::OPNOTSUPP.into()) } else { Ok(()) };
            }
        };
        let segments = iovecs.iter().flat_map(|segment| [segment.iov_base as usize, segment.iov_len]);
        let all = segments.chain(std::iter::once(offset as usize)).all(|n| n.is_multiple_of(self.alignment));
        if all || !self.strict { Ok(()) } else { Err(rustix::io::Errno::INVAL.into()) }
    }

    /// Flushes everything to the medium, if the image is writable. The guest may run.
    ///
    /// # Errors
    ///
    /// The image cannot be flushed.
    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        match &self.contents {
            _ if self.abilities.read_only || !*self.held.lock() => Ok(()),
            Contents::Raw(raw) => raw.flush(),
            Contents::Qcow2(image) => image.flush(),
        }
    }

    /// Releases the lock of a writable image, for a program of this host, which sees the data that this one wrote.
    /// Nothing may use the image until [`Self::take`].
    ///
    /// # Errors
    ///
    /// Fails if cached data cannot be written. The image still belongs to this program then.
    pub(crate) fn release(&self) -> Result<(), BlockError> {
        let mut held = self.held.lock();
        if *held && !self.abilities.read_only {
            match &self.contents {
                Contents::Raw(raw) => raw.release(),
                Contents::Qcow2(image) => image.release()?,
            }
            *held = false;
        }
        Ok(())
    }

    /// Takes the lock, if it is not held, and reads the cached parts of the image again.
    ///
    /// # Errors
    ///
    /// Another program has it locked, or it is not the same image. This program does not own it then.
    pub(crate) fn take(&self) -> Result<(), BlockError> {
        let mut held = self.held.lock();
        if !*held {
            match &self.contents {
                Contents::Raw(raw) => raw.take(self.size())?,
                Contents::Qcow2(image) => image.take()?,
            }
            *held = true;
        }
        Ok(())
    }

    /// The contents, which execute calls.
    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Abilities at the current size.
    pub(crate) fn abilities(&self) -> Abilities {
        let geometry = Geometry {
            sectors: self.sectors.load(Ordering::Acquire),
            block_size: self.block.load(Ordering::Acquire),
            physical_exponent: self.physical_exponent.load(Ordering::Acquire),
        };
        Abilities { geometry, ..self.abilities }
    }

    /// Sets the block size to `block` bytes and physical blocks to 2 to the power of `exponent` blocks, as the driver
    /// of a restored guest knows them. Changes nothing if a disk of this size cannot have them. No queue runs.
    pub(crate) fn serve_blocks(&self, block: u64, exponent: u64) {
        let (Ok(block), Ok(exponent)) = (u32::try_from(block), u8::try_from(exponent)) else { return };
        let range = SECTOR as u32..=MAX_BLOCK;
        let is_block = |size: u32| size.is_power_of_two() && range.contains(&size);
        let physical = block.checked_shl(exponent.into()).filter(|physical| physical >> exponent == block);
        if is_block(block) && physical.is_some_and(is_block) && self.size().is_multiple_of(block.into()) {
            self.block.store(block, Ordering::Release);
            self.physical_exponent.store(exponent, Ordering::Release);
        }
    }

    /// Unit of ranges that are discarded or zeroed at once, in bytes.
    pub(crate) fn range_unit(&self) -> usize {
        if let Contents::Raw(raw) = &self.contents { raw.range_unit as usize } else { 1 }
    }

    /// The order of writes, if the storage has blocks of more than a sector, so that a write of less than a block reads
    /// the rest of it first.
    pub(crate) fn shared_blocks(&self) -> Option<&Writes> {
        let storage = self.alignment.max(self.range_unit());
        (storage > SECTOR as usize).then_some(&self.writes)
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.abilities().geometry.sectors.saturating_mul(SECTOR)
    }

    /// Changes the size in bytes. Only the host can change a block device, so its size is read again.
    ///
    /// # Errors
    ///
    /// Fails if the image cannot have that size, and leaves the old one.
    pub(crate) fn resize(&self, size: u64) -> Result<(), ResizeError> {
        let block = self.abilities().geometry.block_size.max(self.alignment as u32);
        if size == 0 || !size.is_multiple_of(block.into()) {
            return Err(ResizeError::Size(block));
        }
        match &self.contents {
            Contents::Raw(raw) => raw.resize(size)?,
            Contents::Qcow2(image) => image.resize(size)?,
        }
        self.sectors.store(size / SECTOR, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
