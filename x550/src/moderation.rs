//! Moderation of interrupts: the least time between two messages of a vector (`Interrupt Moderation`).
//!
//! A message begins the interval of its vector. Events of queues within it set their causes, and the message that they
//! would have sent is sent when the interval ends, if its cause is set and its vector enabled then. An enable of a
//! vector within its interval waits in the same way.
//!
//! A driver needs no interrupt for a frame that was sent: it finds that out when it sends or receives the next one. So
//! frames that were sent are reported late, as by write-backs of several descriptors (`TXDCTL.WTHRESH`). Any message of
//! the vector reports them, too.
//!
//! Nothing here has a clock: its caller sets the time, and asks when to come back.

/// The longest time without a report of frames that were sent, in microseconds, unless the interval is longer.
const PUT_OFF: u64 = 250;
/// The most bytes that may be sent without a report: two of the longest segments. Linux holds back TCP that has more in
/// flight.
const MOST_BYTES: u64 = 128 << 10;

/// The moderation of a vector. Times are in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Vector {
    /// The end of its interval.
    until: u64,
    /// Frames that were sent and not reported, and the time of the report.
    report: Report,
}

/// Descriptors and bytes that were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Report {
    descriptors: u32,
    bytes: u64,
    due: u64,
}

impl Report {
    /// Frames that were sent now.
    pub(crate) const fn of(descriptors: u32, bytes: u64) -> Self {
        Self { descriptors, bytes, due: 0 }
    }
}

/// The moderation of a function's vectors, a bit for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Moderation {
    vectors: Box<[Vector]>,
    /// Vectors whose interval may not have ended.
    running: u64,
    /// Vectors with a message that waits for the end of the interval.
    deferred: u64,
    /// Vectors with frames to report.
    reports: u64,
}

/// The numbers of the set bits.
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (bit < u64::BITS).then_some(bit as usize)
    })
}

impl Moderation {
    /// No interval runs.
    pub(crate) fn new(vectors: u16) -> Self {
        Self { vectors: vec![Vector::default(); vectors.into()].into(), running: 0, deferred: 0, reports: 0 }
    }

    /// Ends all intervals without a message, as a reset does.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(u16::try_from(self.vectors.len()).unwrap_or(0));
    }

    /// The vectors whose interval runs at the time `now`.
    pub(crate) fn running(&mut self, now: u64) -> u64 {
        for bit in bits(self.running) {
            if self.vectors.get(bit).is_none_or(|vector| vector.until <= now) {
                self.running &= !(1 << bit);
            }
        }
        self.running
    }

    /// Records a message of each of `vectors`, which begins its interval; `interval` returns its length.
    pub(crate) fn sent(&mut self, vectors: u64, now: u64, interval: impl Fn(u16) -> u32) {
        self.deferred &= !vectors;
        self.reports &= !vectors;
        for bit in bits(vectors) {
            let Some(vector) = self.vectors.get_mut(bit) else { continue };
            *vector = Vector::default();
            let length = u16::try_from(bit).map_or(0, &interval);
            if length != 0 {
                vector.until = now + u64::from(length);
                self.running |= 1 << bit;
            }
        }
    }

    /// Ends the interval of a vector now.
    pub(crate) fn end(&mut self, vector: u16) {
        if let Some(vector) = self.vectors.get_mut(usize::from(vector)) {
            (vector.until, vector.report.due) = (0, 0);
        }
    }

    /// Records messages that wait for the end of the interval. Returns true if one is new.
    pub(crate) fn defer(&mut self, vectors: u64) -> bool {
        let new = vectors & !self.deferred;
        self.deferred |= vectors;
        new != 0
    }

    /// Records that frames were sent. Returns false if they must be reported now: because of their bytes, or because
    /// they had as many descriptors as `most`.
    pub(crate) fn put_off(&mut self, vector: u16, now: u64, interval: u32, sent: Report, most: u32) -> bool {
        let bit = 1_u64.checked_shl(vector.into()).unwrap_or(0);
        let Some(Vector { report, .. }) = self.vectors.get_mut(usize::from(vector)) else { return false };
        if self.reports & bit == 0 {
            *report = Report { due: now + PUT_OFF.max(interval.into()), ..Report::default() };
        }
        report.descriptors = report.descriptors.saturating_add(sent.descriptors);
        report.bytes = report.bytes.saturating_add(sent.bytes);
        let few = report.descriptors < most && report.bytes <= MOST_BYTES;
        self.reports = if few { self.reports | bit } else { self.reports & !bit };
        few
    }

    /// The time at which something is due; `None` if nothing waits.
    pub(crate) fn due(&self) -> Option<u64> {
        let messages = bits(self.deferred).filter_map(|bit| Some(self.vectors.get(bit)?.until));
        let reports = bits(self.reports).filter_map(|bit| Some(self.vectors.get(bit)?.report.due));
        messages.chain(reports).min()
    }

    /// Takes what is due at the time `now`: the vectors whose messages may be sent, and those with frames to report.
    pub(crate) fn take(&mut self, now: u64) -> (u64, u64) {
        let due = |mask: u64, time: fn(&Vector) -> u64| {
            let is_due = |bit: &usize| self.vectors.get(*bit).is_none_or(|vector| time(vector) <= now);
            bits(mask).filter(is_due).fold(0_u64, |due, bit| due | 1 << bit)
        };
        let messages = due(self.deferred, |vector| vector.until);
        let reports = due(self.reports, |vector| vector.report.due);
        self.deferred &= !messages;
        self.reports &= !reports;
        (messages, reports)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_runs_from_a_message_to_its_end() {
        let mut moderation = Moderation::new(3);
        moderation.sent(0b011, 100, |vector| if vector == 0 { 50 } else { 0 });
        assert_eq!([100, 149, 150].map(|now| moderation.running(now)), [1, 1, 0]);
        assert_eq!((moderation.defer(1), moderation.defer(1), moderation.due()), (true, false, Some(150)));
        assert_eq!((moderation.take(149), moderation.take(150), moderation.take(150)), ((0, 0), (1, 0), (0, 0)));
    }

    #[test]
    fn a_report_waits_unless_there_is_much_to_report() {
        let mut moderation = Moderation::new(64);
        assert!(moderation.put_off(63, 100, 10, Report::of(1, 60), 4));
        assert_eq!(moderation.due(), Some(350));
        assert!(moderation.put_off(63, 200, 10, Report::of(2, 60), 4), "the first frame counts");
        assert_eq!((moderation.due(), moderation.take(349)), (Some(350), (0, 0)));
        assert!(!moderation.put_off(63, 300, 10, Report::of(1, 60), 4));
        assert_eq!(moderation.due(), None);
        assert!(moderation.put_off(63, 300, 400, Report::of(1, 100), 4));
        assert_eq!(moderation.due(), Some(700), "an interval is longer");
        assert!(!moderation.put_off(63, 300, 400, Report::of(1, MOST_BYTES), 4));
        assert!(moderation.put_off(63, 300, 0, Report::of(1, 1), 4));
        moderation.sent(1 << 63, 300, |_| 0);
        assert_eq!(moderation.due(), None, "a message reports");
        assert!(!moderation.put_off(64, 0, 0, Report::of(1, 1), 4));
    }

    #[test]
    fn a_reset_leaves_nothing() {
        let mut moderation = Moderation::new(64);
        moderation.sent(u64::MAX, 5, |_| 7);
        moderation.defer(u64::MAX);
        moderation.put_off(3, 5, 7, Report::of(1, 1), 9);
        moderation.reset();
        assert_eq!((moderation.clone(), moderation.due()), (Moderation::new(64), None));
    }
}
