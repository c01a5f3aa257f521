//! Times at which the addresses of network functions are announced at a new place: an announcement may be lost, and
//! links may come up only after the guest has resumed.

use std::time::{Duration, Instant};

use crate::devices::NetFunction;

/// Time from the guest's resume to the first round, and between two: a bridge or a switch may have learnt the old place
/// again in the meantime.
const FIRST: Duration = Duration::from_millis(50);
const PAUSE: Duration = Duration::from_millis(100);
/// The rounds of all functions.
const ROUNDS: u32 = 5;
/// The rounds in which a link that was down may come up: 10 s.
const LATEST: u32 = 100;
/// Number of announcements of a function whose link came up late.
const REPEATS: u32 = 3;

/// The rounds that are still to come.
#[derive(Debug)]
pub(crate) struct Announcing {
    began: Instant,
    done: u32,
    late: Vec<Late>,
}

/// A function whose link was down when the guest resumed.
#[derive(Debug)]
struct Late {
    function: NetFunction,
    /// Number of rounds in which its link has been up.
    up: u32,
}

/// A round that is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Round {
    /// True if the round is for all functions.
    pub is_for_all: bool,
    /// Functions whose links were down and that are announced now.
    pub late: Vec<NetFunction>,
}

impl Announcing {
    /// Starts the rounds of a guest that resumes now. The links of `late` are down.
    pub(crate) fn begin(now: Instant, late: Vec<NetFunction>) -> Self {
        let late = late.into_iter().map(|function| Late { function, up: 0 }).collect();
        Self { began: now, done: 0, late }
    }

    /// Time until the next round; `None` after the last.
    pub(crate) fn wait(&self, now: Instant) -> Option<Duration> {
        let due = self.began + FIRST + PAUSE * self.done;
        (self.done < self.rounds()).then(|| due.saturating_duration_since(now))
    }

    /// Takes the round that is due, if there is one; missed rounds are merged into it. `is_up` returns true if a
    /// function's link is up, and `None` if the function was removed.
    ///
    /// A function is announced from the round after the one in which its link is up: its driver must see the link
    /// first, and Linux sends nothing for some moments after that.
    pub(crate) fn take(&mut self, now: Instant, is_up: impl Fn(&NetFunction) -> Option<bool>) -> Option<Round> {
        let since = now.checked_duration_since(self.began + FIRST)?;
        let passed = u32::try_from(since.as_millis() / PAUSE.as_millis()).unwrap_or(u32::MAX).saturating_add(1);
        let passed = passed.min(self.rounds());
        if passed <= self.done {
            return None;
        }
        let is_for_all = self.done < ROUNDS;
        self.done = passed;
        let mut due = Vec::new();
        self.late.retain_mut(|late| {
            let Some(is_up) = is_up(&late.function) else { return false };
            late.up = if is_up { late.up + 1 } else { 0 };
            if late.up > 1 {
                due.push(late.function.clone());
            }
            late.up <= REPEATS
        });
        Some(Round { is_for_all, late: due })
    }

    fn rounds(&self) -> u32 {
        if self.late.is_empty() { ROUNDS } else { LATEST }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const GONE: fn(&NetFunction) -> Option<bool> = |_| None;

    #[test]
    fn announcing_takes_five_rounds_without_catching_up() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut rounds = Announcing::begin(began, Vec::new());
        let is_due = |rounds: &mut Announcing, millis| match rounds.take(at(millis), GONE) {
            Some(round) => {
                assert_eq!(round, Round { is_for_all: true, late: Vec::new() });
                true
            }
            None => false,
        };
        assert_eq!(rounds.wait(began), Some(Duration::from_millis(50)));
        assert!(!is_due(&mut rounds, 49) && is_due(&mut rounds, 50) && !is_due(&mut rounds, 51));
        assert_eq!(rounds.wait(at(200)), Some(Duration::ZERO));
        assert!(is_due(&mut rounds, 260) && !is_due(&mut rounds, 261));
        assert_eq!(rounds.wait(at(300)), Some(Duration::from_millis(50)));
        assert!(is_due(&mut rounds, 5000) && !is_due(&mut rounds, 5001));
        assert_eq!(rounds.wait(at(5001)), None);
    }

    #[test]
    fn function_whose_link_comes_up_late_is_announced_three_times() {
        let (began, is_up) = (Instant::now(), Cell::new(false));
        let function: NetFunction = ("pf0".to_string(), None);
        let mut rounds = Announcing::begin(began, vec![function.clone()]);
        let mut announced = Vec::new();
        for round in 0..12 {
            is_up.set(round >= 6);
            let now = began + FIRST + PAUSE * round;
            assert_eq!(rounds.wait(now).is_some(), round < 10, "{round}");
            if let Some(Round { is_for_all, late }) = rounds.take(now, |_| Some(is_up.get())) {
                assert_eq!(is_for_all, round < 5, "{round}");
                announced.extend(late.iter().map(|_| round));
            }
        }
        assert_eq!(announced, [7, 8, 9]);
    }

    #[test]
    fn flapping_link_is_awaited_and_one_never_up_for_ten_seconds() {
        let began = Instant::now();
        let function: NetFunction = ("pf0".to_string(), None);
        let mut rounds = Announcing::begin(began, vec![function]);
        let up = [false, true, false, true, true];
        let due = (0..).zip(up).map(|(n, is_up)| rounds.take(began + FIRST + PAUSE * n, |_| Some(is_up)).unwrap().late);
        assert_eq!(due.map(|late| late.len()).collect::<Vec<_>>(), [0, 0, 0, 0, 1]);
        let after = |seconds| began + Duration::from_secs(seconds);
        assert!(rounds.wait(after(9)).is_some());
        assert!(rounds.take(after(20), |_| Some(false)).is_some() && rounds.wait(after(20)).is_none());
    }

    #[test]
    fn a_function_that_is_gone_is_not_waited_for() {
        let began = Instant::now();
        let mut rounds = Announcing::begin(began, vec![("pf0".to_string(), None)]);
        for round in 0..ROUNDS {
            assert!(rounds.take(began + FIRST + PAUSE * round, GONE).unwrap().late.is_empty());
        }
        assert_eq!(rounds.wait(began), None);
    }
}
