//! A descriptor chain, as the driver wrote it (`virtio 1.4 §2.7.5`).

use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress, Permissions};

use crate::DmaView;
use crate::memory::effort;

/// The length of a descriptor in bytes.
pub(super) const DESCRIPTOR: usize = 16;

/// A part of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

impl Descriptor {
    /// The descriptor of these two words, which the driver has written in little-endian order.
    const fn of([address, rest]: [u64; 2]) -> Self {
        let [a, b, c, d, e, f, g, h] = rest.to_ne_bytes();
        Self {
            address: u64::from_le(address),
            len: u32::from_le_bytes([a, b, c, d]),
            flags: u16::from_le_bytes([e, f]),
            next: u16::from_le_bytes([g, h]),
        }
    }

    const fn has(self, flag: u32) -> bool {
        self.flags as u32 & flag != 0
    }

    /// First address.
    pub(crate) const fn address(self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub(crate) const fn len(self) -> u32 {
        self.len
    }

    /// True if another descriptor follows.
    pub(crate) const fn has_next(self) -> bool {
        self.has(VRING_DESC_F_NEXT)
    }

    /// True if the device may only write to it; otherwise the device may only read it.
    pub(crate) const fn is_write_only(self) -> bool {
        self.has(VRING_DESC_F_WRITE)
    }
}

/// A descriptor chain that the driver made available.
///
/// It ends after its last descriptor, or silently where it cannot be followed: at a descriptor outside its table or
/// unreadable, at an invalid indirect table, after as many descriptors as its table has, and where it would be longer
/// than 2^32 bytes. The last descriptor returned then says that [another one follows](Descriptor::has_next).
pub(crate) struct Chain<'m> {
    memory: &'m DmaView,
    head: u16,
    table: Table,
    /// The index of the next descriptor.
    next: u16,
    /// Number of descriptors that may still follow, which makes any chain finite.
    left: u16,
    /// The total length of the descriptors so far, in bytes.
    bytes: u32,
    is_indirect: bool,
}

impl<'m> Chain<'m> {
    /// The chain that begins with `head` in the table of `size` descriptors at `address`.
    pub(super) fn new(memory: &'m DmaView, address: u64, size: u16, head: u16) -> Self {
        Self { memory, head, table: Table::new(address, size), next: head, left: size, bytes: 0, is_indirect: false }
    }

    /// The index of its first descriptor, which identifies it in the used ring.
    pub(crate) fn head_index(&self) -> u16 {
        self.head
    }

    /// Continues with the first descriptor of the indirect table in `descriptor` (`virtio 1.4 §2.7.5.3`), which may not
    /// contain another.
    fn enter(&mut self, descriptor: Descriptor) -> Option<()> {
        let len = usize::try_from(descriptor.len).ok()?;
        if self.is_indirect || !len.is_multiple_of(DESCRIPTOR) {
            return None;
        }
        let size = u16::try_from(len / DESCRIPTOR).ok()?;
        self.table = Table::new(descriptor.address, size);
        (self.next, self.left, self.is_indirect) = (0, size, true);
        Some(())
    }
}

impl Iterator for Chain<'_> {
    type Item = Descriptor;

    #[inline]
    fn next(&mut self) -> Option<Descriptor> {
        loop {
            if self.left == 0 || self.next >= self.table.size {
                return None;
            }
            let descriptor = self.table.read(self.memory, self.next)?;
            effort::descriptor();
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                self.enter(descriptor)?;
                continue;
            }
            self.bytes = self.bytes.checked_add(descriptor.len)?;
            if descriptor.has_next() {
                self.next = descriptor.next;
                self.left -= 1;
            } else {
                self.left = 0;
            }
            return Some(descriptor);
        }
    }
}

/// A descriptor table, looked up in guest memory once instead of for each descriptor.
struct Table {
    address: u64,
    /// The number of descriptors.
    size: u16,
    /// The index of the first descriptor found.
    first: u16,
    /// The number of descriptors found: as many as are contiguous.
    count: u16,
    /// Address of the descriptors found, in a map that the chain holds.
    found: *const u8,
}

impl Table {
    const fn new(address: u64, size: u16) -> Self {
        Self { address, size, first: 0, count: 0, found: std::ptr::null() }
    }

    /// Reads a descriptor of the table. `memory` must be the same each time.
    #[inline]
    fn read(&mut self, memory: &DmaView, index: u16) -> Option<Descriptor> {
        if index.wrapping_sub(self.first) >= self.count {
            return self.find(memory, index);
        }
        Some(self.read_found(index))
    }

    /// Reads a descriptor that has been found.
    #[inline]
    fn read_found(&self, index: u16) -> Descriptor {
        let place = index.wrapping_sub(self.first);
        let at = self.found.wrapping_add(DESCRIPTOR * usize::from(place));
        // SAFETY: the descriptor is one of those found, in the map that the chain's memory holds. The driver may write
        // to it at the same time, so each byte is read once, and any value is valid.
        let words = unsafe {
            if at.cast::<u64>().is_aligned() {
                [at.cast::<u64>().read_volatile(), at.cast::<u64>().wrapping_add(1).read_volatile()]
            } else {
                // An indirect table need not be aligned.
                at.cast::<[[u8; 8]; 2]>().read_volatile().map(u64::from_ne_bytes)
            }
        };
        Descriptor::of(words)
    }

    /// Looks up the descriptors from `index` on, at least that one, and reads it.
    #[inline]
    fn find(&mut self, memory: &DmaView, index: u16) -> Option<Descriptor> {
        match memory.host(self.address, DESCRIPTOR * usize::from(self.size)) {
            Some(found) => {
                (self.first, self.count, self.found) = (0, self.size, found);
                Some(self.read_found(index))
            }
            None => self.find_piece(memory, index),
        }
    }

    /// The same for a table that is translated, or in several regions. Looks up only the descriptor needed now: the
    /// IOMMU reports addresses that are not mapped, and the driver need not have mapped unused descriptors.
    #[cold]
    fn find_piece(&mut self, memory: &DmaView, index: u16) -> Option<Descriptor> {
        let at = self.address.checked_add(DESCRIPTOR as u64 * u64::from(index))?;
        let len = DESCRIPTOR * usize::from(self.size - index);
        let until_end = usize::try_from(u64::MAX - at).map_or(usize::MAX, |last| last.saturating_add(1));
        let piece = memory.piece(at, len.min(until_end), Permissions::Read)?;
        let count = u16::try_from(piece.len() / DESCRIPTOR).ok()?;
        if count == 0 {
            // The descriptor lies in two pieces.
            return memory.read_obj(GuestAddress(at)).ok().map(Descriptor::of);
        }
        (self.first, self.count, self.found) = (index, count, piece.ptr_guard().as_ptr());
        Some(self.read_found(index))
    }
}
