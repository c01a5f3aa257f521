//! Persistent memory whose writes are in no file (`discard_writes=on`). It can go with a guest that has written nothing
//! to it, such as a root image that is mounted read-only.

use std::sync::Arc;

use virtio_devices::FileMapping;

use super::present;

/// The mappings of such memory, each with the option that names the device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Discarded(pub Vec<(String, Arc<FileMapping>)>);

impl Discarded {
    /// Checks that nothing was written to any. Takes as long as their page tables are long: not for the control thread.
    ///
    /// # Errors
    ///
    /// Fails with one line that names the device.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.iter().try_for_each(|(option, mapping)| match present::is_written(mapping) {
            Ok(false) => Ok(()),
            Ok(true) => Err(format!(
                "{option}: discard_writes=on: what the guest has written is nowhere else, and would be lost; remove \
                 the device, or restart the guest and have it mount the device read-only"
            )),
            Err(error) => Err(format!(
                "{option}: discard_writes=on: /proc/self/pagemap, which shows what the guest has written, cannot be \
                 read: {error}; remove the device"
            )),
        })
    }
}
