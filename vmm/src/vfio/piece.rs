//! What is mapped for devices of the host: a piece of this process's memory.

use vm_memory::Permissions;

/// A piece of this process's memory that devices reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The devices' address of its first byte.
    pub iova: u64,
    /// Bytes, at least one.
    pub size: u64,
    /// Where this process has it.
    pub host: u64,
    /// What devices may do there.
    pub access: Permissions,
}

impl Piece {
    /// The devices' address of its last byte.
    pub(super) fn last(&self) -> u64 {
        self.iova.saturating_add(self.size - 1)
    }
}
