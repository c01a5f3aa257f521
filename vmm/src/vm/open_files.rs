//! The open files that a VM may need, checked against the process's limit (RLIMIT_NOFILE).
//!
//! With too low a limit, a VM would boot, and fail when its guest enables VFs. So the limit is checked before anything
//! is opened.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{BackendPlan, DeviceKind, DevicePlan, NicPlan, Vhost};
use crate::vm::error::VmError;

/// Files of a VM besides its devices and those of the API's clients: KVM, memory, payload, consoles, log, signals, and
/// some for short-lived use.
const OTHERS: u64 = 64;

/// For each queue of a disk: the doorbell, an MSI-X vector, an io_uring, and the eventfd of its completions.
const OF_DISK_QUEUE: u64 = 4;
/// For a virtio console: its host side (a socket, its epoll, its client and an eventfd), a doorbell, and three MSI-X
/// vectors.
const OF_CONSOLE: u64 = 8;
/// For a vhost-user backend: listener, connection, back-channel and inflight region, and at most two that come beside
/// an answer, or the far end of the back-channel, until they are closed; enough for a vDPA device as well.
const OF_SOCKET_OR_DEVICE: u64 = 6;
/// For a port of a switch: the doorbell of its queues.
const OF_PORT: u64 = 1;
/// For a worker of a switch: its poll set and what wakes it.
const OF_SWITCH_WORKER: u64 = 2;
/// For the uplink of a switch: the tap, one that was passed, and its watch.
const OF_UPLINK: u64 = 3;
/// For the entropy device: its source, doorbell, and two MSI-X vectors.
const OF_RNG: u64 = 4;
/// For the balloon: a doorbell, and four MSI-X vectors.
const OF_BALLOON: u64 = 5;
/// For a memory device: a doorbell, and two MSI-X vectors.
const OF_MEM: u64 = 3;
/// For the clock: a doorbell, and two MSI-X vectors.
const OF_RTC: u64 = 3;
/// Of the virtual IOMMU: a doorbell, and its vectors.
const OF_IOMMU: u64 = 4;
/// For the socket device: its socket, poll set and doorbell, and four MSI-X vectors. Connections for which there is no
/// file are refused, one by one.
const OF_VSOCK: u64 = 7;

/// For the watchdog: a doorbell, and two MSI-X vectors.
const OF_WATCHDOG: u64 = 3;

/// For persistent memory: its file, a doorbell, and two MSI-X vectors.
const OF_PMEM: u64 = 4;

/// For a device of the host: the device, its group, the container, KVM's device, three that watch it, and as many MSI-X
/// vectors as usual devices use. Beyond, a driver is refused a vector. By iommufd it has two copies of the device's
/// file in place of the first two, and a third that a client may have sent.
const OF_VFIO: u64 = 8 + 64;

/// Raises the soft limit of open files to the hard limit, and checks that it suffices.
///
/// # Errors
///
/// [`VmError::OpenFiles`] if the limit is too low for a VM with these devices and vCPUs, plus `others`: the files that
/// were open before, and those that clients may open.
pub(super) fn reserve<'a>(
    devices: impl IntoIterator<Item = &'a DevicePlan>,
    vcpus: u32,
    others: u64,
) -> Result<(), VmError> {
    let given = getrlimit(Resource::Nofile);
    // If this fails, the current limit may still be enough.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: given.maximum, maximum: given.maximum });
    let needed = needed(devices, vcpus, others);
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => Err(VmError::OpenFiles { needed, limit }),
        _ => Ok(()),
    }
}

/// Files that the VM may have open at once, including those of VFs that are not enabled yet.
fn needed<'a>(devices: impl IntoIterator<Item = &'a DevicePlan>, vcpus: u32, others: u64) -> u64 {
    others + OTHERS + u64::from(vcpus) + devices.into_iter().map(of_device).sum::<u64>()
}

/// Files that this process has open.
pub(crate) fn already_open() -> u64 {
    // Without /proc, assume that no files were passed in.
    std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64)
}

fn of_device(plan: &DevicePlan) -> u64 {
    match &plan.kind {
        DeviceKind::Net(net) => {
            let of_switch =
                net.switch.as_ref().map_or(0, |switch| u64::from(switch.workers) * OF_SWITCH_WORKER + OF_UPLINK);
            of_switch + net.functions().map(of_function).sum::<u64>()
        }
        DeviceKind::Disk(disk) => 1 + u64::from(disk.queues) * OF_DISK_QUEUE + 1,
        DeviceKind::Console => OF_CONSOLE,
        DeviceKind::Rng(_) => OF_RNG,
        DeviceKind::Balloon(_) => OF_BALLOON,
        DeviceKind::Vsock(_) => OF_VSOCK,
        DeviceKind::Pmem(_) => OF_PMEM,
        DeviceKind::Watchdog => OF_WATCHDOG,
        DeviceKind::Pvpanic => 0,
        DeviceKind::Mem { .. } => OF_MEM,
        DeviceKind::Rtc(_) => OF_RTC,
        DeviceKind::Iommu(_) => OF_IOMMU,
        DeviceKind::Vfio(_) => OF_VFIO,
        // Of each queue a doorbell and a vector, the vector of configuration changes, and the worker's: its own kick, a
        // stand-in for interrupts and one for errors.
        DeviceKind::VhostUser(spec) => OF_SOCKET_OR_DEVICE + 2 * spec.queue_sizes.len() as u64 + 4,
    }
}

/// Number of files of a function: one for each MSI-X vector (the queues', the control queue's, and that of
/// configuration changes), and the backend's. Of a tap passed by descriptor there is the passed one, and the NIC's
/// duplicate.
fn of_function(plan: &NicPlan) -> u64 {
    let pairs = u64::from(plan.spec.queue_pairs);
    let backend = match plan.backend {
        BackendPlan::Tap { vhost, .. } => pairs + of_worker(pairs, vhost),
        BackendPlan::Fds { vhost, .. } => 2 * pairs + of_worker(pairs, vhost),
        BackendPlan::Port(_) => OF_PORT,
        BackendPlan::VhostUser { .. } | BackendPlan::Vdpa { .. } => OF_SOCKET_OR_DEVICE + of_offloaded(pairs),
    };
    backend + 2 * pairs + 2
}

/// Of each pair of a tap's queues the doorbell. The kernel's worker has two doorbells for it, and a device and a copy
/// of the tap's queue.
fn of_worker(pairs: u64, vhost: Vhost) -> u64 {
    if vhost == Vhost::Off { pairs } else { of_offloaded(pairs) + 2 * pairs }
}

/// Of a backend that runs the queues by itself the doorbell of each, the worker's and that of the control queue, a
/// stand-in for interrupts and one for errors.
const fn of_offloaded(pairs: u64) -> u64 {
    2 * pairs + 4
}

#[cfg(test)]
mod tests {
    use crate::config::{VmConfig, VmPlan};

    use super::*;

    fn devices(nets: &[&str]) -> Vec<DevicePlan> {
        let mut config = VmConfig { net: nets.iter().map(|net| net.parse().unwrap()).collect(), ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        VmPlan::of(&config).unwrap().devices
    }

    #[test]
    fn each_function_counts_whether_its_vf_is_enabled_or_not() {
        let with = |nets: &[&str]| needed(&devices(nets), 1, 10);
        let (none, one) = (with(&[]), with(&["sriov_vfs=63"]));
        assert_eq!(none, 10 + OTHERS + 1 + OF_CONSOLE + OF_RNG);
        // A tap, a doorbell and 4 interrupts.
        assert_eq!(one - none, 64 * 6);
        assert_eq!(with(&["sriov_vfs=63", "sriov_vfs=63"]) - none, 2 * (one - none));
        assert_eq!(with(&["fd=7"]) - none, 7);
        // A tap, a kernel's device and what it has of the tap, 2 doorbells, 4 of the worker, and 4 interrupts.
        assert_eq!(with(&["vhost=on"]) - none, 13);
        assert_eq!(with(&["vhost_user=on,socket=/s"]) - none, 16);
        assert_eq!(with(&["vdpa=/d"]) - none, 16);
    }
}
