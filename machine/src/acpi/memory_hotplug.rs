//! The memory hot-plug registers: a state machine, without interrupts and memory.
//!
//! There are [`SLOTS`] slots for regions of memory. A region is present from the moment it is added, and the guest is
//! notified. It stays until the guest restarts: memory that a guest uses for anything cannot be taken from it by force,
//! so there is no register to eject it.
//!
//! The registers are I/O ports, used only by the AML of `acpi/memory_devices.rs`, and read-only:
//!
//! | offset | length | read |
//! |---|---|---|
//! | 0 | 1 | slots whose region was added, one bit each, which the read clears |
//! | 32 + 32 n | 8 | the first address of the region in slot n |
//! | 40 + 32 n | 8 | its last address |
//! | 48 + 32 n | 8 | its length in bytes |
//! | 56 + 32 n | 1 | bit 0: it is present |

use std::ops::Range;

use crate::acpi::event_state::MemoryHotplugState;

/// Number of slots.
pub const SLOTS: u8 = 8;
/// Number of ports.
pub const PORTS: u16 = BANK * (SLOTS as u16 + 1);
/// Offset of the register of added regions.
pub const ADDED: u16 = 0;
/// The ports of one slot. Those of slot 0 start here.
pub const BANK: u16 = 32;
/// The first address, in a slot's ports.
pub const BASE: u16 = 0;
/// The last address.
pub const LAST: u16 = 8;
/// The length.
pub const LENGTH: u16 = 16;
/// Offset of the slot's status.
pub const STATUS: u16 = 24;
/// The bit of [`STATUS`].
pub const PRESENT: u8 = 1;

/// The slots, and the additions that the guest has not read yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryHotplug {
    regions: Vec<Range<u64>>,
    added: u8,
}

impl MemoryHotplug {
    /// True if a slot is free.
    pub fn has_room(&self) -> bool {
        self.regions.len() < usize::from(SLOTS)
    }

    /// Adds a region at these addresses, which must not be empty. Without a free slot, does nothing.
    pub fn add(&mut self, region: Range<u64>) {
        if self.has_room() {
            self.added |= 1 << self.regions.len();
            self.regions.push(region);
        }
    }

    /// True if the guest has an event to be notified of.
    pub fn has_news(&self) -> bool {
        self.added != 0
    }

    /// State to save.
    pub fn save(&self) -> MemoryHotplugState {
        let regions = self.regions.iter().map(|region| (region.start, region.end)).collect();
        MemoryHotplugState { regions, added: self.added }
    }

    /// Registers with the state `state`; `None` if no machine can have it.
    pub fn restored(state: &MemoryHotplugState) -> Option<Self> {
        let MemoryHotplugState { regions, added } = state;
        let regions: Vec<_> = regions.iter().map(|(start, end)| *start..*end).collect();
        let is_possible = regions.len() <= usize::from(SLOTS)
            && !regions.iter().any(Range::is_empty)
            && u32::from(*added) >> regions.len() == 0;
        is_possible.then_some(Self { regions, added: *added })
    }

    /// The regions that were added since the guest started, in this order.
    pub fn regions(&self) -> &[Range<u64>] {
        &self.regions
    }

    /// Reads the port at `offset`; 0 after the registers.
    pub fn read(&mut self, offset: u16) -> u8 {
        let Some(offset) = offset.checked_sub(BANK) else {
            return if offset == ADDED { std::mem::take(&mut self.added) } else { 0 };
        };
        let Some(region) = self.regions.get(usize::from(offset / BANK)) else { return 0 };
        let byte = |number: u64, register: u16| {
            number.to_le_bytes().get(usize::from(offset % BANK - register)).copied().unwrap_or(0)
        };
        match offset % BANK {
            BASE..LAST => byte(region.start, BASE),
            LAST..LENGTH => byte(region.end - 1, LAST),
            LENGTH..STATUS => byte(region.end - region.start, LENGTH),
            STATUS => PRESENT,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(memory: &mut MemoryHotplug, slot: u16, register: u16) -> u64 {
        let first = BANK * (slot + 1) + register;
        u64::from_le_bytes(std::array::from_fn(|n| memory.read(first + n as u16)))
    }

    #[test]
    fn a_region_is_present_with_its_addresses_and_reported_once() {
        let mut memory = MemoryHotplug::default();
        assert!(!memory.has_news() && (0..PORTS + 32).all(|offset| memory.read(offset) == 0));
        memory.add(0x1_0000_0000..0x1_0800_0000);
        memory.add(0x1_0800_0000..0x2_0000_0000);
        assert!(memory.has_news());
        assert_eq!((memory.read(ADDED), memory.read(ADDED)), (0b11, 0));
        assert!(!memory.has_news());
        for (slot, base, last) in [(0, 0x1_0000_0000, 0x1_07ff_ffff), (1, 0x1_0800_0000, 0x1_ffff_ffff)] {
            assert_eq!(number(&mut memory, slot, BASE), base);
            assert_eq!(number(&mut memory, slot, LAST), last);
            assert_eq!(number(&mut memory, slot, LENGTH), last + 1 - base);
            assert_eq!(memory.read(BANK * (slot + 1) + STATUS), PRESENT);
        }
        assert_eq!(memory.read(BANK * 3 + STATUS), 0);
    }

    #[test]
    fn there_are_eight_slots() {
        let mut memory = MemoryHotplug::default();
        for n in 0..9 {
            assert_eq!(memory.has_room(), n < 8);
            memory.add(n << 27..(n + 1) << 27);
        }
        assert_eq!(memory.read(ADDED), 0xff);
        assert_eq!(number(&mut memory, 7, BASE), 7 << 27);
        assert_eq!(memory.read(BANK * 9 + STATUS), 0);
    }
}
