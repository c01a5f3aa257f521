//! What a device is to the hierarchy, and what an access may cause.

use crate::{BarIndex, Dword, DwordWrite, Rid};

/// A device: one function, or a PF and its VFs.
///
/// A device is one value behind one lock, because what a VF decodes follows from registers of its PF. It is given the routing
/// ID of each access and answers for every function that it has reserved; a function that does not exist at the moment reads
/// all-ones and ignores writes.
pub trait Device: Send {
    /// Reads a dword of the configuration space of function `rid`. A read has no side effect on configuration space.
    fn config_read(&self, rid: Rid, reg: Dword) -> u32;

    /// Writes a dword of the configuration space of function `rid`.
    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Effects;

    /// Reads `data.len()` bytes at `offset` of a memory window. Offsets outside of it read all-ones.
    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of a memory window.
    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Effects;

    /// Appends the memory windows that the device decodes now: a pure function of its registers.
    fn windows(&self, out: &mut Vec<Window>);

    /// Resets the device as a whole; for one function's reset see the PCI Express capability.
    fn reset(&mut self, kind: ResetKind) -> Effects;
}

/// Which BAR a memory window belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WindowId {
    /// A BAR of the device's own function, its PF.
    Bar(BarIndex),
    /// A VF BAR: one window for the slices of all enabled VFs, in order.
    VfBar(BarIndex),
}

/// A range of memory addresses that a device decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    /// The BAR it belongs to.
    pub id: WindowId,
    /// The first address.
    pub base: u64,
    /// The number of bytes, not 0.
    pub len: u64,
}

/// How much of a device is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetKind {
    /// Conventional reset: power-on, or a reset of the system (`PCIe 6.2 §6.6.1`).
    Conventional,
    /// Function level reset (`PCIe 6.2 §6.6.2`).
    Flr,
}

/// VFs that came or went with one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VfChange {
    /// VF Enable was set: VFs 0 to `num_vfs` - 1 exist, in their reset state.
    Enabled {
        /// How many; may be 0.
        num_vfs: u16,
    },
    /// VF Enable was cleared: no VF exists.
    Disabled {
        /// How many existed until now.
        num_vfs: u16,
    },
}

/// What a write changed beyond the register itself.
///
/// Each level of the device consumes what is its own and passes the rest on; the caller at the top applies the rest with the
/// device's lock dropped, by asking the device what it wants now and reconciling the world with the answer. An effect is
/// thus a hint where to look, never a change to be patched in, and to report one too many is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct Effects {
    /// [`Device::windows`] may answer differently.
    pub windows: bool,
    /// A message's address, data or mask may have changed, or whether messages can be sent at all.
    pub messages: bool,
    /// Whether a function's queues run, or where their doorbells are, may have changed.
    pub queues: bool,
    /// VF Enable changed.
    pub vfs: Option<VfChange>,
    /// The function was reset by its own registers. These are reset already; what is behind them is not.
    pub reset: Option<ResetKind>,
}

impl Effects {
    /// Nothing but the register changed.
    pub const NONE: Self = Self { windows: false, messages: false, queues: false, vfs: None, reset: None };

    /// Both effects. Of two changes of the VFs or two resets the later one, `other`'s, counts.
    pub fn and(self, other: Self) -> Self {
        Self {
            windows: self.windows | other.windows,
            messages: self.messages | other.messages,
            queues: self.queues | other.queues,
            vfs: other.vfs.or(self.vfs),
            reset: other.reset.or(self.reset),
        }
    }

    /// Whether nothing but the register changed.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}
