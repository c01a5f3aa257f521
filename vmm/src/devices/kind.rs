//! The kinds of devices. Each has a file with the same parts, which say all that the VMM must know of it in addition to
//! its plan:
//!
//! | part | subject |
//! |---|---|
//! | `open` | the device of a plan, and the host's handle of it |
//! | `files` | the files of the host that it needs, for Landlock |
//! | `OPEN_FILES`, `open_files` | the number of files that it may have open |
//! | `THREADS`, `threads` | the number of its threads |
//! | `COUNTERS` | its kind in names of metrics, and the descriptions of its counters |
//! | `unsaved` | the reason why it cannot be saved, if it has state that may be lost |
//!
//! The compiler finds each place that a new kind must be added to.

mod balloon;
mod console;
mod disk;
mod guest_channel;
mod iommu;
mod mem;
mod net;
mod pmem;
mod pvpanic;
mod rng;
mod rtc;
pub(super) mod site;
#[cfg(test)]
mod tests;
mod vfio;
mod vhost_user;
mod vsock;
mod watchdog;
mod x550;

use virtio_devices::{BlockCounter, BlockLatencies, Counter, CounterText};

use crate::config::{DeviceKind, DevicePlan};
use crate::devices::backends::BackendOpener;
use crate::devices::error::DeviceError;
use crate::devices::kind::site::{Opened, Site};
use crate::devices::pvpanic as panics;
use crate::landlock::Rule;
use crate::{serial, vfio as host_devices};

/// The kinds of devices in names of metrics, and the descriptions of their counters. A kind may be listed again.
pub(crate) const COUNTERS: [(&str, &[CounterText]); 16] = [
    ("net", Counter::TEXTS),
    ("block", BlockCounter::TEXTS),
    ("block", BlockLatencies::TEXTS),
    balloon::COUNTERS,
    console::COUNTERS,
    guest_channel::COUNTERS,
    iommu::COUNTERS,
    mem::COUNTERS,
    pmem::COUNTERS,
    ("pvpanic", &panics::TEXTS),
    rng::COUNTERS,
    rtc::COUNTERS,
    // No device of the bus, and without metrics.
    ("serial", &serial::COUNTER_TEXTS),
    ("vfio", &host_devices::COUNTER_TEXTS),
    vsock::COUNTERS,
    watchdog::COUNTERS,
];

/// Opens the device of a plan.
///
/// # Errors
///
/// Fails if something that it needs cannot be opened, or the device is not possible. All that was opened is closed
/// then.
pub(super) fn open(site: &Site<'_>, opener: &mut BackendOpener<'_>) -> Result<Opened, DeviceError> {
    match &site.plan.kind {
        DeviceKind::Console => console::open(site),
        DeviceKind::Net(net) => net::open(net, site, opener),
        DeviceKind::X550(plan) => x550::open(plan, site, opener),
        DeviceKind::Disk(spec) => disk::open(spec, site),
        DeviceKind::Rng(spec) => rng::open(spec, site),
        DeviceKind::Balloon(spec) => balloon::open(spec, site),
        DeviceKind::Rtc(spec) => rtc::open(spec, site),
        DeviceKind::Vsock(spec) => vsock::open(spec, site),
        DeviceKind::Mem { spec, part } => mem::open(spec, *part, site),
        DeviceKind::VhostUser(spec) => vhost_user::open(spec, site, opener),
        DeviceKind::Pmem(spec) => pmem::open(spec, site),
        DeviceKind::Vfio(spec) => vfio::open(spec, site, opener),
        DeviceKind::Watchdog => watchdog::open(site),
        DeviceKind::Iommu(_) => iommu::open(site),
        DeviceKind::Pvpanic => pvpanic::open(site),
        DeviceKind::GuestChannel => guest_channel::open(site),
    }
}

/// The files of the host that the device of `plan` needs.
pub(crate) fn files(plan: &DevicePlan) -> Vec<Rule> {
    let option = plan.option();
    match &plan.kind {
        DeviceKind::Net(net) => net::files(net, &option),
        DeviceKind::X550(plan) => x550::files(plan, &option),
        DeviceKind::Disk(spec) => disk::files(spec, &option),
        DeviceKind::Rng(spec) => rng::files(spec, &option),
        DeviceKind::Vsock(spec) => vsock::files(spec, &option),
        DeviceKind::Pmem(spec) => pmem::files(spec, &option),
        DeviceKind::Vfio(spec) => vfio::files(spec, &option),
        // The kernel does not restrict connections to sockets with a path.
        DeviceKind::VhostUser(_)
        | DeviceKind::Console
        | DeviceKind::Balloon(_)
        | DeviceKind::Watchdog
        | DeviceKind::Pvpanic
        | DeviceKind::GuestChannel
        | DeviceKind::Mem { .. }
        | DeviceKind::Rtc(_)
        | DeviceKind::Iommu(_) => Vec::new(),
    }
}

/// The files of the host that the devices of `plans` need.
pub(crate) fn all_files(plans: &[DevicePlan]) -> Vec<Rule> {
    plans.iter().flat_map(files).collect()
}

/// The number of files that the device of `plan` may have open at once.
pub(crate) fn open_files(plan: &DevicePlan) -> u64 {
    match &plan.kind {
        DeviceKind::Net(net) => net::open_files(net),
        DeviceKind::X550(plan) => x550::open_files(plan),
        DeviceKind::Disk(spec) => disk::open_files(spec),
        DeviceKind::Console => console::OPEN_FILES,
        DeviceKind::Rng(_) => rng::OPEN_FILES,
        DeviceKind::Balloon(_) => balloon::OPEN_FILES,
        DeviceKind::Vsock(_) => vsock::OPEN_FILES,
        DeviceKind::Pmem(_) => pmem::OPEN_FILES,
        DeviceKind::Watchdog => watchdog::OPEN_FILES,
        DeviceKind::Pvpanic => pvpanic::OPEN_FILES,
        DeviceKind::GuestChannel => guest_channel::OPEN_FILES,
        DeviceKind::Mem { .. } => mem::OPEN_FILES,
        DeviceKind::Rtc(_) => rtc::OPEN_FILES,
        DeviceKind::Iommu(_) => iommu::OPEN_FILES,
        DeviceKind::Vfio(_) => vfio::OPEN_FILES,
        DeviceKind::VhostUser(spec) => vhost_user::open_files(spec),
    }
}

/// The number of threads that the device of `plan` may need.
pub(crate) fn threads(plan: &DevicePlan) -> u64 {
    match &plan.kind {
        DeviceKind::Net(net) => net::threads(net),
        DeviceKind::X550(plan) => x550::threads(plan),
        DeviceKind::Disk(spec) => disk::threads(spec),
        DeviceKind::Console => console::THREADS,
        DeviceKind::Rng(_) => rng::THREADS,
        DeviceKind::Balloon(_) => balloon::THREADS,
        DeviceKind::Vsock(_) => vsock::THREADS,
        DeviceKind::Pmem(_) => pmem::THREADS,
        DeviceKind::Watchdog => watchdog::THREADS,
        DeviceKind::Pvpanic => pvpanic::THREADS,
        DeviceKind::GuestChannel => guest_channel::THREADS,
        DeviceKind::Mem { .. } => mem::THREADS,
        DeviceKind::Rtc(_) => rtc::THREADS,
        DeviceKind::Iommu(_) => iommu::THREADS,
        DeviceKind::Vfio(_) => vfio::THREADS,
        DeviceKind::VhostUser(_) => vhost_user::THREADS,
    }
}

/// Reason why the device of `plan` cannot be saved, or moved to another host: a part of its state is neither in a file,
/// nor in a register, nor in the guest's memory. `is_driven` returns true if its driver is up.
pub(super) fn unsaved(plan: &DevicePlan, is_driven: impl FnOnce() -> bool) -> Option<&'static str> {
    match &plan.kind {
        DeviceKind::Pmem(spec) => pmem::unsaved(spec),
        DeviceKind::VhostUser(spec) => vhost_user::unsaved(spec).filter(|_| is_driven()),
        DeviceKind::Net(_)
        | DeviceKind::X550(_)
        | DeviceKind::Disk(_)
        | DeviceKind::Console
        | DeviceKind::Rng(_)
        | DeviceKind::Balloon(_)
        | DeviceKind::Vsock(_)
        | DeviceKind::Watchdog
        | DeviceKind::Pvpanic
        | DeviceKind::GuestChannel
        | DeviceKind::Mem { .. }
        | DeviceKind::Rtc(_)
        | DeviceKind::Iommu(_)
        | DeviceKind::Vfio(_) => None,
    }
}

/// True if the guest's writes to the memory of the device of `plan` are in no file.
pub(super) const fn discards_writes(plan: &DevicePlan) -> bool {
    match &plan.kind {
        DeviceKind::Pmem(spec) => spec.discard_writes,
        _ => false,
    }
}
