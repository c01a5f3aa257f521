//! What the VMM has of its host.

use std::fs;

use crate::vmm::Vmm;

/// What a VMM's process has, by `/proc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Open file descriptors.
    pub files: usize,
    /// Threads.
    pub threads: usize,
}

impl Usage {
    /// What `vmm` has now.
    pub fn of(vmm: &Vmm) -> Usage {
        let count = |folder: &str| fs::read_dir(format!("/proc/{}/{folder}", vmm.id())).unwrap().count();
        Usage { files: count("fd"), threads: count("task") }
    }
}

/// The memory of `vmm` that is resident, in MB: the sum of `Rss` over all mappings in `smaps` but those of `guest_kib` KiB and more,
/// which are the guest's memory.
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
