//! The header that precedes each frame, `struct virtio_net_hdr` (`virtio 1.4 §5.1.6`).

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO,
    VIRTIO_NET_F_HOST_USO, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP, VIRTIO_NET_HDR_GSO_UDP_L4,
};

use super::ethernet::ETHERNET_HEADER;
use crate::transport::features::has;

/// The header's length, with `num_buffers`, which a device of version 1 always includes.
pub(crate) const HEADER: usize = 12;
/// The offset of `flags`.
pub(crate) const FLAGS: usize = 0;
/// The offset of `gso_type`.
pub(crate) const GSO_TYPE: usize = 1;
/// The offset of `hdr_len`.
pub(crate) const HDR_LEN: usize = 2;
/// The offset of `gso_size`.
pub(crate) const GSO_SIZE: usize = 4;
/// The offset of `csum_start`.
pub(crate) const CSUM_START: usize = 6;
/// The offset of `csum_offset`.
pub(crate) const CSUM_OFFSET: usize = 8;
/// The offset of `num_buffers`.
pub(crate) const NUM_BUFFERS: usize = 10;

/// The maximum number of packets from one frame of a switch, or of a NIC whose packets are limited. 64 KiB in packets
/// of 128 bytes are fewer; smaller segments only serve to slow down other guests.
pub(crate) const MAX_PACKETS: u32 = 512;

/// A header from the driver uses a feature that was not negotiated, or contradicts its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadHeader;

/// The field of two bytes at `offset`.
pub(crate) fn field(header: &[u8; HEADER], offset: usize) -> u16 {
    u16::from_le_bytes([header[offset], header[offset + 1]])
}

/// True if the frame's checksum has yet to be computed.
pub(crate) fn needs_checksum(header: &[u8; HEADER]) -> bool {
    header[FLAGS] & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8 != 0
}

/// Checks the header of a frame of `frame_len` bytes that the driver sends, and returns it as the backend may see it:
/// without the flags that only a device sets, and without a number of buffers.
pub(crate) fn check(mut header: [u8; HEADER], frame_len: usize, features: u64) -> Result<[u8; HEADER], BadHeader> {
    let half = |offset: usize| usize::from(field(&header, offset));
    let (gso_type, gso_size) = (header[GSO_TYPE], half(GSO_SIZE));
    let (checksum_start, checksum_offset) = (half(CSUM_START), half(CSUM_OFFSET));

    if needs_checksum(&header)
        && (!has(features, VIRTIO_NET_F_CSUM) || checksum_start + checksum_offset + 2 > frame_len)
    {
        return Err(BadHeader);
    }
    let is_tcp = match u32::from(gso_type) & !VIRTIO_NET_HDR_GSO_ECN {
        VIRTIO_NET_HDR_GSO_NONE => false,
        VIRTIO_NET_HDR_GSO_TCPV4 if has(features, VIRTIO_NET_F_HOST_TSO4) => true,
        VIRTIO_NET_HDR_GSO_TCPV6 if has(features, VIRTIO_NET_F_HOST_TSO6) => true,
        VIRTIO_NET_HDR_GSO_UDP if has(features, VIRTIO_NET_F_HOST_UFO) => false,
        VIRTIO_NET_HDR_GSO_UDP_L4 if has(features, VIRTIO_NET_F_HOST_USO) => false,
        _ => return Err(BadHeader),
    };
    let ecn = u32::from(gso_type) & VIRTIO_NET_HDR_GSO_ECN != 0;
    if ecn && !(is_tcp && has(features, VIRTIO_NET_F_HOST_ECN)) {
        return Err(BadHeader);
    }
    if u32::from(gso_type) != VIRTIO_NET_HDR_GSO_NONE && gso_size == 0 {
        return Err(BadHeader);
    }
    header[FLAGS] &= VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
    header[NUM_BUFFERS..].fill(0);
    Ok(header)
}

/// The length of the shortest headers of a TCP packet, by the version of the Internet Protocol, and of a UDP packet.
const TCP4: usize = ETHERNET_HEADER + 20 + 20;
const TCP6: usize = ETHERNET_HEADER + 40 + 20;
const UDP: usize = ETHERNET_HEADER + 20 + 8;
/// The same of a fragment.
const FRAGMENT: usize = ETHERNET_HEADER + 20;

/// Returns the number of packets that the frame of `frame_len` bytes with this header becomes: 1, or its segments.
///
/// All headers count as the shortest possible, because the driver's `hdr_len` and frame are not trusted. So a segmented
/// frame with longer headers may count as one packet more than it becomes, never as fewer.
pub(crate) fn packets(header: &[u8; HEADER], frame_len: usize) -> u32 {
    let headers = match u32::from(header[GSO_TYPE]) & !VIRTIO_NET_HDR_GSO_ECN {
        VIRTIO_NET_HDR_GSO_NONE => return 1,
        VIRTIO_NET_HDR_GSO_TCPV4 => TCP4,
        VIRTIO_NET_HDR_GSO_TCPV6 => TCP6,
        VIRTIO_NET_HDR_GSO_UDP_L4 => UDP,
        _ => FRAGMENT,
    };
    let size = usize::from(field(header, GSO_SIZE)).max(1);
    u32::try_from(frame_len.saturating_sub(headers).div_ceil(size)).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TSO: u64 = 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_TSO4;

    fn header(flags: u8, gso_type: u8, gso_size: u8, start: u8, offset: u8) -> [u8; HEADER] {
        [flags, gso_type, 54, 0, gso_size, 0, start, 0, offset, 0, 7, 7]
    }

    #[test]
    fn a_plain_header_passes_without_the_devices_own_fields() {
        assert_eq!(check(header(0b110, 0, 0, 0, 0), 60, 0), Ok([0, 0, 54, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn a_checksum_must_be_negotiated_and_lie_in_the_frame() {
        assert_eq!(check(header(1, 0, 0, 34, 16), 60, 0), Err(BadHeader));
        assert!(check(header(1, 0, 0, 34, 16), 52, TSO).is_ok());
        assert_eq!(check(header(1, 0, 0, 34, 16), 51, TSO), Err(BadHeader));
        assert_eq!(check([1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0], 60, TSO), Err(BadHeader));
    }

    #[test]
    fn a_frame_counts_as_the_packets_that_it_becomes() {
        let gso = |gso_type: u32, size: u16| {
            let [low, high] = size.to_le_bytes();
            [1, gso_type as u8, 0, 0, low, high, 34, 0, 16, 0, 0, 0]
        };
        assert_eq!([60, 1514, 65_000].map(|len| packets(&gso(VIRTIO_NET_HDR_GSO_NONE, 300), len)), [1; 3]);
        let udp = |len| packets(&gso(VIRTIO_NET_HDR_GSO_UDP_L4, 300), len);
        assert_eq!([0, 42, 43, 42 + 300, 42 + 301, 42 + 60_000].map(udp), [1, 1, 1, 1, 2, 200]);
        for (kind, headers) in [(VIRTIO_NET_HDR_GSO_TCPV4, 54), (VIRTIO_NET_HDR_GSO_TCPV6, 74)] {
            for kind in [kind, kind | VIRTIO_NET_HDR_GSO_ECN] {
                assert_eq!([1, 10, 11].map(|n| packets(&gso(kind, 1448), headers + n * 1448)), [1, 10, 11]);
            }
        }
        assert_eq!(packets(&gso(VIRTIO_NET_HDR_GSO_UDP, 1480), 34 + 2 * 1480), 2);
        let lies = [[0xff; 2], [0; 2]].map(|[low, high]| {
            let [flags, kind, _, _, rest @ ..] = gso(VIRTIO_NET_HDR_GSO_TCPV4, 1);
            let mut header = [flags, kind, low, high, 0, 0, 0, 0, 0, 0, 0, 0];
            header[4..].copy_from_slice(&rest);
            packets(&header, 1054)
        });
        assert_eq!(lies, [1000; 2], "the length of headers is the driver's word");
        assert_eq!(packets(&gso(VIRTIO_NET_HDR_GSO_TCPV4, 0), 1054), 1000, "from a tap, a size may be anything");
    }

    #[test]
    fn segmentation_must_be_negotiated_by_kind_and_have_a_size() {
        assert!(check(header(1, 1, 100, 34, 16), 4000, TSO).is_ok());
        assert_eq!(check(header(1, 1, 0, 34, 16), 4000, TSO), Err(BadHeader));
        for gso_type in [2, 3, 4, 5, 6, 0x7f, 0x80, 0x81, 0xff] {
            assert_eq!(check(header(1, gso_type, 100, 34, 16), 4000, TSO), Err(BadHeader), "{gso_type:#x}");
        }
        assert!(check(header(1, 0x81, 100, 34, 16), 4000, TSO | 1 << VIRTIO_NET_F_HOST_ECN).is_ok());
        assert!(check(header(1, 5, 100, 34, 6), 4000, TSO | 1 << VIRTIO_NET_F_HOST_USO).is_ok());
    }
}
