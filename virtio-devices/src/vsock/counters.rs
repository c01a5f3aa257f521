//! Counters of a socket device: bytes and connections, and causes of refusals and ends.

use crate::counters::counters;

counters! {
    /// Something that is counted of a socket device. Directions are the guest's: what it receives is `Rx`.
    pub enum VsockCounter;
    /// The counters of one socket device since it was plugged in.
    pub struct VsockCounters;

    /// Bytes of payload that the driver received.
    RxBytes = "rx_bytes",
    /// Bytes of payload that the driver transmitted.
    TxBytes = "tx_bytes",
    /// Packets that the driver received.
    RxPackets = "rx_packets",
    /// Packets that the driver transmitted.
    TxPackets = "tx_packets",
    /// Connections that were established.
    Connections = "connections",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Connections of the host's clients that were refused: there are too many, or no port was named.
    RefusedClients = "refused_clients",
    /// Connections of the guest that were refused: there are too many, or nobody listens on the host.
    RefusedGuests = "refused_guests",
    /// Connections that were reset because the other side did not answer, or take the rest, in time.
    TimedOut = "timed_out",
    /// Connections that were reset because the driver broke the rules.
    BrokenRules = "broken_rules",
    /// Receive buffers that no packet fits into.
    RxBadChains = "rx_bad_chains",
    /// Dropped: the chain's descriptors are invalid.
    TxBadChains = "tx_bad_chains",
    /// Dropped: packets that are from or to somebody else, or too short.
    TxBadPackets = "tx_bad_packets",
    /// Queues that were given up because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl VsockCounter {
    /// True if it counts data or connections that were dropped, refused or abandoned.
    pub(crate) fn is_loss(self) -> bool {
        matches!(
            self,
            Self::TimedOut
                | Self::BrokenRules
                | Self::RxBadChains
                | Self::TxBadChains
                | Self::TxBadPackets
                | Self::BrokenRings
        )
    }
}
