//! Limits of the host for this process: open files, threads and memory mappings. A VM that may need more is refused
//! before any part of it exists; otherwise it would boot, and fail when its guest enables VFs.
//!
//! The limits are read when the program starts, because a process that is confined to its VM's files cannot read them.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, geteuid, getrlimit};

use crate::config::DevicePlan;
use crate::vm::error::VmError;
use crate::vm::open_files;
use crate::vm::threads_needed::{self, ThreadLimits};

/// Limits of the process, and its use apart from its VM.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostLimits {
    /// Files that are open already, and those that clients may open.
    other_files: u64,
    /// Threads and their memory mappings.
    threads: ThreadLimits,
    /// Memory of the host in bytes, if it is known.
    memory: Option<u64>,
}

impl HostLimits {
    /// Reads the limits. Clients of the API may open `clients` files.
    pub(crate) fn read(clients: u64) -> Self {
        let other_files = open_files::already_open() + clients;
        let mappings = number("/proc/sys/vm/max_map_count");
        let user = getrlimit(Resource::Nproc).current.filter(|_| !geteuid().is_root());
        let threads = [
            (number("/proc/sys/kernel/threads-max"), "sysctl kernel.threads-max"),
            (number("/proc/sys/kernel/pid_max"), "sysctl kernel.pid_max"),
            (user, "ulimit -u, or LimitNPROC= in a systemd unit"),
            (of_control_group(), "pids.max of the control group, or TasksMax= in a systemd unit"),
        ];
        let threads = threads.into_iter().filter_map(|(limit, raise)| Some((limit?, raise))).min();
        Self { other_files, threads: ThreadLimits { threads, mappings }, memory: total_memory() }
    }

    /// The warning about a guest with `size` bytes of memory, if the host has less.
    pub(super) fn excess(&self, size: u64) -> Option<String> {
        let memory = self.memory.filter(|memory| size > *memory)?;
        let [size, host] = [size, memory].map(|bytes| bytes >> 20);
        Some(format!(
            "the guest has {size} MiB of memory, and this host {host} MiB: the host's kernel ends processes once they \
             use more than it has; give a smaller --memory size"
        ))
    }

    /// Raises the soft limit of open files to the hard limit, and checks that all limits suffice.
    ///
    /// # Errors
    ///
    /// Fails with the limit that is too low for a VM with these devices and vCPUs.
    pub(super) fn reserve<'a>(
        &self,
        devices: impl IntoIterator<Item = &'a DevicePlan> + Clone,
        vcpus: u32,
    ) -> Result<(), VmError> {
        threads_needed::check(devices.clone(), vcpus, &self.threads)?;
        open_files::reserve(devices, vcpus, self.other_files)
    }
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Memory of this host, in bytes.
fn total_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.trim().strip_suffix(" kB")?;
    kib.parse::<u64>().ok()?.checked_mul(1024)
}

/// The lowest thread limit of this process's control group (version 2) and its ancestors.
fn of_control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = Path::new("/sys/fs/cgroup").join(own);
    own.ancestors().filter_map(|group| number(group.join("pids.max"))).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linux_host_has_limits_of_threads_and_mappings() {
        let limits = HostLimits::read(10);
        assert!(limits.other_files > 10 + 2);
        assert!(limits.threads.mappings > Some(1000), "{limits:?}");
        assert!(limits.threads.threads.is_some_and(|(limit, _)| limit > 100), "{limits:?}");
        assert!(limits.memory > Some(64 << 20), "{limits:?}");
    }

    #[test]
    fn a_guest_larger_than_the_host_is_warned_of() {
        let limits = HostLimits { memory: Some(8 << 30), ..HostLimits::default() };
        assert_eq!(limits.excess(8 << 30), None);
        let line = limits.excess(1000 << 30).unwrap();
        assert!(line.contains("1024000 MiB") && line.contains("8192 MiB") && line.contains("--memory size"), "{line}");
        assert_eq!(HostLimits::default().excess(u64::MAX), None);
    }
}
