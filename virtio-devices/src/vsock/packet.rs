//! The header of each packet (`virtio 1.4 §5.10.6`).
//!
//! The payload follows in the same chain, in any number of descriptors: Linux sends pages borrowed from its programs
//! (`MSG_ZEROCOPY`) as one descriptor each.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The host's context ID (`virtio 1.4 §5.10.4`).
pub(crate) const HOST_CID: u64 = 2;
/// The type of stream sockets (`VIRTIO_VSOCK_TYPE_STREAM`).
pub(crate) const STREAM: u16 = 1;
/// The length of a header in bytes.
pub(crate) const HEADER: usize = size_of::<Header>();

/// The operations (`enum virtio_vsock_op`).
pub(crate) mod op {
    /// Requests a connection.
    pub(crate) const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub(crate) const RESPONSE: u16 = 2;
    /// Refuses a connection, or ends it at once.
    pub(crate) const RST: u16 = 3;
    /// The sender will no longer receive, or no longer send.
    pub(crate) const SHUTDOWN: u16 = 4;
    /// Payload.
    pub(crate) const RW: u16 = 5;
    /// Carries the sender's buffer space, as every packet does.
    pub(crate) const CREDIT_UPDATE: u16 = 6;
    /// Requests the receiver's buffer space.
    pub(crate) const CREDIT_REQUEST: u16 = 7;
}

bitflags::bitflags! {
    /// Directions that the sender of a SHUTDOWN has ended (`virtio 1.4 §5.10.6.5`).
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub(crate) struct Shutdown: u32 {
        /// Receive.
        const RECEIVE = 1;
        /// Send.
        const SEND = 2;
    }
}

/// `struct virtio_vsock_hdr`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    pub src_cid: U64,
    pub dst_cid: U64,
    pub src_port: U32,
    pub dst_port: U32,
    /// The length of the payload.
    pub len: U32,
    pub kind: U16,
    pub op: U16,
    pub flags: U32,
    /// The sender's buffer space for this connection.
    pub buf_alloc: U32,
    /// Total number of received bytes that the sender has forwarded.
    pub fwd_cnt: U32,
}

/// The ports of a connection: the host's, which belongs to `<socket>_<port>` if the guest opened the connection, and
/// the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ports {
    pub host: u32,
    pub guest: u32,
}

impl Ports {
    /// Both ports as one number.
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.host) << 32 | u64::from(self.guest)
    }

    /// The reverse of [`Self::to_bits`].
    pub(crate) fn from_bits(bits: u64) -> Self {
        // The upper and the lower half.
        Self { host: (bits >> 32) as u32, guest: (bits & u64::from(u32::MAX)) as u32 }
    }

    /// The ports of a packet from the guest.
    pub(crate) fn of_guests(header: &Header) -> Self {
        Self { host: header.dst_port.get(), guest: header.src_port.get() }
    }
}

impl Header {
    /// A packet without payload to the guest with this context ID.
    pub(crate) fn to_guest(cid: u64, ports: Ports, kind: u16, op: u16) -> Self {
        Self {
            src_cid: HOST_CID.into(),
            dst_cid: cid.into(),
            src_port: ports.host.into(),
            dst_port: ports.guest.into(),
            kind: kind.into(),
            op: op.into(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_standards_layout() {
        let ports = Ports { host: 0x0403_0201, guest: 0x1413_1211 };
        let mut header = Header::to_guest(0x1122, ports, STREAM, op::SHUTDOWN);
        header.len = 0x21.into();
        header.flags = Shutdown::SEND.bits().into();
        header.buf_alloc = 0x31.into();
        header.fwd_cnt = 0x41.into();
        let mut expected =
            vec![2, 0, 0, 0, 0, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14];
        expected.extend([0x21, 0, 0, 0, 1, 0, 4, 0, 2, 0, 0, 0, 0x31, 0, 0, 0, 0x41, 0, 0, 0]);
        assert_eq!((header.as_bytes(), HEADER), (expected.as_slice(), 44));
    }

    #[test]
    fn ports_are_one_number_and_back() {
        let ports = Ports { host: u32::MAX - 1, guest: 7 };
        assert_eq!(Ports::from_bits(ports.to_bits()), ports);
    }
}
