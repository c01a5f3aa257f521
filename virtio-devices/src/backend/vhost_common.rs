//! What vhost-net, vDPA and vhost-user share.

use std::io;

use vhost::VringConfigData;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use super::RunnerQueue;

/// The system's error in `error`, or one with its text.
pub(crate) fn io_error(error: vhost::Error) -> io::Error {
    match error {
        vhost::Error::VhostOpen(error) | vhost::Error::IoctlError(error) | vhost::Error::IOError(error) => error,
        other => io::Error::other(other.to_string()),
    }
}

/// Where the rings of `queue` are, by guest addresses.
pub(crate) fn rings(queue: &RunnerQueue) -> VringConfigData {
    VringConfigData {
        queue_max_size: queue.size,
        queue_size: queue.size,
        flags: 0,
        desc_table_addr: queue.descriptors.raw_value(),
        used_ring_addr: queue.used.raw_value(),
        avail_ring_addr: queue.available.raw_value(),
        log_addr: None,
    }
}

/// Whether another process can map all of `memory`.
pub(crate) fn is_shared(memory: &GuestMemoryMmap) -> bool {
    let is_shared = |region: &GuestRegionMmap| region.file_offset().is_some() && region.flags() & libc::MAP_SHARED != 0;
    memory.iter().all(is_shared)
}

/// Whether two regions are the same memory at the same guest addresses.
pub(crate) fn is_same(one: &GuestRegionMmap, other: &GuestRegionMmap) -> bool {
    let place = |region: &GuestRegionMmap| (region.start_addr(), region.len(), region.as_ptr());
    place(one) == place(other)
}
