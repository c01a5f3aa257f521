//! Mapping for host devices: a piece of this process's memory.

use vm_memory::Permissions;

/// A piece of this process's memory that devices reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The devices' address of its first byte.
    pub iova: u64,
    /// Bytes, at least one.
    pub size: u64,
    /// Address in this process.
    pub host: u64,
    /// Accesses that devices may make.
    pub access: Permissions,
}

impl Piece {
    /// The devices' address of its last byte.
    pub(super) fn last(&self) -> u64 {
        self.iova.saturating_add(self.size - 1)
    }
}
