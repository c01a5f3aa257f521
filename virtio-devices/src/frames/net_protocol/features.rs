//! Feature bits (`virtio 1.4 §5.1.3`, §6): the bits offered, and the offloads of negotiated bits.

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::*;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::offloads::Offloads;
use crate::FeatureRequirement;
use crate::transport::features::has;

/// Features that every NIC offers. Commands for the receive filter always come with the control queue.
const ALWAYS: &[u32] = &[
    VIRTIO_F_VERSION_1,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_STATUS,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA,
    VIRTIO_NET_F_CTRL_VLAN,
    VIRTIO_NET_F_CTRL_MAC_ADDR,
    VIRTIO_NET_F_GUEST_ANNOUNCE,
    VIRTIO_NET_F_SPEED_DUPLEX,
];

/// Features that require others (`virtio 1.4 §5.1.3.1`). Enforced are those that are useless without the control queue,
/// since a backend that runs the queues may otherwise refuse them. Requirements among offloads are not: some drivers
/// accept segments without checksums, and that works.
pub(crate) const REQUIREMENTS: &[FeatureRequirement] = &[
    requirement(VIRTIO_NET_F_CTRL_RX, &[VIRTIO_NET_F_CTRL_VQ], true, "CTRL_RX needs CTRL_VQ"),
    requirement(VIRTIO_NET_F_CTRL_VLAN, &[VIRTIO_NET_F_CTRL_VQ], true, "CTRL_VLAN needs CTRL_VQ"),
    requirement(VIRTIO_NET_F_MQ, &[VIRTIO_NET_F_CTRL_VQ], true, "MQ needs CTRL_VQ"),
    requirement(VIRTIO_NET_F_CTRL_MAC_ADDR, &[VIRTIO_NET_F_CTRL_VQ], true, "CTRL_MAC_ADDR needs CTRL_VQ"),
    requirement(VIRTIO_NET_F_GUEST_ANNOUNCE, &[VIRTIO_NET_F_CTRL_VQ], true, "GUEST_ANNOUNCE needs CTRL_VQ"),
    requirement(VIRTIO_NET_F_GUEST_TSO4, &[VIRTIO_NET_F_GUEST_CSUM], false, "GUEST_TSO4 needs GUEST_CSUM"),
    requirement(VIRTIO_NET_F_GUEST_TSO6, &[VIRTIO_NET_F_GUEST_CSUM], false, "GUEST_TSO6 needs GUEST_CSUM"),
    requirement(VIRTIO_NET_F_GUEST_UFO, &[VIRTIO_NET_F_GUEST_CSUM], false, "GUEST_UFO needs GUEST_CSUM"),
    requirement(VIRTIO_NET_F_GUEST_USO4, &[VIRTIO_NET_F_GUEST_CSUM], false, "GUEST_USO4 needs GUEST_CSUM"),
    requirement(VIRTIO_NET_F_GUEST_USO6, &[VIRTIO_NET_F_GUEST_CSUM], false, "GUEST_USO6 needs GUEST_CSUM"),
    requirement(
        VIRTIO_NET_F_GUEST_ECN,
        &[VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6],
        false,
        "GUEST_ECN needs GUEST_TSO4 or GUEST_TSO6",
    ),
    requirement(VIRTIO_NET_F_HOST_TSO4, &[VIRTIO_NET_F_CSUM], false, "HOST_TSO4 needs CSUM"),
    requirement(VIRTIO_NET_F_HOST_TSO6, &[VIRTIO_NET_F_CSUM], false, "HOST_TSO6 needs CSUM"),
    requirement(VIRTIO_NET_F_HOST_UFO, &[VIRTIO_NET_F_CSUM], false, "HOST_UFO needs CSUM"),
    requirement(VIRTIO_NET_F_HOST_USO, &[VIRTIO_NET_F_CSUM], false, "HOST_USO needs CSUM"),
    requirement(
        VIRTIO_NET_F_HOST_ECN,
        &[VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6],
        false,
        "HOST_ECN needs HOST_TSO4 or HOST_TSO6",
    ),
];

const fn requirement(feature: u32, any_of: &[u32], enforced: bool, text: &'static str) -> FeatureRequirement {
    let (mut bits, mut n) = (0, 0);
    while n < any_of.len() {
        bits |= 1 << any_of[n];
        n += 1;
    }
    FeatureRequirement { feature, any_of: bits, enforced, text }
}

/// For each offload: the feature that lets the device send such frames to the driver, the feature for the other
/// direction, and the backend's flag (`virtio 1.4 §5.1.6.5.6.1` uses the same bits).
const OFFLOADS: &[(u32, u32, Offloads)] = &[
    (VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_CSUM, Offloads::CHECKSUM),
    (VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_TSO4, Offloads::TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO6, Offloads::TSO6),
    (VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_HOST_ECN, Offloads::ECN),
    (VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_HOST_UFO, Offloads::UFO),
    (VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_HOST_USO, Offloads::USO4),
    (VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_USO, Offloads::USO6),
];

/// Returns the bits that a NIC with these offloads offers. `mtu` is true if its MTU is known, and `multi_queue` if it
/// has several pairs.
pub(crate) fn offered(offloads: Offloads, mtu: bool, multi_queue: bool) -> u64 {
    let always = bits(ALWAYS);
    always | offload_features(offloads) | u64::from(mtu) << VIRTIO_NET_F_MTU | u64::from(multi_queue) << VIRTIO_NET_F_MQ
}

/// The bits about rings and frames, which the backend must support if it runs the queues.
const DATA: &[u32] =
    &[VIRTIO_F_VERSION_1, VIRTIO_RING_F_INDIRECT_DESC, VIRTIO_RING_F_EVENT_IDX, VIRTIO_NET_F_MRG_RXBUF];
/// The commands of the control queue, except those about offloads and pairs.
const COMMANDS: &[u32] = &[
    VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA,
    VIRTIO_NET_F_CTRL_VLAN,
    VIRTIO_NET_F_CTRL_MAC_ADDR,
    VIRTIO_NET_F_GUEST_ANNOUNCE,
];

/// As [`offered`], over a backend that runs the queues and supports `able`.
pub(crate) fn offered_by(able: u64, offloads: Offloads, mtu: bool, multi_queue: bool) -> u64 {
    let data = bits(DATA);
    let wanted_offloads = offload_features(offloads) & !(1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
    // The backend may lack a feature that a segmentation feature requires (`virtio 1.4 §5.1.3.1`).
    let mut taken = able & (data | wanted_offloads);
    if !has(taken, VIRTIO_NET_F_CSUM) {
        taken &= !(1 << VIRTIO_NET_F_HOST_TSO4 | 1 << VIRTIO_NET_F_HOST_TSO6 | 1 << VIRTIO_NET_F_HOST_ECN);
        taken &= !(1 << VIRTIO_NET_F_HOST_UFO | 1 << VIRTIO_NET_F_HOST_USO);
    }
    if !has(taken, VIRTIO_NET_F_GUEST_CSUM) {
        taken &= !(guest_offload_bits() & !(1 << VIRTIO_NET_F_GUEST_CSUM));
    }
    let wanted = bits(COMMANDS) | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS | u64::from(multi_queue) << VIRTIO_NET_F_MQ;
    let mut commands = if has(able, VIRTIO_NET_F_CTRL_VQ) { able & wanted } else { 0 };
    if taken & guest_offload_bits() == 0 {
        commands &= !(1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS);
    }
    let control = u64::from(commands != 0) << VIRTIO_NET_F_CTRL_VQ;
    let own = bits(&[VIRTIO_NET_F_MAC, VIRTIO_NET_F_STATUS, VIRTIO_NET_F_SPEED_DUPLEX]);
    taken | commands | control | own | u64::from(mtu) << VIRTIO_NET_F_MTU
}

/// Returns the bits that stand for `offloads`, in both directions, and for the command that switches them.
pub(crate) fn offload_features(offloads: Offloads) -> u64 {
    let taken = OFFLOADS.iter().filter(|(_, _, offload)| offloads.contains(*offload));
    taken.fold(0, |bits, (guest, host, _)| bits | 1 << guest | 1 << host | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS)
}

/// Features that a NIC implements itself for a backend that passes all frames: commands for the receive filter, which
/// is best effort (`virtio 1.4 §5.1.6.5.1`), for the address and its announcement, and for the number of pairs.
pub(crate) fn served_for_any() -> u64 {
    bits(COMMANDS) | bits(&[VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ])
}

fn bits(bits: &[u32]) -> u64 {
    bits.iter().fold(0, |features, bit| features | 1 << bit)
}

/// Returns the offloaded frames that a driver with these features accepts.
pub(crate) fn guest_offloads(features: u64) -> Offloads {
    OFFLOADS
        .iter()
        .filter(|(guest, _, _)| has(features, *guest))
        .fold(Offloads::empty(), |offloads, (_, _, offload)| offloads | *offload)
}

/// Returns the bits of the offloaded frames that a driver accepts: the inverse of [`guest_offloads`].
pub(crate) fn guest_offload_features(offloads: Offloads) -> u64 {
    let taken = OFFLOADS.iter().filter(|(_, _, offload)| offloads.contains(*offload));
    taken.fold(0, |bits, (guest, _, _)| bits | 1 << guest)
}

/// Returns the bits of the driver's offloads, which it may change by `VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET`.
pub(crate) fn guest_offload_bits() -> u64 {
    OFFLOADS.iter().fold(0, |bits, (guest, _, _)| bits | 1 << guest)
}

/// Returns `features` without the segments that the driver receives.
pub(crate) fn without_received_segments(features: u64) -> u64 {
    let rest = features & !(guest_offload_bits() & !(1 << VIRTIO_NET_F_GUEST_CSUM));
    if has(rest, VIRTIO_NET_F_GUEST_CSUM) { rest } else { rest & !(1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_received_segments_tx_segments_and_checksums_remain() {
        let features = without_received_segments(offered(Offloads::all(), true, true));
        assert_eq!(guest_offloads(features), Offloads::CHECKSUM);
        assert!(has(features, VIRTIO_NET_F_HOST_TSO4) && has(features, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS));
        let features = without_received_segments(offered(Offloads::TSO4, true, true));
        assert!(!has(features, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) && has(features, VIRTIO_NET_F_HOST_TSO4));
    }

    #[test]
    fn without_offloads_no_checksum_or_segment_feature_is_offered() {
        let features = offered(Offloads::empty(), false, false);
        let none = guest_offload_bits() | 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
        assert_eq!(features & none, 0);
        assert!(!has(features, VIRTIO_NET_F_MTU) && !has(features, VIRTIO_NET_F_MQ));
        assert!(has(features, VIRTIO_F_VERSION_1) && has(features, VIRTIO_NET_F_CTRL_MAC_ADDR));
    }

    #[test]
    fn offloads_are_offered_both_ways_and_read_back_from_features() {
        let features = offered(Offloads::CHECKSUM | Offloads::TSO4, true, true);
        for bit in [VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_GUEST_TSO4] {
            assert!(has(features, bit), "{bit}");
        }
        assert!(!has(features, VIRTIO_NET_F_HOST_TSO6) && !has(features, VIRTIO_NET_F_HOST_USO));
        assert!(has(features, VIRTIO_NET_F_MTU) && has(features, VIRTIO_NET_F_MQ));
        assert_eq!(guest_offloads(features), Offloads::CHECKSUM | Offloads::TSO4);
        assert_eq!(guest_offloads(offered(Offloads::all(), true, true)), Offloads::all());
        assert_eq!(guest_offload_features(guest_offloads(features)), features & guest_offload_bits());
        assert_eq!(guest_offload_features(Offloads::all()), guest_offload_bits());
    }
}
