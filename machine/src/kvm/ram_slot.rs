//! Memory slots with the guest's memory.

use std::collections::BTreeMap;

/// The size of a page of KVM's log in bytes.
const PAGE: u64 = 4096;

/// A memory slot with the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSlot {
    /// Number of the slot.
    pub slot: u32,
    /// First guest address.
    pub guest: u64,
    /// Address in this process.
    pub(super) host: u64,
    /// Length in bytes.
    pub len: u64,
}

/// All memory slots with the guest's memory.
#[derive(Debug, Default)]
pub(super) struct RamSlots {
    pub(super) slots: BTreeMap<u32, RamSlot>,
    /// True if KVM logs the vCPUs' writes to the slots.
    pub(super) logged: bool,
}

impl RamSlots {
    /// True if this slot exists unchanged.
    pub(super) fn has(&self, slot: &RamSlot) -> bool {
        self.slots.get(&slot.slot) == Some(slot)
    }
}

impl RamSlot {
    /// Number of pages.
    pub(super) fn pages(&self) -> u64 {
        self.len.div_ceil(PAGE)
    }
}
