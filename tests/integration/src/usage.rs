//! The host resources that a VMM uses.

use std::fs;

use crate::vmm::Vmm;

/// Counts from the VMM's `/proc` entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Open file descriptors.
    pub files: usize,
    /// Threads.
    pub threads: usize,
}

impl Usage {
    /// Current usage of `vmm`.
    pub fn of(vmm: &Vmm) -> Usage {
        let count = |folder: &str| fs::read_dir(format!("/proc/{}/{folder}", vmm.id())).unwrap().count();
        Usage { files: count("fd"), threads: count("task") }
    }
}

/// The resident memory of `vmm` in MB, without the guest's memory: the sum of `Rss` over all mappings in `smaps`
/// smaller than `guest_kib` KiB.
pub fn resident(vmm: &Vmm, guest_kib: u64) -> f64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", vmm.id())).unwrap();
    let (mut size, mut total) = (0, 0_u64);
    for line in smaps.lines() {
        let kib = |key: &str| -> Option<u64> { line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse().ok() };
        if let Some(value) = kib("Size:") {
            size = value;
        }
        if let Some(value) = kib("Rss:")
            && size < guest_kib
        {
            total += value;
        }
    }
    total as f64 * 1024.0 / 1e6
}
