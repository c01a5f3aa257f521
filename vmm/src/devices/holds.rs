//! Host storage that devices write, and hand over when their guest moves to another program.

use virtio_devices::Hold;

use super::{DeviceError, Devices};

/// All of it, each with the option that names its device. It may be used by any thread.
#[derive(Clone, Default)]
pub(crate) struct Holds(Vec<(String, Hold)>);

impl Devices {
    /// Storage that the devices write.
    pub(crate) fn holds(&self) -> Holds {
        let of = |plugged: &super::Plugged| Some((plugged.plan.option(), plugged.hold()?));
        Holds(self.plugged.iter().filter_map(of).collect())
    }
}

impl Holds {
    /// True if there is none.
    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Has everything on its medium, while the guest may go on. Takes as long as the media do.
    ///
    /// # Errors
    ///
    /// Fails if one cannot be flushed.
    pub(crate) fn flush(&self) -> Result<(), DeviceError> {
        self.each(Hold::flush)
    }

    /// Has everything on its medium and gives the locks up. Nothing of it may be used until [`Self::take`]. Takes as
    /// long as the media do.
    ///
    /// # Errors
    ///
    /// Fails if one cannot be flushed. Locks that were given up stay so.
    pub(crate) fn release(&self) -> Result<(), DeviceError> {
        self.flush()?;
        self.each(Hold::release)
    }

    /// The same, to another program of this host, which needs nothing on the medium.
    ///
    /// # Errors
    ///
    /// Fails if cached data cannot be written.
    pub(crate) fn pass(&self) -> Result<(), DeviceError> {
        self.each(Hold::release)
    }

    /// Takes the locks that are not held.
    ///
    /// # Errors
    ///
    /// Fails if one is another program's, or its image is not what it was. Those that were taken stay so.
    pub(crate) fn take(&self) -> Result<(), DeviceError> {
        self.each(Hold::take)
    }

    fn each(&self, act: impl Fn(&Hold) -> Result<(), virtio_devices::BlockError>) -> Result<(), DeviceError> {
        let failed = |option: &String| {
            let option = option.clone();
            |error| DeviceError::Disk { option, error }
        };
        self.0.iter().try_for_each(|(option, hold)| act(hold).map_err(failed(option)))
    }
}
