//! Memory slots with the guest's memory.

/// The size of a page of KVM's log in bytes.
const PAGE: u64 = 4096;

/// A memory slot with the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSlot {
    /// Its number.
    pub slot: u32,
    /// Its first guest address.
    pub guest: u64,
    /// Where it is in this process.
    pub(super) host: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl RamSlot {
    /// Its pages.
    pub(super) fn pages(&self) -> u64 {
        self.len.div_ceil(PAGE)
    }
}
