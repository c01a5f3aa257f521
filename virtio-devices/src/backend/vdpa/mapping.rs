//! A part of the guest's memory that a vDPA device reaches.

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A part of the guest's memory. Only [`Self::all_of`] makes one, so that no device is ever told to reach anything
/// else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    iova: u64,
    size: u64,
    host: u64,
}

impl Mapping {
    /// The parts of `memory`.
    pub fn all_of(memory: &GuestMemoryMmap) -> Vec<Self> {
        let mapping = |region: &<GuestMemoryMmap as GuestMemoryBackend>::R| Self {
            iova: region.start_addr().raw_value(),
            size: region.len(),
            host: region.as_ptr() as u64,
        };
        memory.iter().map(mapping).collect()
    }

    /// The first address at which the device sees it: its guest physical address.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// The last of these addresses.
    pub fn last(&self) -> u64 {
        self.iova + (self.size - 1)
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where this process has it.
    pub fn host(&self) -> u64 {
        self.host
    }

    #[cfg(test)]
    pub(super) fn for_test(iova: u64, size: u64) -> Self {
        Self { iova, size, host: 0x7f00_0000_0000 }
    }
}
