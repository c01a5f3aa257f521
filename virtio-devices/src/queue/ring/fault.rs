//! Faults of a ring, as text for the log.

use std::fmt;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemory, Permissions};

use super::{Ring, areas};
use crate::DmaView;

/// The fault of a ring that its worker gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingFault {
    /// An area is not in guest memory.
    Outside {
        /// The name of the area.
        area: &'static str,
        /// The area's address.
        address: u64,
        /// The area's length in bytes.
        len: u64,
    },
    /// The available index moved by more than the ring's size.
    Ahead {
        /// The available index.
        index: u16,
        /// The distance from the index up to which the device has taken chains.
        by: u16,
        /// The ring's size.
        size: u16,
    },
}

impl RingFault {
    /// The present fault of `queue`; `None` if its ring is valid.
    pub(crate) fn of(queue: &Queue, memory: &DmaView) -> Option<Self> {
        let [table, available, used] = areas(queue.size());
        let areas = [
            ("descriptor table", queue.desc_table(), table, Permissions::Read),
            ("available ring", queue.avail_ring(), available, Permissions::Read),
            ("used ring", queue.used_ring(), used, Permissions::Write),
        ];
        let is_outside = |address, len, access| {
            !usize::try_from(len).is_ok_and(|len| GuestMemory::check_range(memory, GuestAddress(address), len, access))
        };
        if let Some((area, address, len, _)) =
            areas.into_iter().find(|&(_, address, len, access)| is_outside(address, len, access))
        {
            return Some(Self::Outside { area, address, len });
        }
        let index = Ring::load(memory, queue.avail_ring() + 2, Ordering::Acquire).ok()?;
        let (by, size) = (index.wrapping_sub(queue.next_avail()), queue.size());
        (by > size).then_some(Self::Ahead { index, by, size })
    }
}

impl fmt::Display for RingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { area, address, len } => {
                write!(f, "its {area}, {len} bytes at {address:#x}, is not in the guest's memory")
            }
            Self::Ahead { index, by, size } => {
                write!(f, "avail index {index} is {by} ahead of the last one; the ring has {size}")
            }
        }
    }
}
