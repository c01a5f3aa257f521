//! Counters of a console: bytes, and causes of dropped input or output.

use crate::counters::counters;

counters! {
    /// Something that is counted of a console. Directions are the guest's: what it receives is `Rx`.
    pub enum ConsoleCounter;
    /// The counters of one console since it was plugged in.
    pub struct ConsoleCounters;

    /// Bytes that the driver received.
    RxBytes = "rx_bytes",
    /// Bytes that the driver transmitted, taken or not.
    TxBytes = "tx_bytes",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Receive buffers that nothing can be written to.
    RxBadChains = "rx_bad_chains",
    /// Dropped: the chain's descriptors are invalid.
    TxBadChains = "tx_bad_chains",
    /// Dropped in part: more in one chain than any driver transmits.
    TxTooLong = "tx_too_long",
    /// Queues that were given up because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl ConsoleCounter {
    /// True if it counts bytes or requests that were dropped.
    pub(crate) fn is_loss(self) -> bool {
        matches!(self, Self::RxBadChains | Self::TxBadChains | Self::TxTooLong | Self::BrokenRings)
    }
}
