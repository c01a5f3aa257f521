//! The balloon.

use std::sync::Arc;

use virtio_devices::{Balloon, BalloonCounter, BalloonSpec, CounterText};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// A doorbell, and four MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 5;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("balloon", BalloonCounter::TEXTS);

pub(super) fn open(spec: &BalloonSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let balloon = Balloon::new(spec.clone(), Arc::clone(&site.host.balloon));
    let counters = balloon.counters();
    Ok((site.function(balloon)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
