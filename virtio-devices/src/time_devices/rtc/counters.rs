//! Counters of a clock: its readings, and causes of failed requests.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a clock.
    pub enum RtcCounter;
    /// The counters of one clock since it was plugged in.
    pub struct RtcCounters;

    /// Requests that read the clock.
    Readings: requests = "readings",
    /// Requests other than readings that succeeded.
    Requests: requests = "requests",
    /// Requests that are not supported, or malformed.
    Refused: requests = "refused",
    /// Requests dropped because the descriptors of the chain are invalid, or have no room for a reply.
    BadChains: requests = "bad_chains",
}

impl RtcCounter {
    /// True for a counter of requests that failed.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::BadChains | Self::BrokenRings)
    }
}
