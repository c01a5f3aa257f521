//! The watchdog.

use std::sync::Arc;

use virtio_devices::{CounterText, Watchdog, WatchdogCounter};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// A doorbell, and two MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 3;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("watchdog", WatchdogCounter::TEXTS);

pub(super) fn open(site: &Site<'_>) -> Result<Opened, DeviceError> {
    let watchdog = Watchdog::new(&site.plan.id, Arc::clone(&site.host.expiry));
    let counters = watchdog.counters();
    Ok((site.function(watchdog)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
