//! A split virtqueue as its worker sees it (`virtio 1.4 §2.7`).
//!
//! The position is kept in the [`Queue`], which outlives the worker. This adds three things: several buffers that
//! become visible at once, for frames in merged buffers; `VIRTQ_AVAIL_F_NO_INTERRUPT`; and no logging, so that a
//! malicious driver cannot fill the log.

mod parked;

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use parking_lot::MutexGuard;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

pub(crate) use parked::ParkedRing;

/// The driver asks not to be interrupted (`virtio 1.4 §2.7.6`, `VIRTQ_AVAIL_F_NO_INTERRUPT`).
const NO_INTERRUPT: u16 = 1;
/// The flags and the index that each ring begins with.
const RING_HEADER: u64 = 4;
/// A used ring's element: the chain's head and the bytes written.
const USED_ELEMENT: u64 = 8;
/// A descriptor.
const DESCRIPTOR: u64 = 16;

/// A chain of descriptors that the driver made available.
pub(crate) type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// The ring is invalid: its memory cannot be reached, or its available index moved by more than its size. Nothing that
/// it says can be trusted until the driver resets the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BrokenRing;

/// A buffer that is given back to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Used {
    /// The head of its chain.
    pub head: u16,
    /// The bytes that were written to it.
    pub len: u32,
}

/// Checks that a queue's rings lie in guest memory.
pub(crate) fn check(queue: &Queue, memory: &GuestMemoryMmap) -> Result<(), BrokenRing> {
    let size = u64::from(queue.size());
    // The rings' last words are `used_event` and `avail_event`.
    let areas = [
        (queue.desc_table(), DESCRIPTOR * size, Permissions::Read),
        (queue.avail_ring(), RING_HEADER + 2 * size + 2, Permissions::Read),
        (queue.used_ring(), RING_HEADER + USED_ELEMENT * size + 2, Permissions::Write),
    ];
    let reachable = areas.iter().all(|&(base, len, access)| {
        usize::try_from(len).is_ok_and(|len| GuestMemory::check_range(memory, GuestAddress(base), len, access))
    });
    if queue.ready() && reachable { Ok(()) } else { Err(BrokenRing) }
}

/// A queue, locked for as long as its worker runs it.
pub(crate) struct Ring<'q> {
    index: u16,
    queue: MutexGuard<'q, Queue>,
    /// The used index when the driver was last considered for an interrupt.
    considered: Wrapping<u16>,
}

impl<'q> Ring<'q> {
    /// Takes a queue that its worker owns, and checks that its rings lie in guest memory.
    pub(crate) fn open(
        index: u16,
        mut queue: MutexGuard<'q, Queue>,
        event_idx: bool,
        memory: &GuestMemoryMmap,
    ) -> Result<Self, BrokenRing> {
        check(&queue, memory)?;
        queue.set_event_idx(event_idx);
        let considered = Wrapping(queue.next_used());
        Ok(Self { index, queue, considered })
    }

    /// Takes a queue again that was [checked](Self::open) before. `considered` is its used index when the driver was
    /// last considered for an interrupt.
    fn resume(index: u16, queue: MutexGuard<'q, Queue>, considered: Wrapping<u16>) -> Self {
        Self { index, queue, considered }
    }

    /// The queue's index.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    /// The number of its descriptors, which no chain's head exceeds.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The next chain that the driver made available.
    pub(crate) fn next<'m>(&mut self, memory: &'m GuestMemoryMmap) -> Result<Option<Chain<'m>>, BrokenRing> {
        Ok(self.queue.iter(memory).map_err(|_| BrokenRing)?.next())
    }

    /// Undoes the last `chains` calls of [`Self::next`] that returned a chain.
    pub(crate) fn put_back(&mut self, chains: u16) {
        let next = self.queue.next_avail().wrapping_sub(chains);
        self.queue.set_next_avail(next);
    }

    /// How many chains the driver has made available that were not taken.
    pub(crate) fn available(&self, memory: &GuestMemoryMmap) -> Result<u16, BrokenRing> {
        let index = self.queue.avail_idx(memory, Ordering::Acquire).map_err(|_| BrokenRing)?;
        Ok((index - Wrapping(self.queue.next_avail())).0)
    }

    /// Gives `buffers` back to the driver, which sees all of them or none (`virtio 1.4 §2.7.8.2`). A head beyond the
    /// ring, which can only be one that the driver wrote so, is left out: there is no way to name it in the used ring.
    pub(crate) fn give_back(&mut self, memory: &GuestMemoryMmap, buffers: &[Used]) -> Result<(), BrokenRing> {
        let size = self.queue.size();
        let used_ring = GuestAddress(self.queue.used_ring());
        let mut next = self.queue.next_used();
        for &Used { head, len } in buffers.iter().filter(|used| used.head < size) {
            let slot = RING_HEADER + USED_ELEMENT * u64::from(next % size);
            let element = u64::from(len) << 32 | u64::from(head);
            memory.write_obj(element.to_le(), GuestAddress(used_ring.0 + slot)).map_err(|_| BrokenRing)?;
            next = next.wrapping_add(1);
        }
        self.queue.set_next_used(next);
        memory.store(next.to_le(), GuestAddress(used_ring.0 + 2), Ordering::Release).map_err(|_| BrokenRing)
    }

    /// Suppresses doorbells while the worker polls the ring.
    pub(crate) fn suppress_doorbells(&mut self, memory: &GuestMemoryMmap) -> Result<(), BrokenRing> {
        self.queue.disable_notification(memory).map_err(|_| BrokenRing)
    }

    /// Enables doorbells. Returns whether a chain is available already; no doorbell will come for it.
    pub(crate) fn expect_doorbell(&mut self, memory: &GuestMemoryMmap) -> Result<bool, BrokenRing> {
        self.queue.enable_notification(memory).map_err(|_| BrokenRing)
    }

    /// Whether the driver wants an interrupt for what was returned since the last call (`virtio 1.4 §2.7.7.2`,
    /// §2.7.10).
    pub(crate) fn wants_interrupt(&mut self, memory: &GuestMemoryMmap) -> Result<bool, BrokenRing> {
        let new = Wrapping(self.queue.next_used());
        let old = std::mem::replace(&mut self.considered, new);
        if new == old {
            return Ok(false);
        }
        // The used index must be visible before `used_event` is read: the driver writes `used_event`, then reads the
        // index.
        fence(Ordering::SeqCst);
        let avail_ring = self.queue.avail_ring();
        if self.queue.event_idx_enabled() {
            let used_event = avail_ring + RING_HEADER + 2 * u64::from(self.queue.size());
            let event = Wrapping(Self::load(memory, used_event)?);
            Ok(new - event - Wrapping(1) < new - old)
        } else {
            Ok(Self::load(memory, avail_ring)? & NO_INTERRUPT == 0)
        }
    }

    fn load(memory: &GuestMemoryMmap, address: u64) -> Result<u16, BrokenRing> {
        memory.load(GuestAddress(address), Ordering::Relaxed).map(u16::from_le).map_err(|_| BrokenRing)
    }
}
