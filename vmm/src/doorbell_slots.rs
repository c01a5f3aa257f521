//! KVM's memory slots for the pages of doorbells.

use std::collections::BTreeSet;
use std::ops::Range;

use parking_lot::Mutex;

/// Slots that nothing else uses. Linux has 32,764 since 5.12, and 509 before; a doorbell for whose slot the host has no room does without.
const SLOTS: Range<u32> = 128..32_764;

/// Which slots are taken.
#[derive(Debug, Default)]
pub struct DoorbellSlots {
    taken: Mutex<BTreeSet<u32>>,
}

impl DoorbellSlots {
    /// Takes the lowest free slot, if there is one.
    pub fn take(&self) -> Option<u32> {
        let mut taken = self.taken.lock();
        let mut used = taken.iter().peekable();
        let slot = SLOTS.into_iter().find(|slot| used.next_if_eq(&slot).is_none())?;
        taken.insert(slot);
        Some(slot)
    }

    /// Frees a slot, in which nothing is shown any more.
    pub fn give_back(&self, slot: u32) {
        self.taken.lock().remove(&slot);
    }

    /// Frees all slots, for a new VM.
    pub fn clear(&self) {
        self.taken.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_taken_and_no_slot_twice() {
        let slots = DoorbellSlots::default();
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(128), Some(129), Some(130)]);
        slots.give_back(129);
        assert_eq!([slots.take(), slots.take()], [Some(129), Some(131)]);
        while slots.take().is_some() {}
        assert_eq!(slots.taken.lock().last(), Some(&32_763));
        slots.clear();
        assert_eq!(slots.take(), Some(128));
    }
}
