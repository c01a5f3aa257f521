//! A queue that a device has lent to its backend.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemory, Permissions};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::backend::RunnerQueue;
use crate::{DmaView, SharedQueue};

/// A queue that the backend runs on behalf of the device.
pub(crate) struct LentQueue {
    /// The index of the queue.
    pub index: u16,
    /// The queue.
    pub queue: SharedQueue,
    /// The eventfd that the driver's doorbell signals.
    pub kick: Arc<EventFd>,
}

impl LentQueue {
    /// Lends those of a driver's queues for which `is_lent` is true.
    ///
    /// # Errors
    ///
    /// Fails if the host has no eventfd left.
    pub(crate) fn lend(queues: &[(u16, SharedQueue)], is_lent: impl Fn(u16) -> bool) -> io::Result<Vec<Self>> {
        let lent = queues.iter().filter(|(index, _)| is_lent(*index));
        lent.map(|(index, queue)| {
            let kick = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
            Ok(Self { index: *index, queue: Arc::clone(queue), kick })
        })
        .collect()
    }

    /// Describes the queue for the backend, which signals `call`.
    pub(crate) fn describe(&self, queue: &Queue, call: Arc<EventFd>) -> RunnerQueue {
        RunnerQueue {
            index: self.index,
            size: queue.size(),
            descriptors: GuestAddress(queue.desc_table()),
            available: GuestAddress(queue.avail_ring()),
            used: GuestAddress(queue.used_ring()),
            position: queue.next_avail(),
            kick: Arc::clone(&self.kick),
            call,
        }
    }
}

/// Records the position of a stopped queue.
pub(crate) fn settle_position(queue: &mut Queue, position: Option<u16>, memory: &DmaView) {
    // The rings have been checked, so the index can be read.
    let used = queue.used_idx(memory, Ordering::Acquire).map_or(queue.next_used(), |used| used.0);
    queue.set_next_used(used);
    // The backend cannot have taken more than a ring holds.
    let plausible = position.filter(|position| position.wrapping_sub(used) <= queue.size());
    queue.set_next_avail(plausible.unwrap_or(used));
}

/// Looks up the next buffers of a stopped queue, up to the first that is unmapped, so that it is reported. Takes
/// nothing.
pub(crate) fn look_ahead(queue: &mut Queue, memory: &DmaView) {
    let position = queue.next_avail();
    let chain = queue.iter(memory).ok().and_then(|mut chains| chains.next());
    for buffer in chain.into_iter().flatten() {
        let access = if buffer.is_write_only() { Permissions::Write } else { Permissions::Read };
        if !memory.check_range(buffer.addr(), buffer.len() as usize, access) {
            break;
        }
    }
    queue.set_next_avail(position);
}
