//! Pausing and resuming of the guest with its devices, and slowing of its vCPUs.

use std::time::{Duration, Instant};

use virtio_devices::StorageLocks;

use crate::devices::DeviceError;
use crate::vm::announcing::Announcing;
use crate::vm::{Vm, VmError};

/// Time that a pause waits for requests in flight.
const DRAIN: Duration = Duration::from_secs(10);

impl Vm {
    /// True while the guest is paused.
    pub fn is_paused(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.paused)
    }

    /// Pauses the guest and its devices.
    pub fn pause(&mut self) {
        if let Some(running) = &mut self.running
            && !running.paused
        {
            running.vcpus.pause();
            self.devices.pause();
            running.paused = true;
        }
    }

    /// Pauses the guest and its devices within [`DRAIN`].
    ///
    /// # Errors
    ///
    /// Fails if a device does not complete its requests in time, such as a disk whose server is unreachable. The guest
    /// then continues to run.
    pub(crate) fn pause_in_time(&mut self) -> Result<(), VmError> {
        let Some(running) = self.running.as_mut().filter(|running| !running.paused) else { return Ok(()) };
        running.vcpus.pause();
        running.paused = true;
        if let Err(error) = self.devices.pause_by(Instant::now() + DRAIN) {
            self.resume()?;
            return Err(error.into());
        }
        Ok(())
    }

    /// Locks on the host storage that the devices write.
    pub(crate) fn storage_locks(&self) -> StorageLocks {
        self.devices.storage_locks()
    }

    /// Resumes the guest and its devices.
    ///
    /// # Errors
    ///
    /// Fails if the host has no thread or file for a device, or another program has locked a disk that a migration gave
    /// up. The guest stays paused.
    pub fn resume(&mut self) -> Result<(), VmError> {
        if let Some(running) = &mut self.running
            && running.paused
        {
            // Devices hold their storage locks, unless a migration gave them up.
            self.devices.storage_locks().take().map_err(DeviceError::from)?;
            self.devices.resume()?;
            if running.restored.take().is_some() {
                // Notifications may have been lost on the way to the guest.
                self.ged.remind();
                self.serial.iter().for_each(|serial| serial.port().remind());
                let late = self.devices.announce();
                self.announcing = Some(Announcing::begin(Instant::now(), late));
            }
            running.vcpus.resume();
            running.paused = false;
        }
        Ok(())
    }

    /// Turns throttling of the vCPUs on or off. Devices are not throttled.
    pub(crate) fn slow(&self, is_slow: bool) {
        if let Some(running) = &self.running {
            running.vcpus.slow(is_slow);
        }
    }
}
