//! Host storage that a device writes to, and its lock; handed over when the guest migrates.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::error::BlockError;
use super::image::Image;

/// A disk's image with its lock, or a file that is the guest's memory.
#[derive(Clone)]
pub struct StorageLock(Kind);

#[derive(Clone)]
enum Kind {
    Image(Arc<Image>),
    Memory(Arc<OwnedFd>, PathBuf),
}

impl StorageLock {
    pub(super) const fn of_image(image: Arc<Image>) -> Self {
        Self(Kind::Image(image))
    }

    /// The file at `path`, which is guest memory. It is not locked.
    pub(crate) const fn of_memory(file: Arc<OwnedFd>, path: PathBuf) -> Self {
        Self(Kind::Memory(file, path))
    }

    /// Releases the lock, for a program of this host or after [`Self::flush`]. The guest and the device's queues are
    /// stopped, and stay so until [`Self::take`].
    ///
    /// # Errors
    ///
    /// Fails if cached data cannot be written. The lock is still held then.
    pub fn release(&self) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Image(image) => image.release(),
            Kind::Memory(..) => Ok(()),
        }
    }

    /// Flushes everything that the guest wrote to the medium, so that other hosts see it. The guest may run. Takes as
    /// long as the medium does.
    ///
    /// # Errors
    ///
    /// The data cannot be written.
    pub fn flush(&self) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Image(image) => image.flush(),
            Kind::Memory(file, path) => rustix::fs::fsync(file).map_err(|errno| BlockError::File {
                path: path.clone(),
                action: "be flushed",
                source: errno.into(),
            }),
        }
    }

    /// Takes the lock, unless it is held already.
    ///
    /// # Errors
    ///
    /// Another program has it locked, or the file has changed since it was opened.
    pub fn take(&self) -> Result<(), BlockError> {
        match &self.0 {
            Kind::Image(image) => image.take(),
            Kind::Memory(..) => Ok(()),
        }
    }
}
