//! Limits of the host for this process: open files, threads and memory mappings. A VM that may need more is refused
//! before anything of it is made; otherwise it would boot, and fail when its guest enables VFs.
//!
//! The limits are read when the program starts, because a process that is confined to its VM's files cannot read them.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, geteuid, getrlimit};

use crate::config::DevicePlan;
use crate::vm::error::VmError;
use crate::vm::open_files;
use crate::vm::threads_needed::{self, ThreadLimits};

/// Limits of the process, and its use besides its VM.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostLimits {
    /// Files that are open, and those that clients may open.
    other_files: u64,
    /// Threads and their memory mappings.
    threads: ThreadLimits,
}

impl HostLimits {
    /// Reads them. Clients of the API may open `clients` files.
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
        Self { other_files, threads: ThreadLimits { threads, mappings } }
    }

    /// Raises the soft limit of open files to the hard limit, and checks that all limits suffice.
    ///
    /// # Errors
    ///
    /// The limit that is too low for a VM with these devices and vCPUs.
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

/// The lowest limit of threads of this process's control group (version 2) and those that it is in.
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
    }
}
