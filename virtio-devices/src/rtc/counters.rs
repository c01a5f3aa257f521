//! Counters of a clock: its readings, and causes of requests that were not answered.

use crate::counters::queue_counters;

queue_counters! {
    /// Something that is counted of a clock.
    pub enum RtcCounter;
    /// The counters of one clock since it was plugged in.
    pub struct RtcCounters;

    /// Readings of the clock.
    Readings = "readings",
    /// Other requests that were carried out.
    Requests = "requests",
    /// Requests that were refused: for what there is not, or malformed.
    Refused = "refused",
    /// Dropped: the chain's descriptors are invalid, or have no room for an answer.
    BadChains = "bad_chains",
}

impl RtcCounter {
    /// True if it counts requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BrokenRings)
    }
}
