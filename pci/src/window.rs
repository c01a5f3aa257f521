//! The memory that a device decodes.

use crate::BarIndex;

/// The BAR of a memory window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WindowId {
    /// A BAR of the device's own function, its PF.
    Bar(BarIndex),
    /// A VF BAR: one window for the slices of all enabled VFs, in order.
    VfBar(BarIndex),
}

/// Kind of a window's memory, as in its BAR (`PCIe 6.2 §7.5.1.2.1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory below 4 GiB.
    Memory32,
    /// Memory at any 64-bit address.
    Memory64 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
}

/// A range of memory addresses that a device decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    /// The BAR of the window.
    pub id: WindowId,
    /// The first address.
    pub base: u64,
    /// The number of bytes, not 0.
    pub len: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
}
