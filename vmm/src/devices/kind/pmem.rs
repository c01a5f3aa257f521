//! Persistent memory.

use virtio_devices::{CounterText, Pmem, PmemCounter, PmemSpec};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::landlock::{READ, Rule, WRITE};

/// The file, a doorbell, and two MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 4;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("pmem", PmemCounter::TEXTS);

pub(super) fn open(spec: &PmemSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let pmem = Pmem::open(spec.clone()).map_err(|error| site.failed(error.kind(), error))?;
    let (counters, lock) = (pmem.counters(), pmem.storage_lock());
    let read = Box::new(move || counters.iter().collect());
    Ok((site.function(pmem)?, Handle::Plain { kind: COUNTERS.0, read, lock, socket: None }))
}

/// The file, or the folder of a temporary one.
pub(super) fn files(spec: &PmemSpec, option: &str) -> Vec<Rule> {
    vec![Rule::new(option, &spec.file, if spec.discard_writes { READ } else { READ | WRITE })]
}

/// Reason why its content cannot be saved, if so.
pub(super) fn unsaved(spec: &PmemSpec) -> Option<&'static str> {
    let what = "file= is a folder: its temporary file would be lost; remove the device, or give it a file";
    spec.file.is_dir().then_some(what)
}
