//! The clock.

use virtio_devices::{Rtc, RtcSpec};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// A doorbell, and two MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 3;
pub(super) const THREADS: u64 = 1;

pub(super) fn open(spec: &RtcSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let rtc = Rtc::new(spec.clone());
    let counters = rtc.counters();
    Ok((site.function(rtc)?, Handle::plain("rtc", move || counters.iter().collect())))
}
