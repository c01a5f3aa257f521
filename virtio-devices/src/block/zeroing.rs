//! The methods that zero a range. A refused call shows that an image's storage lacks a method: file systems differ, and
//! so do their versions.

use std::sync::atomic::{AtomicBool, Ordering};

use super::operation::Operation;

/// A method that zeroes a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeroing {
    /// A hole, which frees the space.
    Hole,
    /// A call that keeps the space.
    InPlace,
    /// Written zeros.
    Written,
    /// The range stays unchanged: a discard is a hint (`virtio 1.4 §5.2.6.2`).
    Nothing,
}

/// The methods that an image's storage lacks, and those that have worked.
#[derive(Debug, Default)]
pub(crate) struct Lacking {
    hole: AtomicBool,
    in_place: AtomicBool,
    has_hole: AtomicBool,
    has_in_place: AtomicBool,
}

impl Lacking {
    /// The first method of `operation` that the storage may have.
    pub(crate) fn way(&self, operation: Operation) -> Zeroing {
        let ways: &[Zeroing] = match operation {
            Operation::Discard(_) => &[Zeroing::Hole, Zeroing::Nothing],
            Operation::WriteZeroes { unmap: true, .. } => &[Zeroing::Hole, Zeroing::InPlace, Zeroing::Written],
            _ => &[Zeroing::InPlace, Zeroing::Written],
        };
        let has = |way: &&Zeroing| self.flag(**way).is_none_or(|lacks| !lacks.load(Ordering::Relaxed));
        ways.iter().find(has).copied().unwrap_or(Zeroing::Written)
    }

    /// Notes that the storage lacks `way`. Returns false if every storage has it.
    pub(crate) fn note(&self, way: Zeroing) -> bool {
        self.flag(way).inspect(|lacks| lacks.store(true, Ordering::Relaxed)).is_some()
    }

    /// True if the storage has zeroed a range with a hole, or in place.
    pub(crate) fn has(&self, hole: bool) -> bool {
        if hole { &self.has_hole } else { &self.has_in_place }.load(Ordering::Relaxed)
    }

    /// Notes that the storage has zeroed a range with a hole, or in place.
    pub(crate) fn note_success(&self, hole: bool) {
        if hole { &self.has_hole } else { &self.has_in_place }.store(true, Ordering::Relaxed);
    }

    fn flag(&self, way: Zeroing) -> Option<&AtomicBool> {
        match way {
            Zeroing::Hole => Some(&self.hole),
            Zeroing::InPlace => Some(&self.in_place),
            Zeroing::Written | Zeroing::Nothing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::operation::Range;
    use super::*;

    #[test]
    fn the_next_way_is_taken_once_storage_lacks_one() {
        let range = Range { offset: 0, len: 512 };
        let [discard, unmap, keep] = [
            Operation::Discard(range),
            Operation::WriteZeroes { range, unmap: true },
            Operation::WriteZeroes { range, unmap: false },
        ];
        let lacking = Lacking::default();
        let ways = |lacking: &Lacking| [discard, unmap, keep].map(|operation| lacking.way(operation));
        assert_eq!(ways(&lacking), [Zeroing::Hole, Zeroing::Hole, Zeroing::InPlace]);
        assert!(lacking.note(Zeroing::Hole));
        assert_eq!(ways(&lacking), [Zeroing::Nothing, Zeroing::InPlace, Zeroing::InPlace]);
        assert!(lacking.note(Zeroing::InPlace));
        assert_eq!(ways(&lacking), [Zeroing::Nothing, Zeroing::Written, Zeroing::Written]);
        assert!(!lacking.note(Zeroing::Written) && !lacking.note(Zeroing::Nothing));
    }

    #[test]
    fn each_way_has_to_succeed_once_to_be_known() {
        let lacking = Lacking::default();
        lacking.note_success(true);
        assert_eq!([true, false].map(|hole| lacking.has(hole)), [true, false]);
        lacking.note_success(false);
        assert_eq!([true, false].map(|hole| lacking.has(hole)), [true, true]);
    }
}
