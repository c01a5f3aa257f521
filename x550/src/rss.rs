//! Receive side scaling: the hash of a frame, and the queue of its pool that the hash selects (`Receive-Side Scaling`).

use crate::headers::{Addresses, Headers, Protocol};
use crate::model::Model;
use crate::queue;
use crate::registers::Registers;
use crate::spec;
use crate::toeplitz::{KEY, Toeplitz};

/// Bits of MRQC and PFVFMRQC.
mod bits {
    /// Mode, 3:0 of MRQC.
    pub(super) const MODE: u32 = 0xf;
    /// RSS is enabled, in PFVFMRQC.
    pub(super) const ENABLE: u32 = 1;
    /// Each pool has its own RSS, in MRQC of an X550.
    pub(super) const MULTIPLE: u32 = 1 << 13;
    pub(super) const TCP_IPV4: u32 = 1 << 16;
    pub(super) const IPV4: u32 = 1 << 17;
    pub(super) const IPV6: u32 = 1 << 20;
    pub(super) const TCP_IPV6: u32 = 1 << 21;
    pub(super) const UDP_IPV4: u32 = 1 << 22;
    pub(super) const UDP_IPV6: u32 = 1 << 23;
}

/// Result for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Steered {
    /// Queue of the pool, from 0; without virtualization, the queue of the NIC.
    pub queue: u16,
    /// The hash for the descriptor, 0 without one.
    pub hash: u32,
    /// Type of the hash for the descriptor: 0 none, 1 TCP over IPv4, 2 IPv4, 3 TCP over IPv6, 5 IPv6, 7 UDP over IPv4,
    /// 8 UDP over IPv6.
    pub kind: u8,
}

/// RSS of a pool as it was at one time, for the path of frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rss {
    /// Fields that are hashed, bits of MRQC; 0 if there is no RSS.
    fields: u32,
    hash: Toeplitz,
    /// Queue of each entry, a power of two of them.
    table: Vec<u8>,
}

/// The bytes of consecutive registers.
fn bytes(registers: &Registers, first: u32, len: usize) -> Vec<u8> {
    (first..).step_by(4).take(len.div_ceil(4)).flat_map(|offset| registers.get(offset).to_le_bytes()).collect()
}

/// Place of the registers of a pool's RSS, and what its queues allow.
struct Source {
    fields: u32,
    key: u32,
    /// Places of the table: first offset and entries.
    table: [(u32, usize); 2],
    /// Bits of an entry that select a queue.
    mask: u8,
}

impl Source {
    /// The RSS of `pool`; `None` if it has none, so that all frames are for its queue 0.
    fn of(registers: &Registers, model: Model, pool: u16) -> Option<Self> {
        let command = registers.get(spec::MRQC);
        let shared = |entries: usize, mask| Self {
            fields: command,
            key: spec::RSSRK,
            table: [(spec::RETA, entries.min(128)), (spec::ERETA, entries.saturating_sub(128))],
            mask,
        };
        if registers.get(spec::VT_CTL) & spec::VT_CTL_ENABLE == 0 {
            let large = model.has_pool_rss();
            return match command & bits::MODE {
                1 if large => Some(shared(512, 0x3f)),
                // Without frames of other traffic classes, those of class 0 are left, and have 16 queues at least.
                1 | 4 | 5 => Some(shared(128, 0xf)),
                _ => None,
            };
        }
        let mask = match (command & bits::MODE, queue::per_pool(registers)) {
            (0xa, 4) => 3,
            (0xb, 2) => 1,
            _ => return None,
        };
        if !model.has_pool_rss() || command & bits::MULTIPLE == 0 {
            return Some(shared(128, mask));
        }
        let pool = u32::from(pool.min(63));
        let fields = registers.get(spec::PFVFMRQC + 4 * pool);
        let table = [(spec::PFVFRETA + 0x40 * pool, 64), (0, 0)];
        let own = Self { fields, key: spec::PFVFRSSRK + 0x40 * pool, table, mask };
        (fields & bits::ENABLE != 0).then_some(own)
    }
}

impl Rss {
    /// The RSS of a pool, 0 to 63; that of the NIC without virtualization.
    pub(crate) fn of(registers: &Registers, model: Model, pool: u16) -> Self {
        let Some(Source { fields, key, table, mask }) = Source::of(registers, model, pool) else {
            return Self { fields: 0, hash: Toeplitz::new(&[0; KEY]), table: vec![0] };
        };
        let entries = table.into_iter().flat_map(|(first, len)| bytes(registers, first, len));
        let mut bytes_of_key = [0; KEY];
        bytes_of_key.iter_mut().zip(bytes(registers, key, KEY)).for_each(|(to, from)| *to = from);
        Self { fields, hash: Toeplitz::new(&bytes_of_key), table: entries.map(|entry| entry & mask).collect() }
    }

    /// True if frames are distributed, so that they need to be hashed.
    pub fn is_enabled(&self) -> bool {
        self.fields >> 16 != 0
    }

    /// The queue and the hash of a frame, from its first bytes; 82 are enough. Frames of other types, and frames
    /// that end within a header, are for queue 0 without a hash.
    pub fn queue_of(&self, frame: &[u8]) -> Steered {
        if !self.is_enabled() {
            return Steered::default();
        }
        Headers::of(frame).and_then(|headers| self.steer(&headers)).unwrap_or_default()
    }

    fn steer(&self, headers: &Headers<'_>) -> Option<Steered> {
        let has = |bit: u32, kind: u8| (self.fields & bit != 0).then_some(kind);
        let (with_ports, without) = match (headers.addresses, headers.protocol) {
            (Addresses::V4(_), Protocol::Tcp) => (has(bits::TCP_IPV4, 1), has(bits::IPV4, 2)),
            (Addresses::V4(_), Protocol::Udp) => (has(bits::UDP_IPV4, 7), has(bits::IPV4, 2)),
            (Addresses::V4(_), _) => (None, has(bits::IPV4, 2)),
            (Addresses::V6(_), Protocol::Tcp) => (has(bits::TCP_IPV6, 3), has(bits::IPV6, 5)),
            (Addresses::V6(_), Protocol::Udp) => (has(bits::UDP_IPV6, 8), has(bits::IPV6, 5)),
            (Addresses::V6(_), _) => (None, has(bits::IPV6, 5)),
        };
        let kind = with_ports.or(without)?;
        let addresses = match headers.addresses {
            Addresses::V4(addresses) => addresses.as_slice(),
            Addresses::V6(addresses) => addresses.as_slice(),
        };
        let ports: &[u8] = if with_ports.is_some() { &headers.ports } else { &[] };
        let hash = self.hash.of(addresses.iter().chain(ports));
        // The table has a power of two of entries, so its length less 1 is a mask.
        let entry = usize::try_from(hash).unwrap_or(0) & self.table.len().saturating_sub(1);
        Some(Steered { queue: self.table.get(entry).copied().unwrap_or(0).into(), hash, kind })
    }
}
