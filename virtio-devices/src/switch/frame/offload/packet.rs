//! The headers of a frame: Ethernet, IPv4 (`RFC 791`) or IPv6 (`RFC 8200`), and TCP (`RFC 9293`) or UDP (`RFC 768`).

use super::malformed::Malformed;
use crate::frames::policy::TAGS;

/// The most tags of a frame: the guest's that a policy inspects, and that of a port VLAN.
const MAX_TAGS: usize = TAGS + 1;
/// The most extension headers of an IPv6 packet that are skipped.
const MAX_EXTENSIONS: usize = 8;
/// The most bytes of all headers together.
const MAX_HEADERS: usize = 512;

const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
pub(super) const IPV6_HEADER: usize = 40;
const TCP: u8 = 6;
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;

/// The version of the Internet Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V4,
    V6,
}

/// The transport protocol of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Tcp,
    Udp,
}

impl Transport {
    /// The protocol's number in IP headers.
    pub(super) const fn number(self) -> u8 {
        match self {
            Self::Tcp => TCP,
            Self::Udp => UDP,
        }
    }
}

/// The offsets of a frame's headers. All of them are in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet {
    pub version: Version,
    pub transport: Transport,
    /// The offset of the IP header.
    pub ip: usize,
    /// The offset of the TCP or UDP header.
    pub l4: usize,
    /// The offset of the data.
    pub data: usize,
}

impl Packet {
    /// Parses the headers of `frame`.
    ///
    /// # Errors
    ///
    /// [`Malformed::Headers`] if it is not such a packet, or only a fragment of one.
    pub(super) fn of(frame: &[u8]) -> Result<Self, Malformed> {
        Self::find(frame).ok_or(Malformed::Headers)
    }

    fn find(frame: &[u8]) -> Option<Self> {
        let mut at = 12;
        for _ in 0..MAX_TAGS {
            if matches!(pair(frame, at)?, [0x81, 0x00] | [0x88, 0xa8]) {
                at += 4;
            }
        }
        let ip = at + 2;
        let (version, protocol, l4) = match pair(frame, at)? {
            IPV4 => {
                let (protocol, l4) = ipv4(frame, ip)?;
                (Version::V4, protocol, l4)
            }
            IPV6 => {
                let (protocol, l4) = ipv6(frame, ip)?;
                (Version::V6, protocol, l4)
            }
            _ => return None,
        };
        let (transport, len) = match protocol {
            TCP => (Transport::Tcp, tcp_header(frame, l4)?),
            UDP => (Transport::Udp, UDP_HEADER),
            _ => return None,
        };
        let data = l4 + len;
        (data <= frame.len().min(MAX_HEADERS)).then_some(Self { version, transport, ip, l4, data })
    }
}

/// The two bytes at `at`.
fn pair(bytes: &[u8], at: usize) -> Option<[u8; 2]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// The protocol of an IPv4 packet that is not a fragment, and the offset of its data.
fn ipv4(frame: &[u8], ip: usize) -> Option<(u8, usize)> {
    let header: &[u8; 20] = frame.get(ip..)?.first_chunk()?;
    let (version, len) = (header[0] >> 4, usize::from(header[0] & 0xf) * 4);
    // All of the offset, and the flag that more fragments follow.
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
    (version == 4 && len >= header.len() && fragment == 0).then_some((header[9], ip + len))
}

/// The protocol of an IPv6 packet that is not a fragment, and the offset of its data.
fn ipv6(frame: &[u8], ip: usize) -> Option<(u8, usize)> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const DESTINATION: u8 = 60;
    let header: &[u8; IPV6_HEADER] = frame.get(ip..)?.first_chunk()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let (mut protocol, mut at) = (header[6], ip + IPV6_HEADER);
    for _ in 0..MAX_EXTENSIONS {
        if !matches!(protocol, HOP_BY_HOP | ROUTING | DESTINATION) {
            break;
        }
        let [next, len, _, left]: [u8; 4] = *frame.get(at..)?.first_chunk()?;
        // The checksum of a packet with segments left covers its last destination, which is not in the IP header.
        if protocol == ROUTING && left != 0 {
            return None;
        }
        protocol = next;
        at += (usize::from(len) + 1) * 8;
    }
    Some((protocol, at))
}

/// The length of a TCP header.
fn tcp_header(frame: &[u8], l4: usize) -> Option<usize> {
    let header: &[u8; 20] = frame.get(l4..)?.first_chunk()?;
    let len = usize::from(header[12] >> 4) * 4;
    (len >= header.len()).then_some(len)
}
