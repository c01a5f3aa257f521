//! The segments of an uncut frame: TCP (`virtio 1.4 §5.1.6.2`, GSO) and UDP (USO).

use virtio_bindings::virtio_net::{
    VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4,
};

use super::checksum::Sum;
use super::malformed::Malformed;
use super::packet::{IPV6_HEADER, Packet, Transport, Version};
use crate::frames::net_protocol::header::{
    CSUM_OFFSET, CSUM_START, GSO_SIZE, GSO_TYPE, HEADER, MAX_PACKETS, field, needs_checksum,
};

/// The most segments of a frame. This many take less than 200 us.
pub(super) const MAX_SEGMENTS: usize = MAX_PACKETS as usize;

/// Offsets in an IPv4 header.
const IPV4_LEN: usize = 2;
const IPV4_ID: usize = 4;
const IPV4_CHECKSUM: usize = 10;
const IPV4_ADDRESSES: usize = 12;
/// Offsets in an IPv6 header.
const IPV6_LEN: usize = 4;
const IPV6_ADDRESSES: usize = 8;
/// Offsets in a TCP header.
const TCP_SEQUENCE: usize = 4;
const TCP_FLAGS: usize = 13;
const TCP_CHECKSUM: usize = 16;
/// Offsets in a UDP header.
const UDP_LEN: usize = 4;
const UDP_CHECKSUM: usize = 6;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// The segments of a frame, one after the other. Each is a whole frame, with a checksum and without a virtio header,
/// which would be zero.
#[derive(Debug, Clone)]
pub(crate) struct Segments<'f> {
    packet: Packet,
    /// The frame's headers.
    headers: &'f [u8],
    /// The remaining data.
    data: &'f [u8],
    /// Data of a segment, in bytes.
    size: usize,
    /// The number of segments so far.
    done: usize,
    count: usize,
}

impl<'f> Segments<'f> {
    /// The segments of a frame with this virtio header.
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    pub(crate) fn new(header: &[u8; HEADER], frame: &'f [u8]) -> Result<Self, Malformed> {
        let packet = Packet::of(frame)?;
        let kind = match u32::from(header[GSO_TYPE]) & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_TCPV4 => (Some(Version::V4), Transport::Tcp),
            VIRTIO_NET_HDR_GSO_TCPV6 => (Some(Version::V6), Transport::Tcp),
            VIRTIO_NET_HDR_GSO_UDP_L4 => (None, Transport::Udp),
            _ => return Err(Malformed::Kind),
        };
        if (kind.0.is_some_and(|version| version != packet.version)) || kind.1 != packet.transport {
            return Err(Malformed::Kind);
        }
        let (start, offset) = (field(header, CSUM_START), field(header, CSUM_OFFSET));
        let expected = (packet.l4, checksum_at(packet.transport));
        if needs_checksum(header) && (usize::from(start), usize::from(offset)) != expected {
            return Err(Malformed::Checksum);
        }
        let size = usize::from(field(header, GSO_SIZE));
        if size == 0 {
            return Err(Malformed::Kind);
        }
        let (headers, data) = frame.split_at(packet.data);
        if packet.data - packet.ip + size.min(data.len()) > usize::from(u16::MAX) {
            return Err(Malformed::Headers);
        }
        let count = data.len().div_ceil(size).max(1);
        if count > MAX_SEGMENTS {
            return Err(Malformed::TooMany);
        }
        Ok(Self { packet, headers, data, size, done: 0, count })
    }

    /// The number of remaining segments.
    pub(crate) const fn left(&self) -> usize {
        self.count - self.done
    }

    /// The bytes of all remaining segments.
    #[cfg(test)]
    pub(crate) const fn bytes_left(&self) -> usize {
        self.left() * self.headers.len() + self.data.len()
    }

    /// Writes the next to the beginning of `buffer`, which has room for the whole frame, and returns its length. `None`
    /// after the last, or if there is no room.
    pub(crate) fn next_into(&mut self, buffer: &mut [u8]) -> Option<usize> {
        if self.done == self.count {
            return None;
        }
        let (data, rest) = self.data.split_at(self.size.min(self.data.len()));
        let headers = self.headers.len();
        let segment = buffer.get_mut(..headers + data.len())?;
        segment[..headers].copy_from_slice(self.headers);
        segment[headers..].copy_from_slice(data);
        let number = self.done;
        self.data = rest;
        self.done += 1;
        self.write_headers(segment, number)?;
        Some(segment.len())
    }

    /// Converts the frame's headers at the beginning of `segment` to those of its segment `number`.
    fn write_headers(&self, segment: &mut [u8], number: usize) -> Option<()> {
        let Packet { version, transport, ip, l4, .. } = self.packet;
        let (ip_header, l4_packet) = segment.get_mut(ip..)?.split_at_mut_checked(l4 - ip)?;
        let ip_len = ip_header.len() + l4_packet.len();
        let addresses = match version {
            Version::V4 => {
                let id = u16::from_be_bytes([*ip_header.get(IPV4_ID)?, *ip_header.get(IPV4_ID + 1)?]);
                put(ip_header, IPV4_LEN, ip_len as u16)?;
                put(ip_header, IPV4_ID, id.wrapping_add(number as u16))?;
                put(ip_header, IPV4_CHECKSUM, 0)?;
                let checksum = Sum::default().and(ip_header).checksum();
                put(ip_header, IPV4_CHECKSUM, checksum)?;
                ip_header.get(IPV4_ADDRESSES..IPV4_ADDRESSES + 8)?
            }
            Version::V6 => {
                put(ip_header, IPV6_LEN, (ip_len - IPV6_HEADER) as u16)?;
                ip_header.get(IPV6_ADDRESSES..IPV6_ADDRESSES + 32)?
            }
        };
        let pseudo =
            Sum::default().and(addresses).and_number(l4_packet.len() as u32).and_number(transport.number().into());
        match transport {
            Transport::Tcp => self.write_tcp(l4_packet, number)?,
            Transport::Udp => put(l4_packet, UDP_LEN, l4_packet.len() as u16)?,
        }
        let at = checksum_at(transport);
        put(l4_packet, at, 0)?;
        let sum = pseudo.and(l4_packet).checksum_not_zero();
        put(l4_packet, at, sum)
    }

    fn write_tcp(&self, tcp: &mut [u8], number: usize) -> Option<()> {
        let sequence: &mut [u8; 4] = tcp.get_mut(TCP_SEQUENCE..)?.first_chunk_mut()?;
        let offset = (number * self.size) as u32;
        *sequence = u32::from_be_bytes(*sequence).wrapping_add(offset).to_be_bytes();
        let flags = tcp.get_mut(TCP_FLAGS)?;
        if self.done < self.count {
            *flags &= !(FIN | PSH);
        }
        if number > 0 {
            *flags &= !CWR;
        }
        Some(())
    }
}

/// The offset of the checksum in a protocol's header.
const fn checksum_at(transport: Transport) -> usize {
    match transport {
        Transport::Tcp => TCP_CHECKSUM,
        Transport::Udp => UDP_CHECKSUM,
    }
}

/// Writes a number to `at` of a header.
fn put(header: &mut [u8], at: usize, value: u16) -> Option<()> {
    *header.get_mut(at..)?.first_chunk_mut()? = value.to_be_bytes();
    Some(())
}
