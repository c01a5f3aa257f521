//! A split virtqueue, as run by its worker (`virtio 1.4 §2.7`).
//!
//! The position is kept in the [`Queue`], which outlives the worker. This adds three things: several buffers that
//! become visible at once, for frames in merged buffers; `VIRTQ_AVAIL_F_NO_INTERRUPT`; and no logging, so that a
//! malicious driver cannot fill the log.

mod chain;
mod fault;
mod parked;
#[cfg(test)]
mod tests;

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use parking_lot::MutexGuard;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::DmaView;
use chain::DESCRIPTOR;
pub(crate) use chain::{Chain, Descriptor};
pub(crate) use fault::RingFault;
pub(crate) use parked::ParkedRing;

/// The driver asks not to be interrupted (`virtio 1.4 §2.7.6`, `VIRTQ_AVAIL_F_NO_INTERRUPT`).
const NO_INTERRUPT: u16 = 1;
/// The flags and the index that each ring begins with.
const RING_HEADER: u64 = 4;
/// A used ring's element: the chain's head and the bytes written.
const USED_ELEMENT: u64 = 8;
/// The ring is invalid: its memory cannot be reached, or its available index moved by more than its size. Its contents
/// cannot be trusted until the driver resets the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BrokenRing;

/// A buffer that is returned to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Used {
    /// The head of its chain.
    pub head: u16,
    /// The number of bytes written to it.
    pub len: u32,
}

/// Checks that a queue's rings lie in guest memory.
pub(crate) fn check(queue: &Queue, memory: &DmaView) -> Result<(), BrokenRing> {
    let [descriptors, available, used] = areas(queue.size());
    let areas = [
        (queue.desc_table(), descriptors, Permissions::Read),
        (queue.avail_ring(), available, Permissions::Read),
        (queue.used_ring(), used, Permissions::Write),
    ];
    let reachable = areas.iter().all(|&(base, len, access)| {
        usize::try_from(len).is_ok_and(|len| GuestMemory::check_range(memory, GuestAddress(base), len, access))
    });
    if queue.ready() && reachable { Ok(()) } else { Err(BrokenRing) }
}

/// The lengths of the descriptor table, the available ring and the used ring of a queue of `size`, in bytes. The rings'
/// last words are `used_event` and `avail_event`.
pub(crate) fn areas(size: u16) -> [u64; 3] {
    let size = u64::from(size);
    [DESCRIPTOR as u64 * size, RING_HEADER + 2 * size + 2, RING_HEADER + USED_ELEMENT * size + 2]
}

/// A queue, locked while its worker runs it.
pub(crate) struct Ring<'q> {
    index: u16,
    queue: MutexGuard<'q, Queue>,
    /// The used index when an interrupt was last considered.
    considered: Wrapping<u16>,
}

impl<'q> Ring<'q> {
    /// Opens a queue that its worker owns, and checks that its rings lie in guest memory.
    pub(crate) fn open(
        index: u16,
        mut queue: MutexGuard<'q, Queue>,
        event_idx: bool,
        memory: &DmaView,
    ) -> Result<Self, BrokenRing> {
        check(&queue, memory)?;
        queue.set_event_idx(event_idx);
        let considered = Wrapping(queue.next_used());
        Ok(Self { index, queue, considered })
    }

    /// Reopens a queue that was [checked](Self::open) before. `considered` is its used index when an interrupt was last
    /// considered.
    fn resume(index: u16, queue: MutexGuard<'q, Queue>, considered: Wrapping<u16>) -> Self {
        Self { index, queue, considered }
    }

    /// The queue's index.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// The number of its descriptors; a valid head is smaller.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// True if the driver sets the index at which it wants an interrupt (`virtio 1.4 §2.7.10`).
    pub(crate) fn has_event_idx(&self) -> bool {
        self.queue.event_idx_enabled()
    }

    /// The next chain that the driver made available.
    pub(crate) fn next<'m>(&mut self, memory: &'m DmaView) -> Result<Option<Chain<'m>>, BrokenRing> {
        if !self.queue.ready() || self.queue.avail_ring() == 0 {
            return Err(BrokenRing);
        }
        let (next, size) = (self.queue.next_avail(), self.queue.size());
        match self.available(memory)? {
            0 => Ok(None),
            // Each descriptor can be available only once.
            available if available > size => Err(BrokenRing),
            _ => {
                let slot = RING_HEADER + 2 * u64::from(next % size);
                let head = Self::load(memory, self.queue.avail_ring() + slot, Ordering::Acquire)?;
                self.queue.set_next_avail(next.wrapping_add(1));
                Ok(Some(Chain::new(memory, self.queue.desc_table(), size, head)))
            }
        }
    }

    /// Undoes the last `chains` calls of [`Self::next`] that returned a chain.
    pub(crate) fn put_back(&mut self, chains: u16) {
        let next = self.queue.next_avail().wrapping_sub(chains);
        self.queue.set_next_avail(next);
    }

    /// The available index of the next chain to take.
    pub(crate) fn next_index(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Number of available chains that have not been taken.
    pub(crate) fn available(&self, memory: &DmaView) -> Result<u16, BrokenRing> {
        let index = Self::load(memory, self.queue.avail_ring() + 2, Ordering::Acquire)?;
        Ok(index.wrapping_sub(self.queue.next_avail()))
    }

    /// Returns `buffers` to the driver, which sees all of them or none (`virtio 1.4 §2.7.8.2`). A head beyond the ring,
    /// which only the driver can have written, is left out: the used ring cannot name it.
    pub(crate) fn give_back(&mut self, memory: &DmaView, buffers: &[Used]) -> Result<(), BrokenRing> {
        let size = self.queue.size();
        let used_ring = GuestAddress(self.queue.used_ring());
        let mut next = self.queue.next_used();
        for &Used { head, len } in buffers.iter().filter(|used| used.head < size) {
            let slot = RING_HEADER + USED_ELEMENT * u64::from(next % size);
            Self::write_used(memory, used_ring.0 + slot, [u32::from(head), len])?;
            next = next.wrapping_add(1);
        }
        self.queue.set_next_used(next);
        let index = memory.piece(used_ring.0 + 2, size_of::<u16>(), Permissions::Write).ok_or(BrokenRing)?;
        index.store(next.to_le(), 0, Ordering::Release).map_err(|_| BrokenRing)
    }

    /// Suppresses doorbells while the worker polls the ring.
    pub(crate) fn suppress_doorbells(&mut self, memory: &DmaView) -> Result<(), BrokenRing> {
        self.queue.disable_notification(memory).map_err(|_| BrokenRing)
    }

    /// Enables doorbells. Returns true if a chain is available already; no doorbell will come for it.
    pub(crate) fn expect_doorbell(&mut self, memory: &DmaView) -> Result<bool, BrokenRing> {
        self.queue.enable_notification(memory).map_err(|_| BrokenRing)
    }

    /// The same for a chain beyond those available when the driver's index was `index`, taken or not. Returns true if
    /// there is one.
    pub(crate) fn expect_doorbell_beyond(&mut self, index: u16, memory: &DmaView) -> Result<bool, BrokenRing> {
        let next = self.queue.next_avail();
        self.queue.set_next_avail(index);
        let more = self.expect_doorbell(memory);
        self.queue.set_next_avail(next);
        more
    }

    /// True if the driver wants an interrupt for the chains returned since the last call (`virtio 1.4 §2.7.7.2`,
    /// §2.7.10).
    pub(crate) fn wants_interrupt(&mut self, memory: &DmaView) -> Result<bool, BrokenRing> {
        let due = self.interrupt_is_due(memory)?;
        self.considered();
        Ok(due)
    }

    /// Notes that an interrupt was considered: the next decision is about chains returned afterwards.
    pub(crate) fn considered(&mut self) {
        self.considered = Wrapping(self.queue.next_used());
    }

    /// As [`Self::wants_interrupt`], for a caller that may defer the interrupt: until [`Self::considered`] is called,
    /// the decision includes the same chains.
    pub(crate) fn interrupt_is_due(&self, memory: &DmaView) -> Result<bool, BrokenRing> {
        let (old, new) = (self.considered, Wrapping(self.queue.next_used()));
        if new == old {
            return Ok(false);
        }
        // The used index must be visible before `used_event` is read: the driver writes `used_event`, then reads the
        // index.
        fence(Ordering::SeqCst);
        let avail_ring = self.queue.avail_ring();
        if self.queue.event_idx_enabled() {
            let used_event = avail_ring + RING_HEADER + 2 * u64::from(self.queue.size());
            let event = Wrapping(Self::load(memory, used_event, Ordering::Relaxed)?);
            Ok(new - event - Wrapping(1) < new - old)
        } else {
            Ok(Self::load(memory, avail_ring, Ordering::Relaxed)? & NO_INTERRUPT == 0)
        }
    }

    /// Writes an element of the used ring, which the driver does not read before the index is written.
    #[inline]
    fn write_used(memory: &DmaView, address: u64, element: [u32; 2]) -> Result<(), BrokenRing> {
        let [head, len] = element.map(u32::to_le);
        match memory.whole(address, USED_ELEMENT as usize) {
            Some(slice) => {
                slice.store(head, 0, Ordering::Relaxed).and_then(|()| slice.store(len, 4, Ordering::Relaxed))
            }
            None => return memory.write_obj([head, len], GuestAddress(address)).map_err(|_| BrokenRing),
        }
        .map_err(|_| BrokenRing)
    }

    #[inline]
    fn load(memory: &DmaView, address: u64, order: Ordering) -> Result<u16, BrokenRing> {
        let slice = memory.piece(address, size_of::<u16>(), Permissions::Read).ok_or(BrokenRing)?;
        slice.load(0, order).map(u16::from_le).map_err(|_| BrokenRing)
    }
}
