//! The driver's side of a receive and a transmit queue.

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::{GuestMap, SharedQueue};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::input::Input;

/// The guest's context ID.
pub const CID: u32 = 3;
/// The length of a packet's header.
pub const HEADER: usize = 44;
/// The descriptors of each queue.
const SIZE: u16 = 64;
/// The parts of a queue, from its base on.
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
/// Address of the receive buffers, a page for each descriptor, and of the packets to be sent.
const RECEIVE_BUFFERS: u64 = 0x1_0000;
const PACKETS: u64 = 0x8_0000;
const MEMORY: usize = 0xa_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

thread_local! {
    /// Created once, because that takes longer than running an input.
    static RAM: GuestMap =
        GuestMap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory for a guest");
}

/// Values of a header.
pub struct Header {
    pub host: u32,
    pub guest: u32,
    pub len: u32,
    pub op: u16,
    pub flags: u32,
    /// The sender's buffer space, and its forwarded count.
    pub room: (u32, u32),
}

/// Both queues, in guest memory.
pub struct Driver {
    pub memory: GuestMap,
    pub receive: SharedQueue,
    pub transmit: SharedQueue,
    receive_next: u16,
    /// Number of receive buffers that the device has.
    provided: u16,
    received: u16,
    transmit_next: u16,
    offered: u16,
    transmitted: u16,
}

impl Driver {
    pub fn new() -> Self {
        let memory = RAM.with(Clone::clone);
        for at in (0..RECEIVE_BUFFERS).step_by(0x1000) {
            memory.write_slice(&[0; 0x1000], GuestAddress(at)).expect("guest memory");
        }
        let queue = |base: u32| {
            let mut queue = Queue::new(SIZE).expect("a power of two");
            queue.set_desc_table_address(Some(base), None);
            queue.set_avail_ring_address(Some(base + AVAILABLE as u32), None);
            queue.set_used_ring_address(Some(base + USED as u32), None);
            queue.set_ready(true);
            Arc::new(Mutex::new(queue))
        };
        Self {
            memory,
            receive: queue(0),
            transmit: queue(0x2000),
            receive_next: 0,
            provided: 0,
            received: 0,
            transmit_next: 0,
            offered: 0,
            transmitted: 0,
        }
    }

    fn write(&self, at: u64, data: &[u8]) {
        self.memory.write_slice(data, GuestAddress(at)).expect("guest memory");
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.memory.read_slice(&mut data, GuestAddress(at)).expect("guest memory");
        data
    }

    fn descriptor(&self, base: u64, index: u16, (at, len, flags, next): (u64, u32, u16, u16)) {
        let bytes = [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.write(base + 16 * u64::from(index), &bytes);
    }

    fn offer(&self, base: u64, next: &mut u16, head: u16) {
        self.write(base + AVAILABLE + 4 + 2 * u64::from(*next % SIZE), &head.to_le_bytes());
        *next = next.wrapping_add(1);
        self.write(base + AVAILABLE + 2, &next.to_le_bytes());
    }

    /// Makes up to `count` receive buffers of up to a page available.
    pub fn provide(&mut self, count: u8, len: u16) {
        for _ in 0..u16::from(count).min(SIZE - self.provided) {
            let index = self.receive_next % SIZE;
            let at = RECEIVE_BUFFERS + u64::from(index) * 0x1000;
            self.descriptor(0, index, (at, u32::from(len).clamp(1, 0x1000), WRITE, 0));
            let mut next = self.receive_next;
            self.offer(0, &mut next, index);
            self.receive_next = next;
            self.provided += 1;
        }
    }

    /// Makes a packet available, with its first `first` × 11 bytes in a separate descriptor. Returns false if there was
    /// no room.
    pub fn send(&mut self, header: &Header, data: &[u8], first: u8) -> bool {
        if self.offered + 2 > SIZE {
            return false;
        }
        let words = |words: [u32; 4]| words.map(u32::to_le_bytes).concat();
        let kind = u32::from(header.op) << 16 | 1;
        let bytes = [
            words([CID, 0, 2, 0]),
            words([header.guest, header.host, header.len, kind]),
            words([header.flags, header.room.0, header.room.1, 0])[..12].to_vec(),
            data.to_vec(),
        ]
        .concat();
        // A packet is taken before the next one is built.
        self.write(PACKETS, &bytes);
        let first = u32::from(first) * 11;
        let (one, two) = (self.transmit_next % SIZE, self.transmit_next.wrapping_add(1) % SIZE);
        let len = bytes.len() as u32;
        if first == 0 || first >= len {
            self.descriptor(0x2000, one, (PACKETS, len, 0, 0));
        } else {
            self.descriptor(0x2000, one, (PACKETS, first, NEXT, two));
            self.descriptor(0x2000, two, (PACKETS + u64::from(first), len - first, 0, 0));
        }
        self.offer_transmit(one);
        true
    }

    fn offer_transmit(&mut self, head: u16) {
        let mut next = self.offered_index();
        self.offer(0x2000, &mut next, head);
        self.transmit_next = self.transmit_next.wrapping_add(2);
        self.offered += 1;
    }

    fn offered_index(&self) -> u16 {
        u16::from_le_bytes(self.read(0x2000 + AVAILABLE + 2))
    }

    /// Makes a chain of any descriptors available in a queue other than the receive queue.
    pub fn chain(&mut self, input: &mut Input<'_>) {
        if self.offered + 2 > SIZE {
            return;
        }
        let head = self.transmit_next % SIZE;
        let pieces = u16::from(input.u8() % 4) + 1;
        for piece in 0..pieces {
            let at = u64::from(input.u16()) << 4;
            let (len, flags) = (u32::from(input.u16()), u16::from(input.u8() % 8));
            let index = (head + piece) % SIZE;
            self.descriptor(0x2000, index, (at, len, flags, (index + 1) % SIZE));
        }
        self.offer_transmit(head);
    }

    /// Releases the packets that the device has taken.
    pub fn take_transmitted(&mut self) {
        let used = u16::from_le_bytes(self.read(0x2000 + USED + 2));
        self.offered -= used.wrapping_sub(self.transmitted);
        self.transmitted = used;
    }

    /// The packets that the device has written.
    pub fn take_received(&mut self) -> Vec<(Header, Vec<u8>)> {
        let used = u16::from_le_bytes(self.read(USED + 2));
        let mut packets = Vec::new();
        while self.received != used {
            let element: [u8; 8] = self.read(USED + 4 + 8 * u64::from(self.received % SIZE));
            let (index, len) = (u64::from(element[0]), u16::from_le_bytes([element[4], element[5]]));
            self.received = self.received.wrapping_add(1);
            self.provided -= 1;
            let mut bytes = vec![0; len.into()];
            let at = RECEIVE_BUFFERS + index * 0x1000;
            self.memory.read_slice(&mut bytes, GuestAddress(at)).expect("guest memory");
            // A buffer that is too short for a packet is returned empty.
            let Some((header, data)) = bytes.split_at_checked(HEADER) else { continue };
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
            assert_eq!((word(0), word(4), word(8), word(12)), (2, 0, CID, 0), "from the host to the guest");
            packets.push((
                Header {
                    host: word(16),
                    guest: word(20),
                    len: word(24),
                    op: (word(28) >> 16) as u16,
                    flags: word(32),
                    room: (word(36), word(40)),
                },
                data.to_vec(),
            ));
        }
        packets
    }
}
