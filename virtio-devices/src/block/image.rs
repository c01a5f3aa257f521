//! A disk's image, whatever its format.

use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use log::warn;
use parking_lot::Mutex;

use super::access::{Access, ImageFormat};
use super::error::{BlockError, ResizeError};
use super::file::ImageFile;
use super::geometry::{Geometry, MAX_BLOCK, SECTOR};
use super::operation::Abilities;
use super::qcow2::{Qcow2, stands_alone};
use super::raw::RawFile;
use super::writes::Writes;
use super::zeroing::{Lacking, Zeroing};

/// An open image. Unless it was given up ([`Self::release`]), it is locked: a writer excludes all others.
pub(crate) struct Image {
    #[cfg(not(test))]
    contents: Contents,
    #[cfg(test)]
    pub contents: Contents,
    /// Abilities at the size that it was opened with.
    abilities: Abilities,
    /// True if it is locked. The mutex is held while that changes.
    held: Mutex<bool>,
    /// Size in sectors, which [`Self::resize`] changes.
    sectors: AtomicU64,
    /// The size of blocks, in bytes, that the disk is told to have: its own, or the one that a driver knows
    /// ([`Self::serve_blocks`]).
    block: AtomicU32,
    /// The same of physical blocks, in blocks, as a power of two.
    physical_exponent: AtomicU8,
    /// The order of writes of less than a block of the storage.
    writes: Writes,
    /// Unit of places in the file, and of addresses and lengths in memory: 1, or a block of the storage around the page
    /// cache. The disk's own blocks may be smaller.
    pub alignment: usize,
    /// The ways in which a range becomes zero that the storage lacks.
    pub lacking: Lacking,
    /// True if the image is raw only because of how it begins. Then the driver may not make it begin like another
    /// format: it would be opened as that the next time.
    pub keeps_raw: bool,
    /// The ways of [`Self::lacking`] that calls are refused for.
    #[cfg(test)]
    pub refused: Vec<Zeroing>,
    /// True if calls that are not aligned fail, as around the page cache.
    #[cfg(test)]
    pub strict: bool,
    /// Delay of each MiB that a worker's own thread transfers: a slow medium, in tests.
    #[cfg(test)]
    pub slowness: std::time::Duration,
}

/// The formats, with what carries out calls.
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
    /// Fails if it is not an image of this format, or cannot be used.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, BlockError> {
        Self::of(path, ImageFile::open(path, access)?, access, true)
    }

    /// Opens the image at `path`, which another program writes, to be taken from it later ([`Self::take`]). What can be
    /// told of it now is checked.
    ///
    /// # Errors
    ///
    /// As [`Self::open`], but for the lock.
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

    /// Takes as long as a transfer of `bytes` bytes does.
    #[cfg(test)]
    pub(crate) fn dawdle(&self, bytes: usize) {
        std::thread::sleep(self.slowness.mul_f64(bytes as f64 / f64::from(1 << 20)));
    }

    /// Refuses a call that storage around the page cache refuses, or one that lacks a way.
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

    /// Has everything on the medium, if it is written. A guest may go on.
    ///
    /// # Errors
    ///
    /// It cannot be flushed.
    pub(crate) fn flush(&self) -> Result<(), BlockError> {
        match &self.contents {
            _ if self.abilities.read_only || !*self.held.lock() => Ok(()),
            Contents::Raw(raw) => raw.flush(),
            Contents::Qcow2(image) => image.flush(),
        }
    }

    /// Gives the lock up, if it is written, to a program of this host, which sees what this one wrote. Nothing may use
    /// the image until [`Self::take`].
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

    /// Takes the lock, if it is not held, and reads again what is kept in memory of the image.
    ///
    /// # Errors
    ///
    /// Somebody else has it, or it is not the image that it was. It is not this program's then.
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

    /// Contents, on which calls are carried out.
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

    /// Has blocks of `block` bytes, and physical ones of 2 to the power of `exponent` blocks, as a driver was told
    /// that goes on with this image. Nothing changes if no disk of this size can have them. No queue runs.
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

    /// Changes its size in bytes. Of a block device, which only the host can change, the size becomes known.
    ///
    /// # Errors
    ///
    /// Fails if it cannot have that size, and leaves the old one.
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
