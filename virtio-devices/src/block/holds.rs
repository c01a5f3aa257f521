//! Host storage that devices write to, and its locks; handed over when the guest migrates.

use super::error::BlockError;
use super::hold::Hold;

/// Failure to flush, release or lock the storage of a device.
#[derive(Debug, thiserror::Error)]
#[error("{option}: {error}")]
pub struct HoldError {
    /// The option that names the device.
    pub option: String,
    /// The cause.
    pub error: BlockError,
}

/// All storage of a VM, each with the option that names its device. Usable by any thread.
#[derive(Clone, Default)]
pub struct Holds(pub Vec<(String, Hold)>);

impl Holds {
    /// True if there is none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Flushes everything to its medium, while the guest may run. Takes as long as the media do.
    ///
    /// # Errors
    ///
    /// A medium cannot be flushed.
    pub fn flush(&self) -> Result<(), HoldError> {
        self.each(Hold::flush)
    }

    /// Flushes everything to its medium and releases the locks. The storage must not be used until [`Self::take`].
    /// Takes as long as the media do.
    ///
    /// # Errors
    ///
    /// A medium cannot be flushed. Locks already released stay so.
    pub fn release(&self) -> Result<(), HoldError> {
        self.flush()?;
        self.each(Hold::release)
    }

    /// The same, for another program of this host, which needs no flush.
    ///
    /// # Errors
    ///
    /// Cached data cannot be written.
    pub fn pass(&self) -> Result<(), HoldError> {
        self.each(Hold::release)
    }

    /// Takes the locks that are not held.
    ///
    /// # Errors
    ///
    /// Another program has a lock, or an image has changed. Locks already taken stay so.
    pub fn take(&self) -> Result<(), HoldError> {
        self.each(Hold::take)
    }

    fn each(&self, act: impl Fn(&Hold) -> Result<(), BlockError>) -> Result<(), HoldError> {
        let failed = |option: &String| {
            let option = option.clone();
            |error| HoldError { option, error }
        };
        self.0.iter().try_for_each(|(option, hold)| act(hold).map_err(failed(option)))
    }
}
