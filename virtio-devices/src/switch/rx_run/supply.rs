//! What is known of the buffers that a receive queue's driver provides.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::DmaView;
use crate::ring::Ring;

/// A receiver that had no buffers is waited for again once it has provided so many, or its whole queue if that is
/// smaller.
const RECOVERED: u16 = 32;

/// The supply of a receive queue.
#[derive(Debug, Default)]
pub(crate) struct Supply {
    /// Its driver has provided no buffers for a while: no frame waits for them in the period of [waits](super::Waits)
    /// that began then.
    pub congested: Option<Instant>,
    /// The beginning of a sender's wait for its buffers.
    pub awaited: Option<Instant>,
    /// Set when the sender is stopped that began it.
    pub waiter: Option<Arc<AtomicBool>>,
    /// A frame that found no room. The ring is not read again for such a frame before the driver has changed it.
    pub shortage: Option<Shortage>,
}

/// The lack of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// The driver has to provide more.
    Buffers,
    /// The buffers are too short for it, however many there are.
    Length,
    /// So many buffers were invalid that no more are looked at for it.
    Valid,
    /// So much was read for segments of the same frame that no more is read for this one.
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
    /// The shortage of a frame of `bytes` in a ring of which `taken` chains are still to be put back. `None` if the
    /// ring cannot be read.
    pub(super) fn of(lack: Lack, bytes: usize, taken: u16, ring: &Ring<'_>, memory: &DmaView) -> Option<Self> {
        let (next, more) = (ring.next_index(), ring.available(memory).ok()?);
        // Of what came since, nothing is known.
        let available = if lack == Lack::Buffers { next } else { next.wrapping_add(more) };
        Some(Self { lack, bytes, next: next.wrapping_sub(taken), available })
    }

    /// The lack of a frame of `bytes`, if the ring is as it was.
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

/// True if a driver that has made so many chains available provides enough in a queue of this size.
pub(super) fn is_enough(available: u16, size: u16) -> bool {
    available >= RECOVERED.min(size)
}
