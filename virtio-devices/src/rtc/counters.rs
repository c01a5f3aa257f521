//! Counters of a clock: its readings, and causes of failed requests.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a clock.
    pub enum RtcCounter;
    /// The counters of one clock since it was plugged in.
    pub struct RtcCounters;

    /// Readings of the clock.
    Readings = "readings",
    /// Other requests that succeeded.
    Requests = "requests",
    /// Requests that were refused: not supported, or malformed.
    Refused = "refused",
    /// Dropped: the chain's descriptors are invalid, or have no room for a reply.
    BadChains = "bad_chains",
}

impl RtcCounter {
    /// True for a counter of requests that failed.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BrokenRings)
    }
}
