//! How many files a process may have open, and how many a VM needs.
//!
//! A VM that is short of them would start, and fail when its guest enables VFs: what it may need is reckoned before anything is
//! opened.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{DevicePlan, DiskPlan, NetPlan, NicPlan};
use crate::error::Error;

/// What a VM has open whatever its devices are: KVM, memory, payload, console, log, signals, and room for what is open for a
/// moment.
const OTHERS: u64 = 64;

/// Of each queue of a disk the doorbell, an MSI-X vector, an io_uring and an eventfd for its completions.
const OF_DISK_QUEUE: u64 = 4;
/// The other end of a console (a socket, who waits for it, and its client), its doorbell, and three MSI-X vectors.
const OF_CONSOLE: u64 = 7;
/// The source of the entropy device, its doorbell, and two MSI-X vectors.
const OF_RNG: u64 = 4;

/// Raises the limit of open files as far as this process may.
///
/// # Errors
///
/// [`Error::OpenFiles`] when that is too little for a VM with these devices and vCPUs.
pub fn reserve(devices: &[DevicePlan], vcpus: u32) -> Result<(), Error> {
    let given = getrlimit(Resource::Nofile);
    // Where this is forbidden, what there is may be enough.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: given.maximum, maximum: given.maximum });
    let needed = already_open() + OTHERS + u64::from(vcpus) + devices.iter().map(of_device).sum::<u64>();
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => Err(Error::OpenFiles { needed, limit }),
        _ => Ok(()),
    }
}

fn already_open() -> u64 {
    // Without /proc nothing is known of what was passed in, and nearly always there is nothing.
    std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64)
}

fn of_device(plan: &DevicePlan) -> u64 {
    match plan {
        DevicePlan::Net(NetPlan { pf, vfs, .. }) => std::iter::once(pf).chain(vfs).map(of_function).sum(),
        DevicePlan::Disk(DiskPlan { queues, .. }) => 1 + u64::from(*queues) * OF_DISK_QUEUE + 1,
        DevicePlan::Console => OF_CONSOLE,
        DevicePlan::Rng(_) => OF_RNG,
    }
}

/// Of each pair of queues the tap's and the doorbell, and one for each MSI-X vector: those of the queues, of the control queue
/// and of configuration changes.
fn of_function(plan: &NicPlan) -> u64 {
    let pairs = u64::from(plan.queue_pairs);
    let (taps, doorbells, vectors) = (pairs, pairs, 2 * pairs + 2);
    taps + doorbells + vectors
}
