//! Counts the VM exits caused by ringing doorbells.

use std::fs;
use std::path::Path;

use crate::measure::kernel_fs::{TRACING, mount_tracefs};

/// The KVM function that signals a doorbell's eventfd, called once per write.
const PROBE: &str = "p:rings/ioeventfd ioeventfd_write";

/// Counts writes to eventfd doorbells, over all VMs, until dropped. The kernel's probe counts every hit.
pub struct DoorbellExits;

impl DoorbellExits {
    /// Starts counting. Panics if the kernel has no such probe.
    pub fn count() -> DoorbellExits {
        mount_tracefs();
        let write = |file: &str, text: &str| {
            let path = Path::new(TRACING).join(file);
            fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error} for {text:?}", path.display()));
        };
        write("kprobe_events", PROBE);
        write("events/rings/ioeventfd/enable", "1");
        DoorbellExits
    }

    /// The number of writes so far.
    pub fn so_far(&self) -> u64 {
        let profile = fs::read_to_string(Path::new(TRACING).join("kprobe_profile")).unwrap();
        let counted = profile.lines().find_map(|line| line.trim().strip_prefix("ioeventfd")?.split_whitespace().next());
        counted.and_then(|hits| hits.parse().ok()).unwrap_or_else(|| panic!("the probe is not in {profile:?}"))
    }
}

impl Drop for DoorbellExits {
    fn drop(&mut self) {
        let tracing = Path::new(TRACING);
        // No assertion here: it would hide the cause of a failing test.
        let _ = fs::write(tracing.join("events/rings/ioeventfd/enable"), "0");
        let _ = fs::write(tracing.join("kprobe_events"), "");
    }
}
