//! Writes to the common configuration, and causes of a function's resets.

use pci::ResetKind;

use super::VirtioFunction;
use crate::transport::Change;
use crate::{ResetBy, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// Writes `data` at `offset` of the common configuration.
    pub(super) fn common_write(&mut self, offset: u64, data: &[u8]) -> Change {
        let before = self.status();
        let change = self.transport.write(offset, data);
        if matches!(change, Change::Reset) && !before.is_empty() {
            self.reset_by = ResetBy::Driver;
        }
        change
    }

    /// Records the cause of a reset by PCI, before the device is reset. Without a driver there is nothing to record: each
    /// driver first resets its function, and does not thereby become the cause of an earlier reset.
    pub(super) fn note_reset(&mut self, kind: ResetKind) {
        if !self.status().is_empty() {
            self.reset_by = match kind {
                ResetKind::Flr => ResetBy::Flr,
                ResetKind::Conventional => ResetBy::Conventional,
            };
        }
    }

    /// The cause of the last reset while a driver used the function.
    pub(crate) fn reset_by(&self) -> ResetBy {
        self.reset_by
    }
}
