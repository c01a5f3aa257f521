//! The kernel's file systems for debugging and tracing.

use std::path::Path;
use std::process::Command;

/// Mount point of debugfs.
pub(crate) const DEBUG: &str = "/sys/kernel/debug";
/// Mount point of tracefs.
pub(crate) const TRACING: &str = "/sys/kernel/tracing";

/// Mounts debugfs, unless it is mounted. Panics if the kernel has none.
pub(crate) fn mount_debugfs() {
    mount("debugfs", DEBUG, "kvm");
}

/// Mounts tracefs, unless it is mounted. Panics if the kernel has none.
pub(crate) fn mount_tracefs() {
    mount("tracefs", TRACING, "trace");
}

/// Mounts the file system `name` at `folder`, unless its file `file` is there already.
fn mount(name: &str, folder: &str, file: &str) {
    if !Path::new(folder).join(file).exists() {
        let mounted = Command::new("mount").args(["-t", name, name, folder]).status();
        assert!(mounted.is_ok_and(|status| status.success()), "{name} can be mounted");
    }
}
