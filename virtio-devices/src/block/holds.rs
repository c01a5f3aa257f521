//! What of the host's storage devices write, and give to another program when their guest moves there.

use super::error::BlockError;
use super::hold::Hold;

/// The storage of a device cannot be flushed, given up or taken.
#[derive(Debug, thiserror::Error)]
#[error("{option}: {error}")]
pub struct HoldError {
    /// The option that names the device.
    pub option: String,
    /// Why not.
    pub error: BlockError,
}

/// All of it, each with the option that names its device. It may be used by any thread.
#[derive(Clone, Default)]
pub struct Holds(pub Vec<(String, Hold)>);

impl Holds {
    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Has everything on its medium, while the guest may go on. Takes as long as the media do.
    ///
    /// # Errors
    ///
    /// One cannot be flushed.
    pub fn flush(&self) -> Result<(), HoldError> {
        self.each(Hold::flush)
    }

    /// Has everything on its medium and gives the locks up. Nothing of it may be used until [`Self::take`]. Takes as
    /// long as the media do.
    ///
    /// # Errors
    ///
    /// One cannot be flushed. Locks that were given up stay so.
    pub fn release(&self) -> Result<(), HoldError> {
        self.flush()?;
        self.each(Hold::release)
    }

    /// The same, to another program of this host, which needs nothing on the medium.
    ///
    /// # Errors
    ///
    /// What is only in memory cannot be written.
    pub fn pass(&self) -> Result<(), HoldError> {
        self.each(Hold::release)
    }

    /// Takes the locks that are not held.
    ///
    /// # Errors
    ///
    /// One is another program's, or its image is not what it was. Those that were taken stay so.
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
