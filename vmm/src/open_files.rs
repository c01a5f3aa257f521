//! How many files a process may have open, and how many a VM needs.
//!
//! A VM that is short of them would start, and fail when its guest enables VFs: what it may need is reckoned before anything is
//! opened.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{BackendPlan, DevicePlan, DiskPlan, NicPlan, Vhost};
use crate::error::Error;

/// What a VM has open whatever its devices are: KVM, memory, payload, console, log, signals, and room for what is open for a
/// moment.
const OTHERS: u64 = 64;

/// Of each queue of a disk the doorbell, an MSI-X vector, an io_uring and an eventfd for its completions.
const OF_DISK_QUEUE: u64 = 4;
/// The other end of a console (a socket, who waits for it, and its client), its doorbell, and three MSI-X vectors.
const OF_CONSOLE: u64 = 7;
/// A socket with who listens there, what comes from its other end, what it keeps there for a reconnection; or a device.
const OF_SOCKET_OR_DEVICE: u64 = 4;
/// The source of the entropy device, its doorbell, and two MSI-X vectors.
const OF_RNG: u64 = 4;

/// Raises the limit of open files as far as this process may.
///
/// # Errors
///
/// [`Error::OpenFiles`] when that is too little for a VM with all these devices and vCPUs, beside the `others` that were open
/// before there was one.
pub fn reserve<'a>(devices: impl IntoIterator<Item = &'a DevicePlan>, vcpus: u32, others: u64) -> Result<(), Error> {
    let given = getrlimit(Resource::Nofile);
    // Where this is forbidden, what there is may be enough.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: given.maximum, maximum: given.maximum });
    let needed = needed(devices, vcpus, others);
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => Err(Error::OpenFiles { needed, limit }),
        _ => Ok(()),
    }
}

/// How many files a VM may have open at once. Those of VFs that are not enabled yet are among them.
fn needed<'a>(devices: impl IntoIterator<Item = &'a DevicePlan>, vcpus: u32, others: u64) -> u64 {
    others + OTHERS + u64::from(vcpus) + devices.into_iter().map(of_device).sum::<u64>()
}

/// How many files this process has open.
pub fn already_open() -> u64 {
    // Without /proc nothing is known of what was passed in, and nearly always there is nothing.
    std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64)
}

fn of_device(plan: &DevicePlan) -> u64 {
    match plan {
        DevicePlan::Net(net) => net.functions().map(of_function).sum(),
        DevicePlan::Disk(DiskPlan { queues, .. }) => 1 + u64::from(*queues) * OF_DISK_QUEUE + 1,
        DevicePlan::Console => OF_CONSOLE,
        DevicePlan::Rng(_) => OF_RNG,
    }
}

/// One for each MSI-X vector: those of the queues, of the control queue and of configuration changes; and what the backend has. Of a
/// tap that was passed in there is what was passed, and the NIC's own.
fn of_function(plan: &NicPlan) -> u64 {
    let pairs = u64::from(plan.queue_pairs);
    let backend = match plan.backend {
        BackendPlan::Tap { vhost, .. } => pairs + of_worker(pairs, vhost),
        BackendPlan::Fds { vhost, .. } => 2 * pairs + of_worker(pairs, vhost),
        BackendPlan::VhostUser { .. } | BackendPlan::Vdpa { .. } => OF_SOCKET_OR_DEVICE + of_offloaded(pairs),
    };
    backend + 2 * pairs + 2
}

/// Of each pair of a tap's queues the doorbell. The kernel's worker has two doorbells for it, and a device and a copy of the tap's queue.
fn of_worker(pairs: u64, vhost: Vhost) -> u64 {
    if vhost == Vhost::Off { pairs } else { of_offloaded(pairs) + 2 * pairs }
}

/// Of a backend that runs the queues by itself the doorbell of each, the worker's and that of the control queue, a stand-in for
/// interrupts and one for errors.
const fn of_offloaded(pairs: u64) -> u64 {
    2 * pairs + 4
}

#[cfg(test)]
mod tests {
    use crate::config::VmConfig;

    use super::*;

    fn devices(nets: &[&str]) -> Vec<DevicePlan> {
        let mut config = VmConfig { net: nets.iter().map(|net| net.parse().unwrap()).collect(), ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        config.plan().unwrap().devices()
    }

    #[test]
    fn each_function_counts_whether_its_vf_is_enabled_or_not() {
        let with = |nets: &[&str]| needed(&devices(nets), 1, 10);
        let (none, one) = (with(&[]), with(&["sriov_vfs=63"]));
        assert_eq!(none, 10 + OTHERS + 1 + OF_RNG);
        // A tap, a doorbell and 4 interrupts.
        assert_eq!(one - none, 64 * 6);
        assert_eq!(with(&["sriov_vfs=63", "sriov_vfs=63"]) - none, 2 * (one - none));
        assert_eq!(with(&["fd=7"]) - none, 7);
        // A tap, a kernel's device and what it has of the tap, 2 doorbells, 4 of the worker, and 4 interrupts.
        assert_eq!(with(&["vhost=on"]) - none, 13);
        assert_eq!(with(&["vhost_user=on,socket=/s"]) - none, 14);
        assert_eq!(with(&["vdpa=/d"]) - none, 14);
    }
}
