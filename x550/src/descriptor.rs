//! Descriptors of rings, 16 bytes each (`Descriptor Formats`). Drivers use advanced ones.

/// Bytes of a descriptor.
pub const LEN: usize = 16;

/// A descriptor of a transmit ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// Parameters of the frames that follow.
    Context(Context),
    /// A buffer.
    Data(Data),
    /// A descriptor of another type; the NIC skips it.
    Other,
}

/// Parameters of offloads, any values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Context {
    /// Number of the context, 0 to 7.
    pub index: u8,
    /// Bytes of the Ethernet header, with its tags.
    pub mac_len: u8,
    /// Bytes of the IP header.
    pub ip_len: u16,
    /// Bytes of the TCP header.
    pub l4_len: u8,
    /// Bytes of payload of each segment; may be 0.
    pub mss: u16,
    /// The tag to insert.
    pub vlan: u16,
    /// True if IP is version 4.
    pub is_ipv4: bool,
    /// Transport protocol: 0 UDP, 1 TCP, 2 SCTP.
    pub l4_type: u8,
}

/// A buffer of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Data {
    /// Guest address of the bytes.
    pub address: u64,
    /// Number of the bytes; may be 0.
    pub len: u16,
    /// EOP: the frame ends here.
    pub ends: bool,
    /// RS: the descriptor is to be written back.
    pub reports: bool,
    /// VLE: a tag is inserted.
    pub inserts_vlan: bool,
    /// TSE: the frame is cut into segments.
    pub segments: bool,
    /// Context to use, if CC is set.
    pub context: Option<u8>,
    /// IXSM: the checksum of the IP header is inserted.
    pub ip_checksum: bool,
    /// TXSM: the checksum of the transport protocol is inserted.
    pub l4_checksum: bool,
    /// Bytes of payload of the whole frame, without headers if it is segmented.
    pub payload: u32,
}

fn dword(bytes: &[u8; LEN], n: usize) -> u32 {
    bytes.chunks_exact(4).nth(n).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

#[expect(clippy::cast_possible_truncation, reason = "the field has at most 16 bits")]
const fn field(dword: u32, shift: u32, bits: u32) -> u16 {
    (dword >> shift & ((1 << bits) - 1)) as u16
}

const fn byte(dword: u32, shift: u32, bits: u32) -> u8 {
    let [low, _] = field(dword, shift, bits).to_le_bytes();
    low
}

const fn bit(dword: u32, bit: u32) -> bool {
    dword >> bit & 1 != 0
}

impl Transmit {
    /// Parses a descriptor.
    pub fn parse(bytes: &[u8; LEN]) -> Self {
        let [first, second, kind, last] = [0, 1, 2, 3].map(|n| dword(bytes, n));
        let is_advanced = bit(kind, 29);
        match field(kind, 20, 4) {
            2 if is_advanced => Self::Context(Context {
                index: byte(last, 4, 3),
                mac_len: byte(first, 9, 7),
                ip_len: field(first, 0, 9),
                l4_len: byte(last, 8, 8),
                mss: field(last, 16, 16),
                vlan: field(first, 16, 16),
                is_ipv4: bit(kind, 10),
                l4_type: byte(kind, 11, 2),
            }),
            3 if is_advanced => Self::Data(Data {
                address: u64::from(first) | u64::from(second) << 32,
                len: field(kind, 0, 16),
                ends: bit(kind, 24),
                reports: bit(kind, 27),
                inserts_vlan: bit(kind, 30),
                segments: bit(kind, 31),
                context: bit(last, 7).then(|| byte(last, 4, 3)),
                ip_checksum: bit(last, 8),
                l4_checksum: bit(last, 9),
                payload: last >> 14,
            }),
            _ => Self::Other,
        }
    }
}

/// Status of a transmit descriptor that is done, at its byte [`TRANSMIT_STATUS`].
pub const TRANSMIT_DONE: u32 = 1;
/// Byte of a transmit descriptor at which its status is written.
pub const TRANSMIT_STATUS: u64 = 12;

/// The address of the buffer of a receive descriptor.
pub fn receive_buffer(bytes: &[u8; LEN]) -> u64 {
    u64::from(dword(bytes, 0)) | u64::from(dword(bytes, 1)) << 32
}

/// Result of a received buffer, which is written over its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Received {
    /// Bytes in the buffer.
    pub len: u16,
    /// True if the frame ends here.
    pub ends: bool,
    /// Type of the hash, 0 to 15; 0 without one.
    pub rss_type: u8,
    /// Hash of the frame.
    pub rss_hash: u32,
    /// Packet type, 13 bits.
    pub packet_type: u16,
    /// The tag that was removed.
    pub vlan: Option<u16>,
    /// Result of the check of the IP header: true if it is correct.
    pub ip_checked: Option<bool>,
    /// Result of the check of the transport protocol: true if it is correct.
    pub l4_checked: Option<bool>,
    /// True if another pool of this NIC sent the frame.
    pub is_local: bool,
}

impl Received {
    /// The descriptor as it is written back.
    pub fn to_bytes(self) -> [u8; LEN] {
        let set = |is_set: bool, bit: u32| u32::from(is_set) << bit;
        let info = u32::from(self.rss_type & 0xf) | u32::from(self.packet_type & 0x1fff) << 4;
        let status = 1
            | set(self.ends, 1)
            | set(self.vlan.is_some(), 3)
            | set(self.l4_checked.is_some(), 5)
            | set(self.ip_checked.is_some(), 6)
            | set(self.is_local, 18)
            | set(self.l4_checked == Some(false), 30)
            | set(self.ip_checked == Some(false), 31);
        let last = u32::from(self.len) | u32::from(self.vlan.unwrap_or(0)) << 16;
        let low = u64::from(info) | u64::from(self.rss_hash) << 32;
        let high = u64::from(status) | u64::from(last) << 32;
        (u128::from(low) | u128::from(high) << 64).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(dwords: [u32; 4]) -> [u8; LEN] {
        dwords.map(u32::to_le_bytes).concat().try_into().unwrap()
    }

    /// X25: transmit descriptors.
    #[test]
    fn a_context_has_the_lengths_of_the_headers() {
        let parsed = Transmit::parse(&bytes([7 << 16 | 14 << 9 | 20, 0, 1 << 29 | 2 << 20 | 1 << 11 | 1 << 10, {
            1460 << 16 | 20 << 8 | 1 << 4
        }]));
        let expected =
            Context { index: 1, mac_len: 14, ip_len: 20, l4_len: 20, mss: 1460, vlan: 7, is_ipv4: true, l4_type: 1 };
        assert_eq!(parsed, Transmit::Context(expected));
    }

    /// X25: transmit descriptors.
    #[test]
    fn each_bit_of_a_data_descriptor_has_its_field() {
        let plain = 1 << 29 | 3 << 20;
        let parse = |kind: u32, last: u32| match Transmit::parse(&bytes([0x1000, 1, plain | kind, last])) {
            Transmit::Data(data) => data,
            other => panic!("{other:?}"),
        };
        let none = parse(0, 0);
        assert_eq!((none.address, none.len, none.context), (0x1_0000_1000, 0, None));
        for (kind, last, expected) in [
            (60, 0, Data { len: 60, ..none }),
            (1 << 24, 0, Data { ends: true, ..none }),
            (1 << 27, 0, Data { reports: true, ..none }),
            (1 << 30, 0, Data { inserts_vlan: true, ..none }),
            (1 << 31, 0, Data { segments: true, ..none }),
            (0, 1 << 7 | 1 << 4, Data { context: Some(1), ..none }),
            (0, 1 << 4, none),
            (0, 1 << 8, Data { ip_checksum: true, ..none }),
            (0, 1 << 9, Data { l4_checksum: true, ..none }),
            (0, u32::MAX << 14, Data { payload: 0x3_ffff, ..none }),
        ] {
            assert_eq!(parse(kind, last), expected);
        }
    }

    #[test]
    fn other_types_are_neither() {
        for kind in [0, 3 << 20, 2 << 20, 1 << 29, 1 << 29 | 0xf << 20] {
            assert_eq!(Transmit::parse(&bytes([0, 0, kind, 0])), Transmit::Other, "{kind:#x}");
        }
    }

    /// X26: receive descriptors.
    #[test]
    fn each_field_of_a_result_has_its_bits() {
        let none = Received::default();
        for (received, expected) in [
            (none, [0, 0, 1, 0]),
            (Received { len: 0xffff, ends: true, ..none }, [0, 0, 3, 0xffff]),
            (Received { rss_type: 0xff, rss_hash: 9, ..none }, [0xf, 9, 1, 0]),
            (Received { packet_type: 0xffff, ..none }, [0x1_fff0, 0, 1, 0]),
            (Received { vlan: Some(5), ..none }, [0, 0, 9, 5 << 16]),
            (Received { l4_checked: Some(true), ..none }, [0, 0, 0x21, 0]),
            (Received { l4_checked: Some(false), ..none }, [0, 0, 0x4000_0021, 0]),
            (Received { ip_checked: Some(true), ..none }, [0, 0, 0x41, 0]),
            (Received { ip_checked: Some(false), ..none }, [0, 0, 0x8000_0041, 0]),
            (Received { is_local: true, ..none }, [0, 0, 0x4_0001, 0]),
        ] {
            assert_eq!(received.to_bytes(), bytes(expected), "{received:?}");
        }
    }

    #[test]
    fn a_receive_descriptor_is_an_address() {
        assert_eq!(receive_buffer(&bytes([0x2000, 3, u32::MAX, u32::MAX])), 0x3_0000_2000);
    }
}
