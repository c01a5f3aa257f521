//! Host storage that devices write to, and its locks; handed over when the guest migrates.

use super::error::BlockError;
use super::storage_lock::StorageLock;

/// Failure to flush, release or lock the storage of a device.
#[derive(Debug, thiserror::Error)]
#[error("{option}: {error}")]
pub struct StorageLockError {
    /// The option that names the device.
    pub option: String,
    /// The cause.
    pub error: BlockError,
}

/// All storage of a VM, each with the option that names its device. Usable by any thread.
#[derive(Clone, Default)]
pub struct StorageLocks(pub Vec<(String, StorageLock)>);

impl StorageLocks {
    /// True if there is none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Flushes everything to its medium, while the guest may run. Takes as long as the media do.
    ///
    /// # Errors
    ///
    /// A medium cannot be flushed.
    pub fn flush(&self) -> Result<(), StorageLockError> {
        self.each(StorageLock::flush)
    }

    /// Flushes everything to its medium and releases the locks. The storage must not be used until [`Self::take`].
    /// Takes as long as the media do.
    ///
    /// # Errors
    ///
    /// A medium cannot be flushed. Locks already released stay so.
    pub fn release(&self) -> Result<(), StorageLockError> {
        self.flush()?;
        self.each(StorageLock::release)
    }

    /// The same, for another program of this host, which needs no flush.
    ///
    /// # Errors
    ///
    /// Cached data cannot be written.
    pub fn pass(&self) -> Result<(), StorageLockError> {
        self.each(StorageLock::release)
    }

    /// Takes the locks that are not held.
    ///
    /// # Errors
    ///
    /// Another program has a lock, or an image has changed. Locks already taken stay so.
    pub fn take(&self) -> Result<(), StorageLockError> {
        self.each(StorageLock::take)
    }

    fn each(&self, act: impl Fn(&StorageLock) -> Result<(), BlockError>) -> Result<(), StorageLockError> {
        let failed = |option: &String| {
            let option = option.clone();
            |error| StorageLockError { option, error }
        };
        self.0.iter().try_for_each(|(option, lock)| act(lock).map_err(failed(option)))
    }
}
