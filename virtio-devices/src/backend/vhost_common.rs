//! Common parts of vhost-net, vDPA and vhost-user.

use std::io;

use vhost::VringConfigData;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use super::RunnerQueue;
use crate::{GuestMap, GuestRegion};

/// The system's error in `error`, or one with its text.
pub(crate) fn io_error(error: vhost::Error) -> io::Error {
    match error {
        vhost::Error::VhostOpen(error) | vhost::Error::IoctlError(error) | vhost::Error::IOError(error) => error,
        other => io::Error::other(other.to_string()),
    }
}

/// The feature bit of a backend that logs its writes to guest memory. Drivers are not offered it.
pub(crate) const VHOST_F_LOG_ALL: u32 = 26;
/// The flag of a ring whose used ring is logged, too (`VHOST_VRING_F_LOG`).
pub(crate) const VRING_F_LOG: u32 = 1;

/// The guest addresses of the rings of `queue`. Writes to the used ring are `logged` by its addresses.
pub(crate) fn rings(queue: &RunnerQueue, logged: bool) -> VringConfigData {
    VringConfigData {
        queue_max_size: queue.size,
        queue_size: queue.size,
        flags: if logged { VRING_F_LOG } else { 0 },
        desc_table_addr: queue.descriptors.raw_value(),
        used_ring_addr: queue.used.raw_value(),
        avail_ring_addr: queue.available.raw_value(),
        log_addr: logged.then_some(queue.used.raw_value()),
    }
}

/// True if another process can map all of `memory`.
pub(crate) fn is_shared(memory: &GuestMap) -> bool {
    let is_shared = |region: &GuestRegion| region.file_offset().is_some() && region.flags() & libc::MAP_SHARED != 0;
    memory.iter().all(is_shared)
}

/// True if two regions are the same memory at the same guest addresses.
pub(crate) fn is_same(one: &GuestRegion, other: &GuestRegion) -> bool {
    let place = |region: &GuestRegion| (region.start_addr(), region.len(), region.as_ptr());
    place(one) == place(other)
}
