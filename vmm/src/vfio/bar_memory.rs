//! A part of a BAR that this process has mapped, where the guest finds it.

use std::sync::Arc;

use virtio_devices::FileMapping;
use vm_memory::Permissions;

use crate::vfio::piece::Piece;

/// A part of a BAR, at a guest address.
#[derive(Debug, Clone)]
pub(super) struct BarMemory {
    /// The guest's address of its first byte.
    pub address: u64,
    /// Where this process has it.
    pub memory: Arc<FileMapping>,
}

impl BarMemory {
    /// What other devices reach of it: all, at the guest's addresses.
    pub(super) fn piece(&self) -> Piece {
        let Self { address, memory } = self;
        let (size, host) = (memory.len(), memory.address() as u64);
        Piece { iova: *address, size, host, access: Permissions::ReadWrite }
    }
}
