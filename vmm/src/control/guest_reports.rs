//! Reports of changes that the guest makes to its VFs, at a limited rate: it may make as many as it likes. The last
//! change is always reported, if need be later.

use std::time::{Duration, Instant};

use virtio_devices::{RateLimit, RateLimiter};

/// Changes that are reported per second; more are counted.
const RATE: RateLimit = RateLimit { size: 4, one_time_burst: 0, refill: Duration::from_secs(1) };

/// A change by the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GuestChange {
    /// Id of the PF.
    pub pf: String,
    /// Index of the VF.
    pub index: u16,
    /// Settings before and after it, as text.
    pub changed: String,
}

/// A change to report, and the number of those before it that are not reported.
pub(crate) type Report = (GuestChange, u64);

/// Rate limiter of reports.
#[derive(Debug)]
pub(crate) struct GuestReports {
    limiter: RateLimiter,
    /// The last change, if it was not reported.
    late: Option<Report>,
}

impl GuestReports {
    /// None yet.
    pub(crate) fn new(now: Instant) -> Self {
        Self { limiter: RateLimiter::of_ops(RATE, now), late: None }
    }

    /// Takes a change. Returns what to report now.
    pub(crate) fn add(&mut self, change: GuestChange, now: Instant) -> Option<Report> {
        let left_out = self.late.take().map_or(0, |(_, left_out)| left_out + 1);
        self.late = Some((change, left_out));
        self.due(now)
    }

    /// Returns the last change, if its time has come.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Report> {
        if !self.wait(now)?.is_zero() {
            return None;
        }
        self.limiter.take_op(now);
        self.late.take()
    }

    /// Returns the last change at any time: there is none after it.
    pub(crate) fn end(&mut self) -> Option<Report> {
        self.late.take()
    }

    /// Time until a change is to be reported; `None` without one.
    pub(crate) fn wait(&self, now: Instant) -> Option<Duration> {
        self.late.as_ref().map(|_| self.limiter.wait(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(number: u16) -> GuestChange {
        GuestChange { pf: "pf0".into(), index: number, changed: format!("vlan 0 -> {number}") }
    }

    #[test]
    fn the_last_of_many_changes_is_reported_by_itself() {
        let now = Instant::now();
        let mut reports = GuestReports::new(now);
        for number in 0..4 {
            assert_eq!(reports.add(change(number), now), Some((change(number), 0)));
        }
        assert_eq!(reports.wait(now), None);
        for number in 4..7 {
            assert_eq!(reports.add(change(number), now), None);
        }
        let wait = reports.wait(now).unwrap();
        assert!(!wait.is_zero() && wait <= Duration::from_secs(1), "{wait:?}");
        assert_eq!(reports.due(now), None);
        assert_eq!(reports.due(now + wait), Some((change(6), 2)));
        assert_eq!((reports.wait(now + wait), reports.due(now + wait)), (None, None));
    }

    #[test]
    fn a_later_change_is_reported_with_the_number_of_others() {
        let now = Instant::now();
        let mut reports = GuestReports::new(now);
        (0..6).for_each(|number| drop(reports.add(change(number), now)));
        let later = now + Duration::from_secs(2);
        assert_eq!(reports.add(change(6), later), Some((change(6), 2)));
        assert_eq!(reports.end(), None);
        (0..4).for_each(|number| drop(reports.add(change(number), later)));
        assert_eq!(reports.end(), Some((change(3), 0)));
    }
}
