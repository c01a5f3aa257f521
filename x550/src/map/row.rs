//! The description of a register.

/// A register, or an array of registers that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Name in the datasheet, without its index.
    pub name: &'static str,
    /// Offset of the first register in BAR 0, in bytes.
    pub first: u32,
    /// Bytes from a register to the next one.
    pub stride: u32,
    /// Number of registers.
    pub count: u32,
    /// Bits that software can write.
    pub writable: u32,
    /// Value after a reset.
    pub reset: u32,
    /// True if a read clears the register.
    pub clears: bool,
    /// True if the NIC counts in the register, so that its saved value may be any.
    pub counts: bool,
}

/// A register of its own.
pub(super) const fn one(name: &'static str, first: u32, writable: u32, reset: u32) -> Row {
    Row { name, first, stride: 4, count: 1, writable, reset, clears: false, counts: false }
}

/// Consecutive registers.
pub(super) const fn many(name: &'static str, first: u32, count: u32, writable: u32) -> Row {
    Row { count, ..one(name, first, writable, 0) }
}

/// Registers with others between them.
pub(super) const fn spaced(name: &'static str, first: u32, stride: u32, count: u32, writable: u32) -> Row {
    Row { stride, ..many(name, first, count, writable) }
}

/// Registers that are cleared when read.
pub(super) const fn statistic(name: &'static str, first: u32, stride: u32, count: u32) -> Row {
    Row { clears: true, counts: true, ..spaced(name, first, stride, count, 0) }
}

/// Registers that count and wrap.
pub(super) const fn counter(name: &'static str, first: u32, stride: u32, count: u32) -> Row {
    Row { counts: true, ..spaced(name, first, stride, count, 0) }
}
