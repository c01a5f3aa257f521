//! Persistent memory whose writes are in no file (`discard_writes=on`). A guest can be saved or migrated only if it has
//! never written to such memory, for example a root image that is mounted read-only.

use std::sync::Arc;

use virtio_devices::FileMapping;

use super::present;

/// Mappings of persistent memory, with the options that name their devices.
#[derive(Debug, Clone, Default)]
pub(crate) struct Discarded(pub Vec<(String, Arc<FileMapping>)>);

impl Discarded {
    /// Checks that the guest has written to none of them. Scans page tables: not for the control thread.
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
