//! Counters of a socket device: bytes, connections, and the causes of their refusal or end.

use crate::device::counters::counters;

counters! {
    /// A counted event of a socket device. Directions are the guest's: `Rx` is what it receives.
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
    /// Refused connections of the host's clients: there are too many, or no port was named.
    RefusedClients = "refused_clients",
    /// Refused connections of the guest: there are too many, or no program listens on the host.
    RefusedGuests = "refused_guests",
    /// Connections reset because the other side did not reply, or read the remaining data, in time.
    TimedOut = "timed_out",
    /// Connections reset because the driver violated the protocol.
    BrokenRules = "broken_rules",
    /// Receive buffers that are too small for a packet.
    RxBadChains = "rx_bad_chains",
    /// Dropped: the chain's descriptors are invalid.
    TxBadChains = "tx_bad_chains",
    /// Dropped: packets with wrong context IDs, or too short.
    TxBadPackets = "tx_bad_packets",
    /// Queues stopped because their rings are invalid.
    BrokenRings = "broken_rings",
}

impl VsockCounter {
    /// True for a counter of data or connections that were dropped, refused or abandoned.
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
