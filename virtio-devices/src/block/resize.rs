//! Changing the size of a disk that a guest may be using.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use rustix::io::Errno;
use thiserror::Error;

use super::image::Image;
use crate::{ErrorKind, Interrupts};

/// The size of a disk, which the host may change while the guest runs.
pub struct BlockSize {
    image: Arc<Image>,
    /// How often the configuration has changed.
    generation: AtomicU8,
    /// Where the driver hears of it, while it is up.
    driver: Mutex<Option<Arc<Interrupts>>>,
}

impl BlockSize {
    pub(super) fn new(image: Arc<Image>) -> Arc<Self> {
        Arc::new(Self { image, generation: AtomicU8::new(0), driver: Mutex::new(None) })
    }

    /// The size in bytes.
    pub fn get(&self) -> u64 {
        self.image.size()
    }

    /// Changes the size to `bytes`, and notifies the driver. Takes as long as the image's file system takes.
    ///
    /// Where the disk becomes smaller, its queues must be stopped: a request that has begun would make it larger again.
    ///
    /// # Errors
    ///
    /// The image cannot have that size. Nothing has changed then.
    pub fn set(&self, bytes: u64) -> Result<(), ResizeError> {
        if bytes == self.get() {
            return Ok(());
        }
        self.image.resize(bytes)?;
        self.generation.fetch_add(1, Ordering::Release);
        if let Some(interrupts) = &*self.driver.lock() {
            interrupts.signal_config();
        }
        Ok(())
    }

    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// A driver is up, or gone.
    pub(super) fn set_driver(&self, interrupts: Option<Arc<Interrupts>>) {
        *self.driver.lock() = interrupts;
    }
}

/// Why a disk does not get another size: one line, to follow the size that was asked for.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// It is not of whole blocks.
    #[error("must be a multiple of {0}, and not 0")]
    Size(u32),
    /// No file can be that large there.
    #[error("more than a file of this image's file system, or of this process, may have; ask for less")]
    TooLarge,
    /// The image is not written.
    #[error("the disk is read-only and keeps its size; add it without readonly")]
    ReadOnly,
    /// The host has given the block device another size.
    #[error("the block device has {0} bytes; give it the new size on the host first, then repeat this")]
    BlockDevice(u64),
    /// Another program uses what is behind the end of the image.
    #[error("another program has locked what is behind the end of the image; stop it")]
    InUse,
    /// There is no space for it.
    #[error("{0}")]
    Space(String),
    /// The host refuses.
    #[error("the host cannot change the size of the image: {0}")]
    Host(io::Error),
}

impl From<Errno> for ResizeError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::FBIG | Errno::INVAL => Self::TooLarge,
            other => Self::Host(other.into()),
        }
    }
}

impl ResizeError {
    /// Who has to act.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Size(_) | Self::TooLarge => ErrorKind::Invalid,
            Self::ReadOnly | Self::BlockDevice(_) => ErrorKind::Unsuitable,
            Self::InUse => ErrorKind::Busy,
            Self::Space(_) | Self::Host(_) => ErrorKind::Host,
        }
    }
}
