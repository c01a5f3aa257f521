//! Counters of a socket device: bytes, connections, and the causes of their refusal or end.

use crate::device::counters::counters;

counters! {
    /// A counted event of a socket device. Directions are the guest's: `Rx` is what it receives.
    pub enum VsockCounter;
    /// The counters of one socket device since it was plugged in.
    pub struct VsockCounters;

    /// Bytes of payload that the driver received.
    RxBytes: bytes = "rx_bytes",
    /// Bytes of payload that the driver transmitted.
    TxBytes: bytes = "tx_bytes",
    /// Packets that the driver received.
    RxPackets: packets = "rx_packets",
    /// Packets that the driver transmitted.
    TxPackets: packets = "tx_packets",
    /// Connections that were established, by either side.
    Connections: connections = "connections",
    /// Wake-ups of a worker by a doorbell of the driver.
    Kicks: doorbells = "kicks",
    /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
    Interrupts: interrupts = "interrupts",
    /// Connections of clients on the host that were refused: there are too many, or no port was named.
    RefusedClients: connections = "refused_clients",
    /// Connections of the guest that were refused: there are too many, or no program listens on the host.
    RefusedGuests: connections = "refused_guests",
    /// Connections reset because the other side did not reply, or read the remaining data, in time.
    TimedOut: connections = "timed_out",
    /// Connections reset because the driver violated the protocol.
    BrokenRules: connections = "broken_rules",
    /// Receive buffers that are too small for a packet.
    RxBadChains: buffers = "rx_bad_chains",
    /// Packets dropped because the descriptors of the chain are invalid.
    TxBadChains: packets = "tx_bad_chains",
    /// Packets dropped because their context IDs are wrong, or because they are too short.
    TxBadPackets: packets = "tx_bad_packets",
    /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
    BrokenRings: queues = "broken_rings",
}

impl VsockCounter {
    /// True for a counter of data or connections that were dropped, refused or abandoned.
    pub(crate) const fn is_loss(self) -> bool {
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
