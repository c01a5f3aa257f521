//! The virtual IOMMU.

use virtio_devices::{CounterText, IommuCounter, IommuDevice};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// A doorbell, and its vectors.
pub(super) const OPEN_FILES: u64 = 4;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("iommu", IommuCounter::TEXTS);

pub(super) fn open(site: &Site<'_>) -> Result<Opened, DeviceError> {
    let iommu = site.host.iommu.clone().ok_or(DeviceError::NoIommu)?;
    let (counters, device) = (iommu.counters(), IommuDevice::new(&site.plan.id, iommu));
    Ok((site.function(device)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
