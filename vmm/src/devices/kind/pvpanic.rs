//! The device that reports guest panics.

use std::sync::Arc;

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::devices::pvpanic::Pvpanic;

pub(super) const OPEN_FILES: u64 = 0;
pub(super) const THREADS: u64 = 0;

pub(super) fn open(site: &Site<'_>) -> Result<Opened, DeviceError> {
    let device = Pvpanic::new(site.placement.rid, &site.host.events);
    let device = device.map_err(|error| DeviceError::Function { option: site.option(), error: error.into() })?;
    let reports = Arc::clone(device.reports());
    Ok((Box::new(device), Handle::plain("pvpanic", move || reports.counters())))
}
