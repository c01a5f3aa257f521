//! The counters of a NIC: frames, and dropped frames by reason.

use crate::device::counters::counters;

counters! {
    /// A counter. Directions are the guest's: frames that it receives are `Rx`.
    pub enum Counter;
    /// The counters of one NIC since it was plugged in.
    pub struct NetCounters;

    /// Frames that the driver received.
    RxFrames = "rx_frames",
    /// Their bytes, without the virtio header.
    RxBytes = "rx_bytes",
    /// Frames that the backend took.
    TxFrames = "tx_frames",
    /// Their bytes, without the virtio header.
    TxBytes = "tx_bytes",
    /// Wake-ups by the driver's doorbells.
    Kicks = "kicks",
    /// Interrupts that were signalled.
    Interrupts = "interrupts",
    /// Waits of a receive queue, because a rate limit was reached.
    RxRateWaits = "rx_rate_waits",
    /// Waits of a transmit queue with frames in it, because a rate limit was reached.
    TxRateWaits = "tx_rate_waits",
    /// Control commands that were carried out.
    ControlCommands = "control_commands",
    /// Control commands that were refused or malformed.
    ControlRefused = "control_refused",
    /// Queues that were given up because their rings are invalid.
    BrokenRings = "broken_rings",
    /// Receive buffers that no frame can be written to.
    RxBadChains = "rx_bad_chains",
    /// Dropped: the driver's receive filter does not accept it.
    RxFiltered = "rx_filtered",
    /// Dropped: longer than the buffers that the driver provides.
    RxTooLong = "rx_too_long",
    /// Dropped: not an Ethernet frame.
    RxTooShort = "rx_too_short",
    /// Dropped: it arrived before the driver was ready.
    RxStale = "rx_stale",
    /// Dropped: it was waiting for buffers when the queue stopped or the policy changed.
    RxStopped = "rx_stopped",
    /// Dropped: the link is down.
    RxLinkDown = "rx_link_down",
    /// Dropped: the backend could not deliver it, or was lost.
    RxBackendErrors = "rx_backend_errors",
    /// Dropped: the chain's descriptors are invalid.
    TxBadChains = "tx_bad_chains",
    /// Dropped: the header uses features that were not negotiated, or contradicts the frame.
    TxBadHeaders = "tx_bad_headers",
    /// Dropped: longer than any frame may be.
    TxTooLong = "tx_too_long",
    /// Dropped: not an Ethernet frame.
    TxTooShort = "tx_too_short",
    /// Dropped: the backend's buffer is full.
    TxBackendFull = "tx_backend_full",
    /// Dropped: the backend refuses the frame as invalid.
    TxBackendRefused = "tx_backend_refused",
    /// Dropped: the backend failed, or is down.
    TxBackendErrors = "tx_backend_errors",
    /// Dropped: the link is down.
    TxLinkDown = "tx_link_down",
    /// Dropped: its source is not an address of the function.
    TxSpoofedMac = "tx_spoofed_mac",
    /// Dropped: its VLAN tags are not what the function may send.
    TxBadVlan = "tx_bad_vlan",
    /// Dropped: it is for a group that bridges keep for themselves.
    TxReservedGroup = "tx_reserved_group",
    /// Dropped: more frames to groups than the function may send.
    StormDropped = "storm_dropped",
    /// Dropped: not in a VLAN that the function may receive.
    RxVlanFiltered = "rx_vlan_filtered",
    /// Dropped by a switch: it is for the function that sent it.
    TxOwnAddress = "tx_own_address",
    /// Dropped by a switch: it is for a function that its sender may not reach, because one of the two is isolated.
    TxIsolated = "tx_isolated",
    /// Frames that a switch sent to all ports that may have their address, because none is known to have it.
    TxFlooded = "tx_flooded",
    /// Dropped by a switch without an uplink: it is for an address that no port has.
    TxUnknown = "tx_unknown",
    /// Dropped by a switch, from its uplink: it is for an address that no port has.
    RxUnknown = "rx_unknown",
    /// Dropped by a switch: the driver has provided no buffers for it.
    RxNoBuffers = "rx_no_buffers",
    /// Dropped by a switch at once: the driver has provided no buffers for a while.
    RxCongested = "rx_congested",
    /// Dropped by a switch: a rate limit was reached.
    RxRateDropped = "rx_rate_dropped",
    /// Frames that a switch cut into segments, because the driver accepts none as long.
    SwSegmented = "sw_segmented",
    /// Frames whose checksum a switch computed, because the driver accepts none without.
    SwChecksummed = "sw_checksummed",
    /// Dropped by a switch: a segment or a checksum that the driver does not accept, and that cannot be converted.
    RxBadOffloads = "rx_bad_offloads",
    /// Copies of other ports' frames that a switch could not deliver.
    MirrorDropped = "mirror_dropped",
    /// Addresses of the function that a switch found in use by another.
    MacConflicts = "mac_conflicts",
}

impl NetCounters {
    /// Adds to a counter that is too rare for a worker's own counts, or has no worker.
    pub(crate) fn add(&self, counter: Counter, amount: u64) {
        self.0[counter as usize].fetch_add(amount, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Counter {
    /// True if it counts frames that the driver wanted and that were lost or refused.
    fn is_loss(self) -> bool {
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
