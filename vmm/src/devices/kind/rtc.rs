//! The clock.

use virtio_devices::{CounterText, Rtc, RtcCounter, RtcSpec};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// A doorbell, and two MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 3;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("rtc", RtcCounter::TEXTS);

pub(super) fn open(spec: &RtcSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let rtc = Rtc::new(spec.clone());
    let counters = rtc.counters();
    Ok((site.function(rtc)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
