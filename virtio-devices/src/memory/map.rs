//! The guest's memory by guest physical addresses.

use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap, GuestRegionMmap};

use super::dirty::DirtyBitmap;

/// A map of the guest's memory by guest physical addresses.
pub type GuestMap = GuestMemoryMmap<DirtyBitmap>;

/// A part of a [`GuestMap`] that is one mapping.
pub type GuestRegion = GuestRegionMmap<DirtyBitmap>;

/// The guest's memory; the map can be replaced while devices use it.
pub type Memory = GuestMemoryAtomic<GuestMap>;
