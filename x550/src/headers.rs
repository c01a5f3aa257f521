//! The headers of a frame that flow rules and RSS look at.

/// Type of a customer's VLAN tag.
const TAG: [u8; 2] = [0x81, 0x00];
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];

/// A transport protocol that the NIC knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// Another protocol, or a fragment.
    Other,
    Udp,
    Tcp,
    Sctp,
}

/// The addresses of a packet, source first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Addresses<'a> {
    V4(&'a [u8; 8]),
    V6(&'a [u8; 32]),
}

/// The headers of an IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Headers<'a> {
    /// The first type of the frame: that of a tag if it has one.
    pub(crate) kind: [u8; 2],
    /// The tag, or 0.
    pub(crate) tag: u16,
    pub(crate) addresses: Addresses<'a>,
    pub(crate) protocol: Protocol,
    /// The ports, source first; 0 if the protocol has none.
    pub(crate) ports: [u8; 4],
}

impl<'a> Headers<'a> {
    /// Parses the first bytes of a frame with at most one tag. `None` if it is not IP, or ends within a header.
    pub(crate) fn of(frame: &'a [u8]) -> Option<Self> {
        let (kind, mut rest) = frame.get(12..)?.split_first_chunk::<2>()?;
        let (mut inner, mut tag) = (kind, 0);
        if *kind == TAG {
            let (control, after) = rest.split_first_chunk::<2>()?;
            tag = u16::from_be_bytes(*control);
            (inner, rest) = after.split_first_chunk::<2>()?;
        }
        let (addresses, protocol, payload) = match *inner {
            IPV4 => ipv4(rest)?,
            IPV6 => ipv6(rest)?,
            _ => return None,
        };
        let ports = if protocol == Protocol::Other { [0; 4] } else { *payload.first_chunk()? };
        Some(Self { kind: *kind, tag, addresses, protocol, ports })
    }
}

fn protocol(number: u8) -> Protocol {
    match number {
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        132 => Protocol::Sctp,
        _ => Protocol::Other,
    }
}

/// Addresses, protocol and payload of an IPv4 packet. No fragment has a transport header for the NIC, the first one
/// neither.
fn ipv4(packet: &[u8]) -> Option<(Addresses<'_>, Protocol, &[u8])> {
    let header = packet.first_chunk::<20>()?;
    let [first, _, _, _, _, _, flags, offset, _, number, ..] = *header;
    let len = usize::from(first & 0xf) * 4;
    if first >> 4 != 4 || len < header.len() {
        return None;
    }
    let is_fragment = flags & 0x3f != 0 || offset != 0;
    let protocol = if is_fragment { Protocol::Other } else { protocol(number) };
    Some((Addresses::V4(header.last_chunk()?), protocol, packet.get(len..)?))
}

/// Addresses, protocol and payload of an IPv6 packet. Behind an extension header there is no protocol for the NIC.
fn ipv6(packet: &[u8]) -> Option<(Addresses<'_>, Protocol, &[u8])> {
    let (header, payload) = packet.split_first_chunk::<40>()?;
    let [first, _, _, _, _, _, number, ..] = *header;
    if first >> 4 != 6 {
        return None;
    }
    Some((Addresses::V6(header.last_chunk()?), protocol(number), payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kinds: &[&[u8]], packet: &[u8]) -> Vec<u8> {
        let kinds: Vec<u8> = kinds.concat();
        [&[2; 12][..], &kinds, packet].concat()
    }

    fn v4(first: u8, fragment: [u8; 2], number: u8) -> Vec<u8> {
        let mut packet = vec![0; usize::from(first & 0xf) * 4];
        packet.resize(packet.len().max(20), 0);
        packet[0] = first;
        packet[6..8].copy_from_slice(&fragment);
        packet[9] = number;
        packet[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        [&packet[..], &[0, 80, 1, 2]].concat()
    }

    #[test]
    fn a_packet_has_addresses_ports_and_a_protocol() {
        for (number, expected, ports) in [
            (6, Protocol::Tcp, [0, 80, 1, 2]),
            (17, Protocol::Udp, [0, 80, 1, 2]),
            (132, Protocol::Sctp, [0, 80, 1, 2]),
            (1, Protocol::Other, [0; 4]),
        ] {
            for first in [0x45, 0x46, 0x4f] {
                let bytes = frame(&[&IPV4], &v4(first, [0x40, 0], number));
                let headers = Headers::of(&bytes).unwrap();
                assert_eq!((headers.protocol, headers.ports, headers.tag), (expected, ports, 0));
                assert_eq!(headers.addresses, Addresses::V4(&[10, 0, 0, 1, 10, 0, 0, 2]));
            }
        }
        let mut packet = vec![0x60; 40];
        packet[6] = 17;
        let bytes = frame(&[&IPV6], &[&packet[..], &[1, 2, 3, 4]].concat());
        let headers = Headers::of(&bytes).unwrap();
        assert_eq!((headers.protocol, headers.ports), (Protocol::Udp, [1, 2, 3, 4]));
        assert!(matches!(headers.addresses, Addresses::V6([0x60, ..])));
    }

    #[test]
    fn a_fragment_has_no_ports() {
        for fragment in [[0x20, 0], [0, 1], [0x1f, 0xff]] {
            let bytes = frame(&[&IPV4], &v4(0x45, fragment, 6));
            let headers = Headers::of(&bytes).unwrap();
            assert_eq!((headers.protocol, headers.ports), (Protocol::Other, [0; 4]), "{fragment:?}");
        }
    }

    #[test]
    fn one_tag_is_skipped() {
        let bytes = frame(&[&TAG, &[0xe0, 7], &IPV4], &v4(0x45, [0, 0], 6));
        let headers = Headers::of(&bytes).unwrap();
        assert_eq!((headers.tag, headers.kind, headers.protocol), (0xe007, TAG, Protocol::Tcp));
        assert_eq!(Headers::of(&frame(&[&TAG, &[0, 7], &TAG, &[0, 8], &IPV4], &v4(0x45, [0, 0], 6))), None);
    }

    #[test]
    fn a_frame_that_is_cut_short_or_not_ip_has_none() {
        let tcp = frame(&[&TAG, &[0, 7], &IPV4], &v4(0x45, [0, 0], 6));
        for len in 0..tcp.len() {
            assert_eq!(Headers::of(&tcp[..len]), None, "{len}");
        }
        let mut v6 = vec![0x60; 44];
        v6[6] = 6;
        for len in 0..44 {
            assert_eq!(Headers::of(&frame(&[&IPV6], &v6[..len])), None, "{len}");
        }
        for (kind, first) in [(IPV4, 0x55), (IPV4, 0x44), (IPV6, 0x40), ([8, 6], 0x45)] {
            let mut packet = v4(0x4f, [0, 0], 1);
            packet[0] = first;
            assert_eq!(Headers::of(&frame(&[&kind], &packet)), None, "{kind:?} {first:#x}");
        }
    }
}
