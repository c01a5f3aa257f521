//! How often a guest that rings a doorbell leaves itself for it.

use std::fs;
use std::path::Path;
use std::process::Command;

const TRACING: &str = "/sys/kernel/tracing";
/// KVM's function that signals the eventfd of a doorbell, once for each write that comes to it.
const PROBE: &str = "p:rings/ioeventfd ioeventfd_write";

/// Counts doorbells that are eventfds, over all VMs, while it lives. The kernel's probe counts each hit by itself.
pub struct DoorbellExits;

impl DoorbellExits {
    /// Begins to count. Panics where the kernel cannot.
    pub fn count() -> DoorbellExits {
        if !Path::new(TRACING).join("trace").exists() {
            let mounted = Command::new("mount").args(["-t", "tracefs", "tracefs", TRACING]).status();
            assert!(mounted.is_ok_and(|status| status.success()), "tracefs can be mounted");
        }
        let write = |file: &str, text: &str| {
            let path = Path::new(TRACING).join(file);
            fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error} for {text:?}", path.display()));
        };
        write("kprobe_events", PROBE);
        write("events/rings/ioeventfd/enable", "1");
        DoorbellExits
    }

    /// How many there were until now.
    pub fn so_far(&self) -> u64 {
        let profile = fs::read_to_string(Path::new(TRACING).join("kprobe_profile")).unwrap();
        let counted = profile.lines().find_map(|line| line.trim().strip_prefix("ioeventfd")?.split_whitespace().next());
        counted.and_then(|hits| hits.parse().ok()).unwrap_or_else(|| panic!("no hits of the probe in {profile:?}"))
    }
}

impl Drop for DoorbellExits {
    fn drop(&mut self) {
        let tracing = Path::new(TRACING);
        // A test that has failed shall say why, and not this.
        let _ = fs::write(tracing.join("events/rings/ioeventfd/enable"), "0");
        let _ = fs::write(tracing.join("kprobe_events"), "");
    }
}
