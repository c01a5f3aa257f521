//! Addresses of a guest's memory and of the BARs of its devices.

use crate::arch::x86_64::layout::{self, Layout};
use crate::config::MemoryConfig;
use crate::pci_layout::{Apertures, Weights};
use crate::vm::error::VmError;
use crate::vm::memory::places;

/// The layout of a guest with this memory.
pub(super) fn layout_of(memory: &MemoryConfig, bits: u8) -> Result<Layout, VmError> {
    let size = memory.total();
    let room = memory.room().unwrap_or(0).saturating_add(places::addresses(memory));
    let too_large = VmError::AddressBits { size: size.saturating_add(room), bits };
    Layout::new(size, room, bits).ok_or(too_large)
}

/// Apertures for BARs in this layout, of each segment, which has its share.
pub(super) fn apertures(layout: &Layout, segments: &[Weights]) -> Vec<Apertures> {
    Apertures { mem32: layout::MMIO32, mem64: layout.mmio64.clone() }.split(segments)
}
