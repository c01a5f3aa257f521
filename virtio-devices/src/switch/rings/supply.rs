//! The supply of buffers by a receive queue's driver.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::DmaView;
use crate::queue::ring::Ring;

/// The number of buffers, or the queue's size if that is smaller, after which frames wait again for a receiver that had
/// run out.
const RECOVERED: u16 = 32;

/// The supply of a receive queue.
#[derive(Debug, Default)]
pub(crate) struct Supply {
    /// Set if the driver has provided no buffers for a while: no frame waits for them in the period of
    /// [waits](crate::switch::account::waits::Waits) that began then.
    pub congested: Option<Instant>,
    /// The beginning of a sender's wait for its buffers.
    pub awaited: Option<Instant>,
    /// Set when the sender that began the wait is stopped.
    pub waiter: Option<Arc<AtomicBool>>,
    /// A frame that found no room. The ring is not read again for such a frame before the driver has changed it.
    pub shortage: Option<Shortage>,
}

/// The reason why a frame has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// The driver must provide more.
    Buffers,
    /// The buffers are too short for it, however many there are.
    Length,
    /// Too many buffers were invalid: no more are read for it.
    Valid,
    /// Too many descriptors were read for segments of the same frame: no more are read for this one.
    Effort,
}

/// A frame that found no room.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shortage {
    lack: Lack,
    /// The bytes that were needed.
    bytes: usize,
    /// The index of the first chain that might have had room.
    next: u16,
    /// The driver's index.
    available: u16,
}

impl Shortage {
    /// The shortage of a frame of `bytes` in a ring to which `taken` chains must still be put back. `None` if the ring
    /// cannot be read.
    pub(super) fn of(lack: Lack, bytes: usize, taken: u16, ring: &Ring<'_>, memory: &DmaView) -> Option<Self> {
        let (next, more) = (ring.next_index(), ring.available(memory).ok()?);
        // Later buffers were not read.
        let available = if lack == Lack::Buffers { next } else { next.wrapping_add(more) };
        Some(Self { lack, bytes, next: next.wrapping_sub(taken), available })
    }

    /// The lack that a frame of `bytes` has, too, if the ring has not changed.
    pub(super) fn of_another(self, bytes: usize, ring: &Ring<'_>, memory: &DmaView) -> Option<Lack> {
        let next = ring.next_index();
        let is_same = next == self.next && ring.available(memory) == Ok(self.available.wrapping_sub(next));
        (bytes >= self.bytes && is_same).then_some(self.lack)
    }

    /// The driver's index at the time.
    pub(super) const fn available(self) -> u16 {
        self.available
    }
}

/// True if `available` chains are enough in a queue of this size.
pub(super) fn is_enough(available: u16, size: u16) -> bool {
    available >= RECOVERED.min(size)
}
