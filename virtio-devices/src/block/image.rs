//! A disk's image, whatever its format.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::access::{Access, ImageFormat};
use super::error::{BlockError, ResizeError};
use super::file::ImageFile;
use super::geometry::{Geometry, SECTOR};
use super::operation::Abilities;
use super::qcow2::Qcow2;
use super::raw::RawFile;

/// An open image. Unless it was given up ([`Self::release`]), it is locked: a writer excludes all others.
pub(crate) struct Image {
    contents: Contents,
    /// What can be done with it, at the size that it was opened with.
    abilities: Abilities,
    /// Whether it is locked. Held while that changes.
    held: Mutex<bool>,
    /// Its size in sectors, which [`Self::resize`] changes.
    sectors: AtomicU64,
    /// What addresses and lengths in memory must be a multiple of: 1, or a block around the page cache.
    pub alignment: usize,
    /// How long a transfer on a worker's own thread takes for each MiB: a slow medium, in tests.
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
    /// When it is not an image of this format, or cannot be used.
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

    fn of(path: &Path, file: ImageFile, access: Access, is_held: bool) -> Result<Self, BlockError> {
        let (contents, abilities) = match access.format {
            ImageFormat::Unknown | ImageFormat::Raw => {
                let (raw, abilities) = RawFile::new(path, file, access)?;
                (Contents::Raw(raw), abilities)
            }
            ImageFormat::Qcow2 { .. } => {
                let open = if is_held { Qcow2::open } else { Qcow2::closed };
                let image = open(path, file.fd, access)?;
                let abilities = image.abilities();
                (Contents::Qcow2(image), abilities)
            }
        };
        let alignment = if access.direct { abilities.geometry.block_size as usize } else { 1 };
        let sectors = AtomicU64::new(abilities.geometry.sectors);
        #[cfg(test)]
        let slowness = std::time::Duration::ZERO;
        Ok(Self {
            contents,
            abilities,
            held: Mutex::new(is_held),
            sectors,
            alignment,
            #[cfg(test)]
            slowness,
        })
    }

    /// Takes as long as a transfer of `bytes` bytes does.
    #[cfg(test)]
    pub(crate) fn dawdle(&self, bytes: usize) {
        std::thread::sleep(self.slowness.mul_f64(bytes as f64 / f64::from(1 << 20)));
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
    /// What is only in memory cannot be written. It is still this program's then.
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

    /// What carries out calls.
    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// What can be done with it now.
    pub(crate) fn abilities(&self) -> Abilities {
        let sectors = self.sectors.load(Ordering::Acquire);
        Abilities { geometry: Geometry { sectors, ..self.abilities.geometry }, ..self.abilities }
    }

    /// Its size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.abilities().geometry.sectors.saturating_mul(SECTOR)
    }

    /// Changes its size in bytes. Of a block device, which only the host can change, the size becomes known.
    ///
    /// # Errors
    ///
    /// When it cannot have that size. It has the old one then.
    pub(crate) fn resize(&self, size: u64) -> Result<(), ResizeError> {
        let block = self.abilities.geometry.block_size;
        if size == 0 || !size.is_multiple_of(block.into()) {
            return Err(ResizeError::Size(block));
        }
        match &self.contents {
            Contents::Raw(raw) => raw.resize(size)?,
            Contents::Qcow2(_) => return Err(ResizeError::Format),
        }
        self.sectors.store(size / SECTOR, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
