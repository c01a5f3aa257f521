//! A part of a BAR that this process has mapped, at the guest's address.

use std::sync::Arc;

use virtio_devices::FileMapping;
use vm_memory::Permissions;

use crate::vfio::piece::Piece;

/// A part of a BAR, at a guest address.
#[derive(Debug, Clone)]
pub(crate) struct BarMemory {
    /// The guest's address of its first byte.
    pub address: u64,
    /// Mapping in this process.
    pub memory: Arc<FileMapping>,
}

impl BarMemory {
    /// Mapping for other devices: all of it, at the guest's addresses.
    pub(crate) fn piece(&self) -> Piece {
        let Self { address, memory } = self;
        let (size, host) = (memory.len(), memory.address() as u64);
        Piece { iova: *address, size, host, access: Permissions::ReadWrite }
    }
}
