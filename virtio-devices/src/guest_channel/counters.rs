//! Counters of a channel.

use crate::device::counters::queue_counters;

queue_counters! {
    /// A counted event of a channel. Directions are the guest's: `Rx` is what it receives.
    pub enum ChannelCounter;
    /// The counters of one channel since it was plugged in.
    pub struct ChannelCounters;

    /// Bytes of replies and notices that the driver received.
    RxBytes: bytes = "rx_bytes",
    /// Bytes of requests that the driver transmitted.
    TxBytes: bytes = "tx_bytes",
    /// Lines that were requests of the guest, or were too long to be one.
    Lines: requests = "lines",
    /// Lines that were longer than 4 KiB, and were refused.
    LongLines: requests = "long_lines",
    /// Times that a request was found to wait because there were too many in a second.
    Limited: times = "limited",
    /// Times that a request was found to wait because too many were not answered, or their replies not read.
    Full: times = "full",
    /// Times that a program opened a port.
    Openings: times = "openings",
    /// Bytes that were transmitted to a port that was not open, or that takes none.
    Dropped: bytes = "dropped",
    /// Notices dropped because the guest had not read them when too many others came.
    LostNotices: notices = "lost_notices",
    /// Control messages that the standard does not have, or for ports that there are not.
    BadMessages: messages = "bad_messages",
    /// Receive buffers of the driver without room for what they were for.
    RxBadChains: buffers = "rx_bad_chains",
    /// Buffers dropped because the descriptors of the chain are invalid.
    TxBadChains: buffers = "tx_bad_chains",
    /// Buffers of which a part was dropped, because they are longer than a driver transmits.
    TxTooLong: buffers = "tx_too_long",
}

impl ChannelCounter {
    /// True for a counter of bytes or requests that were dropped.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(
            self,
            Self::LongLines
                | Self::LostNotices
                | Self::BadMessages
                | Self::RxBadChains
                | Self::TxBadChains
                | Self::TxTooLong
                | Self::BrokenRings
        )
    }
}
