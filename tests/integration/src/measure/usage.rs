//! The host resources that a VMM uses.

use std::time::Duration;
use std::{fs, io, thread};

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
    /// Current usage of `vmm`, once it is stable: a connection of the API is closed after its client has received its
    /// answer, and a joined thread may be listed for a moment. Not counting the threads `http-N`, which serve the API's
    /// clients and end when they are idle.
    pub fn of(vmm: &Vmm) -> Usage {
        let mut last = Usage::now(vmm);
        for _ in 0..200 {
            thread::sleep(Duration::from_millis(50));
            let now = Usage::now(vmm);
            if now == last {
                return now;
            }
            last = now;
        }
        last
    }

    fn now(vmm: &Vmm) -> Usage {
        let entries = |folder: &str| fs::read_dir(format!("/proc/{}/{folder}", vmm.id())).unwrap();
        let is_counted = |task: io::Result<fs::DirEntry>| {
            let name = fs::read_to_string(task.unwrap().path().join("comm"));
            name.is_ok_and(|name| name == "http-server\n" || !name.starts_with("http-"))
        };
        Usage {
            files: entries("fd").count(),
            threads: entries("task").map(is_counted).filter(|counted| *counted).count(),
        }
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
