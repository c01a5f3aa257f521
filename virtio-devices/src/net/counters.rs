//! The counters of a NIC: frames, and dropped frames by reason.

use crate::device::counters::counters;

counters! {
    /// A counter. Directions are the guest's: frames that it receives are `Rx`.
    pub enum Counter;
    /// The counters of one NIC since it was plugged in.
    pub struct NetCounters;

    /// Frames that the driver received.
    RxFrames: frames = "rx_frames",
    /// Bytes of the frames that the driver received, without the virtio header.
    RxBytes: bytes = "rx_bytes",
    /// Frames of the driver that the backend accepted.
    TxFrames: frames = "tx_frames",
    /// Bytes of the frames that the backend accepted, without the virtio header.
    TxBytes: bytes = "tx_bytes",
    /// Wake-ups of a worker by a doorbell of the driver.
    Kicks: doorbells = "kicks",
    /// Times that the device signalled the driver, also without a vector, masked, or lost on demand.
    Interrupts: interrupts = "interrupts",
    /// Times that a receive queue waited because a rate limit was reached; no frame is dropped.
    RxRateWaits: times = "rx_rate_waits",
    /// Times that a transmit queue waited with frames in it because a rate limit was reached; no frame is dropped.
    TxRateWaits: times = "tx_rate_waits",
    /// Commands of the control queue that succeeded: receive modes, address filters, VLANs, queue pairs.
    ControlCommands: commands = "control_commands",
    /// Commands of the control queue that were malformed, or that the policy does not allow, such as a new MAC address.
    ControlRefused: commands = "control_refused",
    /// Queues stopped because their rings are invalid: a fault of the driver, which has to reset the device.
    BrokenRings: queues = "broken_rings",
    /// Receive buffers of the driver to which no frame can be written.
    RxBadChains: buffers = "rx_bad_chains",
    /// Frames for other addresses, dropped by the receive filter of the driver; normal on every network.
    RxFiltered: frames = "rx_filtered",
    /// Frames dropped because they are longer than the buffers of the driver.
    RxTooLong: frames = "rx_too_long",
    /// Frames dropped because they are too short to have an Ethernet header.
    RxTooShort: frames = "rx_too_short",
    /// Frames that arrived before the driver was ready; normal for a function without a driver.
    RxStale: frames = "rx_stale",
    /// Frames dropped because they waited for buffers when the queue stopped or the policy changed.
    RxStopped: frames = "rx_stopped",
    /// Frames to the guest dropped because the link of the function is down.
    RxLinkDown: frames = "rx_link_down",
    /// Frames to the guest dropped because the backend could not deliver them, or was lost.
    RxBackendErrors: frames = "rx_backend_errors",
    /// Frames of the guest dropped because the descriptors of the chain are invalid.
    TxBadChains: frames = "tx_bad_chains",
    /// Frames of the guest dropped because their virtio header uses features that were not negotiated, or contradicts
    /// the frame.
    TxBadHeaders: frames = "tx_bad_headers",
    /// Frames of the guest dropped because they are longer than any frame may be.
    TxTooLong: frames = "tx_too_long",
    /// Frames of the guest dropped because they are too short to have an Ethernet header.
    TxTooShort: frames = "tx_too_short",
    /// Frames of the guest dropped because the buffer of the backend is full.
    TxBackendFull: frames = "tx_backend_full",
    /// Frames of the guest dropped because the backend refused them as invalid.
    TxBackendRefused: frames = "tx_backend_refused",
    /// Frames of the guest dropped because the backend failed, or its tap is down or deleted.
    TxBackendErrors: frames = "tx_backend_errors",
    /// Frames of the guest dropped because the link of the function is down.
    TxLinkDown: frames = "tx_link_down",
    /// Frames of the guest dropped by the spoof check: their source is not an address of the function.
    TxSpoofedMac: frames = "tx_spoofed_mac",
    /// Frames of the guest dropped because their VLAN tags are not what the function may send.
    TxBadVlan: frames = "tx_bad_vlan",
    /// Frames to a group that bridges keep for themselves, dropped because the guest is not trusted.
    TxReservedGroup: frames = "tx_reserved_group",
    /// Frames to broadcast and multicast addresses dropped above the limit of `storm=`.
    StormDropped: frames = "storm_dropped",
    /// Frames to the guest dropped because their VLAN is not one of the function; compare the VLANs of both sides.
    RxVlanFiltered: frames = "rx_vlan_filtered",
    /// Frames dropped by a switch because they are for the function that sent them.
    TxOwnAddress: frames = "tx_own_address",
    /// Frames dropped by a switch because the sender or the receiver is isolated.
    TxIsolated: frames = "tx_isolated",
    /// Frames that a switch sent to all ports that may have their address, because none is known to have it.
    TxFlooded: frames = "tx_flooded",
    /// Frames dropped by a switch without an uplink because no port has their address.
    TxUnknown: frames = "tx_unknown",
    /// Frames from the uplink dropped by a switch because no port has their address.
    RxUnknown: frames = "rx_unknown",
    /// Frames dropped by a switch because the driver of the receiver has provided no buffers.
    RxNoBuffers: frames = "rx_no_buffers",
    /// Frames dropped by a switch at once because the driver of the receiver has provided no buffers for a while.
    RxCongested: frames = "rx_congested",
    /// Frames dropped by a switch because a rate limit of the receiver was reached.
    RxRateDropped: frames = "rx_rate_dropped",
    /// Frames that a switch cut into segments because the receiver accepts no frames of that length.
    SwSegmented: frames = "sw_segmented",
    /// Frames whose checksum a switch computed because the receiver accepts no frames without one.
    SwChecksummed: frames = "sw_checksummed",
    /// Frames dropped by a switch because the receiver does not accept their offloads, and they cannot be converted.
    RxBadOffloads: frames = "rx_bad_offloads",
    /// Frames dropped by a rule of the guest for received frames (`ethtool -N`, `tc`) on an emulated X550.
    FlowDropped: frames = "flow_dropped",
    /// Copies of frames of other ports that a switch could not deliver.
    MirrorDropped: frames = "mirror_dropped",
    /// Times that a switch found an address of the function in use by another function.
    MacConflicts: times = "mac_conflicts",
}

impl NetCounters {
    /// Adds to a counter that is too rare for a worker's own counts, or has no worker.
    pub(crate) fn add(&self, counter: Counter, amount: u64) {
        self.0[counter as usize].fetch_add(amount, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Counter {
    /// True if it counts frames that the driver wanted and that were lost or refused.
    const fn is_loss(self) -> bool {
        match self {
            Self::RxFrames | Self::RxBytes | Self::TxFrames | Self::TxBytes => false,
            Self::Kicks | Self::Interrupts | Self::ControlCommands => false,
            Self::RxRateWaits | Self::TxRateWaits => false,
            // Every network has frames for others, and does not wait for a driver.
            Self::RxFiltered | Self::RxStale | Self::RxVlanFiltered | Self::RxUnknown => false,
            Self::TxFlooded | Self::SwSegmented | Self::SwChecksummed => false,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::counters::Losses;

    #[test]
    fn losses_are_logged_by_name_and_at_reset_only_once_doubled() {
        let (counters, mut losses) = (NetCounters::new(), Losses::default());
        let add = |counter, amount| {
            let mut tally = Tally::new();
            tally.add(counter, amount);
            tally.flush(&counters);
        };
        for harmless in [Counter::TxFrames, Counter::Kicks, Counter::RxFiltered, Counter::RxStale] {
            add(harmless, 7);
        }
        assert_eq!((losses.doubled(&counters.losses()), losses.untold(&counters.losses())), (None, None));
        add(Counter::TxTooLong, 2);
        add(Counter::BrokenRings, 1);
        assert_eq!(losses.doubled(&counters.losses()).as_deref(), Some("broken_rings=1 tx_too_long=2"));
        assert_eq!((losses.doubled(&counters.losses()), losses.untold(&counters.losses())), (None, None));
        add(Counter::TxTooLong, 2);
        assert_eq!(losses.doubled(&counters.losses()), None);
        add(Counter::TxTooLong, 1);
        assert_eq!(losses.doubled(&counters.losses()).as_deref(), Some("broken_rings=1 tx_too_long=5"));
        add(Counter::RxTooLong, 1);
        assert_eq!(losses.untold(&counters.losses()).as_deref(), Some("broken_rings=1 rx_too_long=1 tx_too_long=5"));
    }

    #[test]
    fn names_are_distinct_and_a_flush_moves_counts_once() {
        let names: std::collections::HashSet<_> = Counter::ALL.iter().map(|counter| counter.name()).collect();
        assert_eq!(names.len(), Counter::COUNT);
        let (counters, mut tally) = (NetCounters::new(), Tally::new());
        tally.add(Counter::TxBytes, 60);
        tally.count(Counter::TxFrames);
        tally.flush(&counters);
        tally.flush(&counters);
        assert_eq!((counters.get(Counter::TxBytes), counters.get(Counter::TxFrames)), (60, 1));
        assert_eq!(counters.get(Counter::RxFrames), 0);
    }
}
