//! Result of an access, besides the registers that it wrote.

use crate::{Effects, Rid};

/// The functions of a device that an access affected: their registers, doorbells or messages may have changed.
///
/// Memory windows belong to the device, not to a function. After a change of windows, the caller checks all functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reach {
    /// No function.
    #[default]
    Nothing,
    /// Only this function. The same functions exist as before.
    Function(Rid),
    /// Every function, or the set of existing functions.
    Device,
}

impl Reach {
    /// The smallest reach that covers both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nothing, reach) | (reach, Self::Nothing) => reach,
            (a, b) if a == b => a,
            _ => Self::Device,
        }
    }
}

/// Result of an access: what to reconcile, for which functions, and the work that is stopping because of it.
///
/// The caller drops the device's lock, waits for everything in `stopping`, and applies what the device needs now. Only
/// then does the guest's access complete.
#[derive(Debug)]
#[must_use]
pub struct Outcome<S> {
    /// State that may have changed.
    pub effects: Effects,
    /// Functions whose state may have changed.
    pub reach: Reach,
    /// Stopping work that may still be running, such as the threads of a function that was reset.
    pub stopping: Vec<S>,
}

impl<S> Outcome<S> {
    /// No change.
    pub const fn none() -> Self {
        Self { effects: Effects::NONE, reach: Reach::Nothing, stopping: Vec::new() }
    }

    /// Limits the outcome to `reach`.
    pub fn within(self, reach: Reach) -> Self {
        Self { reach, ..self }
    }

    /// Both outcomes: `self`, then `other`.
    pub fn and(mut self, other: Self) -> Self {
        self.stopping.extend(other.stopping);
        Self { effects: self.effects.and(other.effects), reach: self.reach.and(other.reach), stopping: self.stopping }
    }

    /// True if there is nothing to reconcile and nothing to wait for.
    pub fn is_none(&self) -> bool {
        self.effects.is_none() && self.stopping.is_empty()
    }
}

/// Effects on the whole device, unless limited by [`Outcome::within`].
impl<S> From<Effects> for Outcome<S> {
    fn from(effects: Effects) -> Self {
        Self { effects, reach: Reach::Device, stopping: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Reach = Reach::Function(Rid::from_bits(1));
    const TWO: Reach = Reach::Function(Rid::from_bits(2));

    #[test]
    fn two_accesses_reach_at_least_what_each_reaches() {
        assert_eq!(Reach::Nothing.and(Reach::Nothing), Reach::Nothing);
        assert_eq!((Reach::Nothing.and(ONE), ONE.and(Reach::Nothing), ONE.and(ONE)), (ONE, ONE, ONE));
        for (a, b) in [(ONE, TWO), (Reach::Device, ONE), (Reach::Nothing, Reach::Device)] {
            assert_eq!((a.and(b), b.and(a)), (Reach::Device, Reach::Device));
        }
    }

    #[test]
    fn two_outcomes_stop_what_both_stopped() {
        let outcome = |stopping: u8| Outcome { stopping: vec![stopping], ..Outcome::from(Effects::QUEUES) };
        let both = outcome(1).within(ONE).and(outcome(2).within(ONE)).and(Outcome::none());
        assert_eq!((both.effects, both.reach, both.stopping.as_slice()), (Effects::QUEUES, ONE, [1, 2].as_slice()));
        assert!(!outcome(1).is_none() && Outcome::<u8>::none().is_none());
        assert!(!Outcome { effects: Effects::NONE, ..outcome(1) }.is_none(), "something is still ending");
    }
}
