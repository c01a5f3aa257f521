//! The messages of the vhost-user protocol: a header, a payload, and file descriptors. Numbers are in host byte order
//! (vhost-user protocol, "Message Specification").

use std::fmt;

/// The length of a header: request, flags, length of the payload.
pub(crate) const HEADER: usize = 12;
/// The most descriptors in a message: one for each of as many regions of memory. A peer that accepts regions one by one
/// may accept more.
pub(crate) const MAX_FDS: usize = 8;
/// The longest device configuration that is requested (vhost-user protocol, "Virtio device config space").
pub(crate) const MAX_CONFIG: u32 = 256;
/// The longest payload that an answer may have: a device configuration, with its offset, size and flags.
pub(crate) const MAX_ANSWER: usize = 12 + MAX_CONFIG as usize;

/// The protocol's version, in the flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
/// The flag of an answer.
pub(crate) const REPLY: u32 = 1 << 2;
/// The flag of a request that needs an acknowledgement.
pub(crate) const NEED_REPLY: u32 = 1 << 3;
/// In the payload of a request about a descriptor: there is none.
pub(crate) const NO_FD: u64 = 1 << 8;

/// The feature bit of a peer that has protocol features.
pub(crate) const F_PROTOCOL_FEATURES: u32 = 30;

/// Several pairs of queues.
pub(crate) const PROTOCOL_F_MQ: u32 = 0;
/// The peer logs its writes to guest memory in shared memory.
pub(crate) const PROTOCOL_F_LOG_SHMFD: u32 = 1;
/// The peer announces the address of a NIC on request.
pub(crate) const PROTOCOL_F_RARP: u32 = 2;
/// Each request can be acknowledged.
pub(crate) const PROTOCOL_F_REPLY_ACK: u32 = 3;
/// The peer has a channel for requests of its own.
pub(crate) const PROTOCOL_F_BACKEND_REQ: u32 = 5;
/// The peer has a device configuration.
pub(crate) const PROTOCOL_F_CONFIG: u32 = 9;
/// The peer records buffers that it took and has not returned in memory that outlives it.
pub(crate) const PROTOCOL_F_INFLIGHT_SHMFD: u32 = 12;
/// The peer accepts regions of memory one by one, also while queues run.
pub(crate) const PROTOCOL_F_CONFIGURE_MEM_SLOTS: u32 = 15;
/// The peer has a device status.
pub(crate) const PROTOCOL_F_STATUS: u32 = 16;
/// The peer writes its own state to a pipe, and reads it from one.
pub(crate) const PROTOCOL_F_DEVICE_STATE: u32 = 19;

/// A request to the peer: its number and its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request(pub u32, &'static str);

impl Request {
    pub(crate) const GET_FEATURES: Self = Self(1, "GET_FEATURES");
    pub(crate) const SET_FEATURES: Self = Self(2, "SET_FEATURES");
    pub(crate) const SET_OWNER: Self = Self(3, "SET_OWNER");
    pub(crate) const SET_MEM_TABLE: Self = Self(5, "SET_MEM_TABLE");
    pub(crate) const SET_LOG_BASE: Self = Self(6, "SET_LOG_BASE");
    pub(crate) const SET_VRING_NUM: Self = Self(8, "SET_VRING_NUM");
    pub(crate) const SET_VRING_ADDR: Self = Self(9, "SET_VRING_ADDR");
    pub(crate) const SET_VRING_BASE: Self = Self(10, "SET_VRING_BASE");
    pub(crate) const GET_VRING_BASE: Self = Self(11, "GET_VRING_BASE");
    pub(crate) const SET_VRING_KICK: Self = Self(12, "SET_VRING_KICK");
    pub(crate) const SET_VRING_CALL: Self = Self(13, "SET_VRING_CALL");
    pub(crate) const SET_VRING_ERR: Self = Self(14, "SET_VRING_ERR");
    pub(crate) const GET_PROTOCOL_FEATURES: Self = Self(15, "GET_PROTOCOL_FEATURES");
    pub(crate) const SET_PROTOCOL_FEATURES: Self = Self(16, "SET_PROTOCOL_FEATURES");
    pub(crate) const GET_QUEUE_NUM: Self = Self(17, "GET_QUEUE_NUM");
    pub(crate) const SEND_RARP: Self = Self(19, "SEND_RARP");
    pub(crate) const SET_VRING_ENABLE: Self = Self(18, "SET_VRING_ENABLE");
    pub(crate) const SET_BACKEND_REQ_FD: Self = Self(21, "SET_BACKEND_REQ_FD");
    pub(crate) const IOTLB_MSG: Self = Self(22, "IOTLB_MSG");
    pub(crate) const GET_CONFIG: Self = Self(24, "GET_CONFIG");
    pub(crate) const SET_CONFIG: Self = Self(25, "SET_CONFIG");
    pub(crate) const GET_INFLIGHT_FD: Self = Self(31, "GET_INFLIGHT_FD");
    pub(crate) const SET_INFLIGHT_FD: Self = Self(32, "SET_INFLIGHT_FD");
    pub(crate) const GET_MAX_MEM_SLOTS: Self = Self(36, "GET_MAX_MEM_SLOTS");
    pub(crate) const ADD_MEM_REG: Self = Self(37, "ADD_MEM_REG");
    pub(crate) const SET_STATUS: Self = Self(39, "SET_STATUS");
    pub(crate) const GET_STATUS: Self = Self(40, "GET_STATUS");
    pub(crate) const SET_DEVICE_STATE_FD: Self = Self(42, "SET_DEVICE_STATE_FD");
    pub(crate) const CHECK_DEVICE_STATE: Self = Self(43, "CHECK_DEVICE_STATE");
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.1)
    }
}

/// A request of the peer: a miss of its IOTLB.
pub(crate) const IOTLB: u32 = 1;
/// A request of the peer: its device configuration has changed.
pub(crate) const CONFIG_CHANGE: u32 = 2;

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// The request's number.
    pub request: u32,
    /// [`REPLY`], [`NEED_REPLY`]; the version goes with them.
    pub flags: u32,
    /// The length of the payload in bytes.
    pub len: u32,
}

impl Header {
    /// The header as bytes.
    pub(crate) fn bytes(self) -> Vec<u8> {
        numbers(&[self.request, self.flags | VERSION, self.len])
    }

    /// Parses a header. `None` if it is of another version of the protocol.
    pub(crate) fn parse(bytes: [u8; HEADER]) -> Option<Self> {
        let [request, flags, len] = [0, 4, 8].map(|at| u32_at(&bytes, at).unwrap_or(0));
        (flags & VERSION_MASK == VERSION).then_some(Self { request, flags: flags & !VERSION_MASK, len })
    }
}

/// A payload of numbers of 32 bits.
pub(crate) fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// A payload of numbers of 64 bits.
pub(crate) fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// The number of 32 bits at an offset of a payload.
pub(crate) fn u32_at(payload: &[u8], offset: usize) -> Option<u32> {
    payload.get(offset..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// The number of 64 bits at an offset of a payload.
pub(crate) fn u64_at(payload: &[u8], offset: usize) -> Option<u64> {
    payload.get(offset..)?.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_parsed_back_and_another_version_is_rejected() {
        let header = Header { request: 24, flags: NEED_REPLY, len: 12 };
        let bytes: [u8; HEADER] = header.bytes().try_into().unwrap();
        assert_eq!(bytes, [24, 0, 0, 0, 9, 0, 0, 0, 12, 0, 0, 0]);
        assert_eq!(Header::parse(bytes), Some(header));
        assert_eq!(Header::parse([24, 0, 0, 0, 2, 0, 0, 0, 12, 0, 0, 0]), None);
    }

    #[test]
    fn a_number_beyond_the_payload_is_none() {
        let payload = longs(&[1, 0x0002_0003_0004_0005]);
        assert_eq!((u64_at(&payload, 0), u64_at(&payload, 8)), (Some(1), Some(0x0002_0003_0004_0005)));
        assert_eq!((u64_at(&payload, 9), u32_at(&payload, 13), u32_at(&payload, 17)), (None, None, None));
        assert_eq!((u32_at(&payload, 12), u32_at(&payload, 8)), (Some(0x0002_0003), Some(0x0004_0005)));
    }
}
