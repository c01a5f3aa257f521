//! What backends by the kernel's vhost interface and by the vhost-user protocol have in common.

use std::io;

use vhost::VringConfigData;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use super::OffloadQueue;

/// What the system said, as far as it was the system.
pub fn io_error(error: vhost::Error) -> io::Error {
    match error {
        vhost::Error::VhostOpen(error) | vhost::Error::IoctlError(error) | vhost::Error::IOError(error) => error,
        other => io::Error::other(other.to_string()),
    }
}

/// Where the rings of `queue` are, by guest addresses.
pub fn rings(queue: &OffloadQueue) -> VringConfigData {
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
pub fn is_shared(memory: &GuestMemoryMmap) -> bool {
    let is_shared = |region: &GuestRegionMmap| region.file_offset().is_some() && region.flags() & libc::MAP_SHARED != 0;
    memory.iter().all(is_shared)
}
