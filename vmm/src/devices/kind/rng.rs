//! The entropy device.

use virtio_devices::{CounterText, Rng, RngCounter, RngSpec};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::landlock::{READ, Rule};

/// The source, a doorbell, and two MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 4;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("rng", RngCounter::TEXTS);

pub(super) fn open(spec: &RngSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let rng = Rng::open(spec.clone()).map_err(|error| site.failed(error.kind(), error))?;
    let counters = rng.counters();
    Ok((site.function(rng)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}

/// The source of random bytes.
pub(super) fn files(spec: &RngSpec, option: &str) -> Vec<Rule> {
    vec![Rule::new(option, &spec.source, READ)]
}
