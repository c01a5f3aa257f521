//! Counters of a console: bytes, and causes of dropped input or output.

use crate::device::counters::{counters, queue_tally};

counters! {
    /// A counted event of a console. Directions are the guest's: `Rx` is what it receives.
    pub enum ConsoleCounter;
    /// The counters of one console since it was plugged in.
    pub struct ConsoleCounters;

    /// Bytes that the driver received.
    RxBytes: bytes = "rx_bytes",
    /// Bytes that the driver transmitted, written or not.
    TxBytes: bytes = "tx_bytes",
    /// Wake-ups of a worker by a doorbell of the driver.
    Kicks: doorbells = "kicks",
    /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
    Interrupts: interrupts = "interrupts",
    /// Receive buffers of the driver without room for a byte.
    RxBadChains: buffers = "rx_bad_chains",
    /// Buffers dropped because the descriptors of the chain are invalid.
    TxBadChains: buffers = "tx_bad_chains",
    /// Buffers of which a part was dropped, because they are longer than a driver transmits.
    TxTooLong: buffers = "tx_too_long",
    /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
    BrokenRings: queues = "broken_rings",
}

queue_tally!(ConsoleCounter, ConsoleCounters);

impl ConsoleCounter {
    /// True for a counter of bytes or requests that were dropped.
    pub(crate) const fn is_loss(self) -> bool {
        matches!(self, Self::RxBadChains | Self::TxBadChains | Self::TxTooLong | Self::BrokenRings)
    }
}
