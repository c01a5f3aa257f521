//! The work that a transmit descriptor asks of the NIC: tags, checksums and segments.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4,
};
use x550::descriptor::{Context, Data};

use super::Whole;

use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::header::{self, CSUM_OFFSET, CSUM_START, FLAGS, GSO_SIZE, GSO_TYPE, HDR_LEN, HEADER};
use crate::net::Counter;
use crate::switch::frame::offload::Sum;

/// The shortest frame, without its checksum (`IEEE 802.3 §3.2.8`).
const SHORTEST: usize = 60;
/// The two addresses, after which a tag is inserted.
const ADDRESSES: usize = 12;
/// The length of a VLAN tag.
const TAG: usize = 4;
/// The offloads that a header made here may use.
const FEATURES: u64 =
    1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_TSO4 | 1 << VIRTIO_NET_F_HOST_TSO6 | 1 << VIRTIO_NET_F_HOST_USO;

/// Numbers of transport protocols in a context.
const UDP: u8 = 0;
const TCP: u8 = 1;
const SCTP: u8 = 2;

/// The parameters of a frame.
pub(super) struct Parts<'p> {
    /// The first descriptor.
    pub data: &'p Data,
    /// The context that it names.
    pub context: Context,
}

/// Inserts the tag and the IP checksum, pads the frame, and returns the virtio header that describes what is left to
/// do: the transport's checksum, and the segments.
///
/// # Errors
///
/// The reason why the frame is dropped: its descriptors contradict it.
pub(super) fn finish(frame: &mut Whole, parts: &Parts<'_>) -> Result<[u8; HEADER], Counter> {
    let Parts { data, context } = parts;
    let tag = if data.inserts_vlan { TAG } else { 0 };
    if data.inserts_vlan {
        insert_tag(frame, context.vlan)?;
    }
    let network = usize::from(context.mac_len) + tag;
    let transport = network + usize::from(context.ip_len);
    let mut made = [0; HEADER];
    if data.segments {
        segment(frame, context, (network, transport), &mut made)?;
    } else {
        if data.ip_checksum && context.is_ipv4 {
            checksum_ipv4(frame, network, transport)?;
        }
        if data.l4_checksum {
            match context.l4_type {
                UDP => needs_checksum(&mut made, transport, 6),
                TCP => needs_checksum(&mut made, transport, 16),
                SCTP => checksum_sctp(frame, transport)?,
                _ => return Err(Counter::TxBadHeaders),
            }
        }
    }
    if frame.len() < SHORTEST {
        frame.extend(SHORTEST - frame.len()).fill(0);
    }
    if frame.len() > MAX_FRAME {
        return Err(Counter::TxTooLong);
    }
    header::check(made, frame.len(), FEATURES).map_err(|_| Counter::TxBadHeaders)
}

fn insert_tag(frame: &mut Whole, tag: u16) -> Result<(), Counter> {
    let [high, low] = tag.to_be_bytes();
    let rest = frame.get(ADDRESSES..).ok_or(Counter::TxTooShort)?.len();
    frame.append(&[0; TAG]);
    frame.copy_within(ADDRESSES..ADDRESSES + rest, ADDRESSES + TAG);
    put(frame, ADDRESSES, &[0x81, 0, high, low])
}

fn put(frame: &mut [u8], at: usize, bytes: &[u8]) -> Result<(), Counter> {
    frame.get_mut(at..at + bytes.len()).ok_or(Counter::TxBadHeaders)?.copy_from_slice(bytes);
    Ok(())
}

fn set(header: &mut [u8; HEADER], at: usize, value: usize) {
    let [low, high] = u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes();
    (header[at], header[at + 1]) = (low, high);
}

fn needs_checksum(header: &mut [u8; HEADER], start: usize, offset: usize) {
    header[FLAGS] = VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
    set(header, CSUM_START, start);
    set(header, CSUM_OFFSET, offset);
}

/// Prepares a frame to be cut. Its driver has left out every length, and the sum of the pseudo-header lacks it.
fn segment(
    frame: &mut [u8],
    context: &Context,
    (network, transport): (usize, usize),
    header: &mut [u8; HEADER],
) -> Result<(), Counter> {
    let bad = Counter::TxBadHeaders;
    let headers = transport + usize::from(context.l4_len);
    let payload = frame.len().checked_sub(transport).filter(|_| frame.len() > headers).ok_or(bad)?;
    let (kind, protocol, field) = match (context.l4_type, context.is_ipv4) {
        (TCP, true) => (VIRTIO_NET_HDR_GSO_TCPV4, 6, 16),
        (TCP, false) => (VIRTIO_NET_HDR_GSO_TCPV6, 6, 16),
        (UDP, _) => (VIRTIO_NET_HDR_GSO_UDP_L4, 17, 6),
        _ => return Err(bad),
    };
    if !is_direct(frame, context.is_ipv4, (network, transport), protocol) {
        return Err(bad);
    }
    let total = frame.len().checked_sub(network).ok_or(bad)?;
    let addresses = if context.is_ipv4 {
        put(frame, network + 2, &u16::try_from(total).unwrap_or(0).to_be_bytes())?;
        checksum_ipv4(frame, network, transport)?;
        network + 12..network + 20
    } else {
        let len = total.checked_sub(40).ok_or(bad)?;
        put(frame, network + 4, &u16::try_from(len).unwrap_or(0).to_be_bytes())?;
        network + 8..network + 40
    };
    let length = u32::try_from(payload).map_err(|_| bad)?.to_be_bytes();
    if protocol == 17 {
        let [_, _, high, low] = length;
        put(frame, transport + 4, &[high, low])?;
    }
    let pseudo = Sum::default().and(frame.get(addresses).ok_or(bad)?).and(&length).and(&[0, protocol]);
    put(frame, transport + field, &(!pseudo.checksum()).to_be_bytes())?;
    needs_checksum(header, transport, field);
    [header[GSO_TYPE], ..] = [kind as u8];
    set(header, GSO_SIZE, context.mss.into());
    set(header, HDR_LEN, headers);
    Ok(())
}

/// True if the IP header from `network` on ends at `transport`, with this protocol in it.
///
/// Linux has a frame in a tunnel cut by the length of all its headers up to the inner TCP (`NETIF_F_GSO_PARTIAL`), and
/// sets outer lengths and checksums for what comes out. No virtio header describes that.
fn is_direct(frame: &[u8], is_ipv4: bool, (network, transport): (usize, usize), protocol: u8) -> bool {
    let header = frame.get(network..transport).unwrap_or_default();
    match (header, is_ipv4) {
        ([first, _, _, _, _, _, _, _, _, next, ..], true) => {
            *first == 0x40 | (header.len() / 4) as u8 && header.len().is_multiple_of(4) && *next == protocol
        }
        ([first, _, _, _, _, _, next, ..], false) => {
            // Extension headers that a segment may have begin with the number of the next one, and their length.
            let (mut at, mut next) = (40, *next);
            while matches!(next, 0 | 43 | 60) {
                let Some([then, length]) = header.get(at..at + 2) else { return false };
                (at, next) = (at + 8 * (1 + usize::from(*length)), *then);
            }
            first >> 4 == 6 && at == header.len() && next == protocol
        }
        _ => false,
    }
}

/// Computes the checksum of the IPv4 header from `network` to before `transport`.
fn checksum_ipv4(frame: &mut [u8], network: usize, transport: usize) -> Result<(), Counter> {
    put(frame, network + 10, &[0, 0])?;
    let header = frame.get(network..transport).filter(|header| header.len() >= 20).ok_or(Counter::TxBadHeaders)?;
    let sum = Sum::default().and(header).checksum();
    put(frame, network + 10, &sum.to_be_bytes())
}

/// CRC32c of each byte.
const CRC32C: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Computes the CRC32c of an SCTP packet (`RFC 9260 §6.8`), which no virtio header can describe.
fn checksum_sctp(frame: &mut [u8], transport: usize) -> Result<(), Counter> {
    put(frame, transport + 8, &[0; 4])?;
    let packet = frame.get(transport..).unwrap_or_default();
    let crc = packet.iter().fold(u32::MAX, |crc, byte| {
        let [low, ..] = crc.to_le_bytes();
        crc >> 8 ^ CRC32C[usize::from(low ^ byte)]
    });
    put(frame, transport + 8, &(!crc).to_le_bytes())
}
