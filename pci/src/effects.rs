//! Effects of a write beyond the register itself.

use crate::Refused;

/// Scope of a reset.
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
        /// Number of VFs; may be 0.
        num_vfs: u16,
    },
    /// VF Enable was cleared: no VF exists.
    Disabled {
        /// Number of VFs that existed until now.
        num_vfs: u16,
    },
}

/// Effects of a write beyond the register itself.
///
/// Each level of the device consumes its own part and passes on the rest. The caller at the top drops the device's
/// lock, asks the device what it wants now, and makes the world match. An effect is thus a hint where to look, never a
/// change to apply; reporting one too many is harmless.
///
/// Further effects may be added. Other crates build a value from the constants:
///
/// ```
/// use pci_sriov::Effects;
///
/// let effects = Effects::QUEUES.and(Effects::MESSAGES);
/// assert!(effects.queues && effects.messages && !effects.windows);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
#[must_use]
pub struct Effects {
    /// [`Device::windows`] may answer differently.
    pub windows: bool,
    /// A message's address, data or mask may have changed, or whether messages can be sent at all.
    pub messages: bool,
    /// True if the state of a function's queues or the place of their doorbells may have changed.
    pub queues: bool,
    /// VF Enable changed.
    pub vfs: Option<VfChange>,
    /// The function was reset by its own registers. These are reset already; the state behind them is not.
    pub reset: Option<ResetKind>,
    /// A register refused the write, or a part of it. Nothing has to be done about it; see [`Self::is_none`].
    pub refused: Option<Refused>,
}

impl Effects {
    /// Nothing but the register changed.
    pub const NONE: Self =
        Self { windows: false, messages: false, queues: false, vfs: None, reset: None, refused: None };
    /// Memory windows may have changed.
    pub const WINDOWS: Self = Self { windows: true, ..Self::NONE };
    /// Messages may have changed.
    pub const MESSAGES: Self = Self { messages: true, ..Self::NONE };
    /// Queues or their doorbells may have changed.
    pub const QUEUES: Self = Self { queues: true, ..Self::NONE };

    /// Nothing happened, because a register refused the write.
    pub const fn refused(refused: Refused) -> Self {
        Self { refused: Some(refused), ..Self::NONE }
    }

    /// Both effects. Of two VF changes, resets or refused writes the later one, `other`'s, counts.
    pub const fn and(self, other: Self) -> Self {
        Self {
            windows: self.windows | other.windows,
            messages: self.messages | other.messages,
            queues: self.queues | other.queues,
            vfs: if other.vfs.is_some() { other.vfs } else { self.vfs },
            reset: if other.reset.is_some() { other.reset } else { self.reset },
            refused: if other.refused.is_some() { other.refused } else { self.refused },
        }
    }

    /// True if only the register changed, so that there is nothing to do. A refused write alone changes nothing.
    pub fn is_none(self) -> bool {
        Self { refused: None, ..self } == Self::NONE
    }
}
