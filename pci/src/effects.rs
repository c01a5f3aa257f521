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

/// VFs that appeared or disappeared with one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VfChange {
    /// VF Enable was set: VFs 0 to `num_vfs` - 1 exist, in their reset state.
    Enabled {
        /// Number of VFs; may be 0.
        num_vfs: u16,
    },
    /// VF Enable was cleared: no VF exists.
    Disabled {
        /// Number of VFs that existed before.
        num_vfs: u16,
    },
}

/// Effects of a write beyond the register itself.
///
/// Each level of the device consumes its own part and passes on the rest. The caller at the top drops the device's
/// lock, queries what the device needs now, and updates its surroundings. An effect is thus a hint, never a change to
/// apply; reporting one too many is harmless.
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
    /// True if the result of [`Device::windows`](crate::Device::windows) may have changed.
    pub windows: bool,
    /// True if a message's address, data or mask may have changed, or the ability to send messages.
    pub messages: bool,
    /// True if the state of a function's queues or the location of their doorbells may have changed.
    pub queues: bool,
    /// VF Enable changed.
    pub vfs: Option<VfChange>,
    /// Set if the function was reset by its own registers. These are reset already; the state behind them is not.
    pub reset: Option<ResetKind>,
    /// Set if a register refused all or part of the write. Needs no action; see [`Self::is_none`].
    pub refused: Option<Refused>,
}

impl Effects {
    /// Only the register changed.
    pub const NONE: Self =
        Self { windows: false, messages: false, queues: false, vfs: None, reset: None, refused: None };
    /// Memory windows may have changed.
    pub const WINDOWS: Self = Self { windows: true, ..Self::NONE };
    /// Messages may have changed.
    pub const MESSAGES: Self = Self { messages: true, ..Self::NONE };
    /// Queues or their doorbells may have changed.
    pub const QUEUES: Self = Self { queues: true, ..Self::NONE };

    /// No effect, because a register refused the write.
    pub const fn refused(refused: Refused) -> Self {
        Self { refused: Some(refused), ..Self::NONE }
    }

    /// Both effects. If both have a VF change, a reset or a refused write, the later one, `other`'s, counts.
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

    /// True if only the register changed, so that nothing needs to be done. A refused write alone changes nothing.
    pub fn is_none(self) -> bool {
        Self { refused: None, ..self } == Self::NONE
    }
}
