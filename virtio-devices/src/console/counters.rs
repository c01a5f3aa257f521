//! Counters of a console: bytes, and causes of dropped input or output.

use crate::device::counters::counters;

counters! {
    /// A counted event of a console. Directions are the guest's: `Rx` is what it receives.
    pub enum ConsoleCounter;
    /// The counters of one console since it was plugged in.
    pub struct ConsoleCounters;

    /// Bytes that the driver received.
    RxBytes = "rx_bytes",
    /// Bytes that the driver transmitted, written or not.
    TxBytes = "tx_bytes",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Receive buffers without room.
    RxBadChains = "rx_bad_chains",
    /// Dropped: the chain's descriptors are invalid.
    TxBadChains = "tx_bad_chains",
    /// Dropped in part: a chain longer than any driver transmits.
    TxTooLong = "tx_too_long",
    /// Queues stopped because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl ConsoleCounter {
    /// True for a counter of bytes or requests that were dropped.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::RxBadChains | Self::TxBadChains | Self::TxTooLong | Self::BrokenRings)
    }
}
