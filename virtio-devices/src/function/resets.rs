//! Writes to the common configuration, and causes of a function's resets.

use std::sync::Arc;

use pci::{Effects, ResetKind, VfChange};

use super::VirtioFunction;
use crate::transport::Change;
use crate::{DriverLog, ResetBy, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// Writes `data` at `offset` of the common configuration.
    pub(super) fn common_write(&mut self, offset: u64, data: &[u8]) -> Change {
        let before = self.status();
        let change = self.transport.write(offset, data);
        if let Some(log) = &self.log {
            self.transport.log_write(before, offset, data, &mut |line| log.log(line));
        }
        if matches!(change, Change::Reset) && !before.is_empty() {
            self.reset_by = ResetBy::Driver;
        }
        change
    }

    /// Records the cause of a reset by PCI, before the device is reset. Without a driver there is nothing to record:
    /// each driver first resets its function, and does not thereby become the cause of an earlier reset.
    pub(super) fn note_reset(&mut self, kind: ResetKind) {
        if !self.status().is_empty() {
            self.reset_by = cause(kind);
            if let Some(log) = &self.log {
                log.log(|| format!("driver status 0x0: {}", reset_text(kind)));
            }
        }
    }

    /// Records the cause if `effects` of the function's registers disable its VFs.
    pub(super) fn note_disabled(&mut self, effects: Effects) {
        if matches!(effects.vfs, Some(VfChange::Disabled { .. })) {
            self.vfs_disabled_by = effects.reset.map_or(ResetBy::Driver, cause);
        }
    }

    /// The number of conventional resets.
    pub(crate) fn conventional_resets(&self) -> u64 {
        self.conventional_resets
    }

    /// The cause of the last disabling of its VFs.
    pub(crate) fn vfs_disabled_by(&self) -> ResetBy {
        self.vfs_disabled_by
    }

    /// Logs the driver's actions from now on as those of the function `name`.
    pub(crate) fn log_driver(&mut self, name: &str) {
        self.log = Some(Arc::new(DriverLog::new(name)));
    }

    /// The cause of the last reset while a driver used the function.
    pub(crate) fn reset_by(&self) -> ResetBy {
        self.reset_by
    }
}

const fn cause(kind: ResetKind) -> ResetBy {
    match kind {
        ResetKind::Flr => ResetBy::Flr,
        ResetKind::Conventional => ResetBy::Conventional,
    }
}

const fn reset_text(kind: ResetKind) -> &'static str {
    match kind {
        ResetKind::Flr => "a function level reset",
        ResetKind::Conventional => "a reset of the device, or its VFs were disabled",
    }
}
