//! Limit of the lines about refused writes.

use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};

use parking_lot::Mutex;
use pci::{Refused, VfIndex};

/// A function, and a kind of refusal.
type Key = (Option<VfIndex>, Discriminant<Refused>);

/// Numbers of refused writes of one device, by function and kind. A guest can repeat a write, but it cannot make more
/// functions or kinds.
#[derive(Default)]
pub(super) struct RefusedWrites(Mutex<HashMap<Key, u64>>);

impl RefusedWrites {
    /// Counts a write that was refused to VF `vf`, or to the device's own function. Returns its line if it is the 1st,
    /// 2nd, 4th, 8th... of its function and kind, or if the host asked for the refusal: it did so a limited number of
    /// times.
    pub(super) fn line(&self, vf: Option<VfIndex>, refused: Refused) -> Option<String> {
        let mut counts = self.0.lock();
        let count = counts.entry((vf, discriminant(&refused))).or_default();
        *count = count.saturating_add(1);
        let is_logged = count.is_power_of_two() || refused == Refused::FailingEnable;
        is_logged.then(|| format!("refused a write ({count} so far): {refused}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOO_MANY: Refused = Refused::VfEnable { num_vfs: 65, total_vfs: 64 };

    #[test]
    fn a_kind_of_refusal_does_not_hide_another_one() {
        let writes = RefusedWrites::default();
        let is_logged = |refused| writes.line(None, refused).is_some();
        assert_eq!([(); 4].map(|()| is_logged(TOO_MANY)), [true, true, false, true]);
        assert!(is_logged(Refused::NumVfs { written: 3 }));
        let expected = "refused a write (1 so far): PowerState cannot become D1: only D0 and D3hot exist";
        assert_eq!(writes.line(None, Refused::PowerState { written: 1 }).unwrap(), expected);
    }

    #[test]
    fn each_function_has_counts_of_its_own() {
        let writes = RefusedWrites::default();
        let power = Refused::PowerState { written: 2 };
        for _ in 0..3 {
            writes.line(Some(VfIndex(1)), power);
        }
        assert!(writes.line(Some(VfIndex(2)), power).unwrap().contains("(1 so far)"));
    }

    #[test]
    fn every_refusal_that_the_host_asked_for_is_logged() {
        let writes = RefusedWrites::default();
        writes.line(None, TOO_MANY);
        writes.line(None, TOO_MANY);
        let lines = [(); 5].map(|()| writes.line(None, Refused::FailingEnable));
        assert!(lines.iter().all(Option::is_some));
        let expected = "refused a write (5 so far): VF Enable stays clear: a fault that the host asked for";
        assert_eq!(lines[4].as_deref(), Some(expected));
    }
}
