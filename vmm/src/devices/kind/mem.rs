//! Memory devices.

use std::sync::Arc;

use virtio_devices::{CounterText, Mem, MemCounter, MemSpec};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// A doorbell, and two MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 3;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("mem", MemCounter::TEXTS);

/// Opens a device that adds to this part of the memory.
pub(super) fn open(spec: &MemSpec, part: usize, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let region = site.host.mem_regions.of(part).ok_or_else(|| DeviceError::NoRegion { option: site.option() })?;
    let mem = Mem::new(spec.clone(), Arc::clone(region));
    let counters = mem.counters();
    Ok((site.function(mem)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
