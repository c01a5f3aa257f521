//! Disks.

use virtio_devices::{BlockSpec, backing_files};

use super::site::{Opened, Site};
use crate::devices::disks::Disk;
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::landlock::{Missing, READ, Rule, WRITE, sysfs};
use crate::pci_host::failure_watch::FailureWatch;

/// For each queue: the doorbell, an MSI-X vector, an io_uring, and the eventfd of its completions.
const OF_QUEUE: u64 = 4;

pub(super) fn open(spec: &BlockSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let host = site.host;
    let opened = Disk::open(spec, &host.limit_groups, host.locks_later);
    let (block, disk) = opened.map_err(|error| site.failed(error.kind(), error))?;
    FailureWatch::of_disk(&block, &site.plan.id, &host.events);
    Ok((site.function(block)?, Handle::Disk(disk)))
}

/// An image, its backing images, and the sysfs files of a block device.
pub(super) fn files(disk: &BlockSpec, option: &str) -> Vec<Rule> {
    let mut rules = vec![Rule::new(option, &disk.path, if disk.read_only { READ } else { READ | WRITE })];
    rules.extend(backing_files(disk).into_iter().map(|path| Rule::new(option, path, READ)));
    if let Some(device) = sysfs("block", &disk.path) {
        // A partition has the queue limits of its disk.
        let queues = [Some(device.as_path()), device.parent()].into_iter().flatten().map(|folder| folder.join("queue"));
        rules.extend(queues.map(|path| Rule { missing: Missing::Skip, ..Rule::new(option, path, READ) }));
    }
    rules
}

/// The image, its queues, and the MSI-X vector of configuration changes.
pub(super) fn open_files(spec: &BlockSpec) -> u64 {
    1 + threads(spec) * OF_QUEUE + 1
}

/// A thread for each queue.
pub(super) fn threads(spec: &BlockSpec) -> u64 {
    spec.queues.into()
}
