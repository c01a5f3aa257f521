//! Resizing of a disk that a guest may be using.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;

use super::error::ResizeError;
use super::image::Image;
use crate::Interrupts;

/// The size of a disk, which the host may change while the guest runs.
pub struct BlockSize {
    image: Arc<Image>,
    /// Number of changes of the configuration.
    generation: AtomicU8,
    /// Interrupts of the driver, while it runs.
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
    /// Stop the queues before making the disk smaller: a request in flight would enlarge it again.
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

    /// Sets or removes the running driver.
    pub(super) fn set_driver(&self, interrupts: Option<Arc<Interrupts>>) {
        *self.driver.lock() = interrupts;
    }
}
