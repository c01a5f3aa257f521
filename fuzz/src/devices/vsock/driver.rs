//! The driver's side of a receive and a transmit queue.

use virtio_devices::GuestMap;
use virtio_devices::testing::driver_queue::{DriverQueue, WRITE};
use vm_memory::{Bytes, GuestAddress};

use crate::input::Input;

/// The guest's context ID.
pub const CID: u32 = 3;
/// The length of a packet's header.
pub const HEADER: usize = 44;
/// The descriptors of each queue.
const SIZE: u16 = 64;
/// Addresses of the queues.
const RECEIVE: u64 = 0;
const TRANSMIT: u64 = 0x2000;
/// Address of the receive buffers, a page for each descriptor, and of the packets to be sent.
const RECEIVE_BUFFERS: u64 = 0x1_0000;
const PACKETS: u64 = 0x8_0000;
const MEMORY: usize = 0xa_0000;

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
    pub receive: DriverQueue,
    pub transmit: DriverQueue,
}

impl Driver {
    pub fn new() -> Self {
        let memory = RAM.with(Clone::clone);
        for at in (0..RECEIVE_BUFFERS).step_by(0x1000) {
            memory.write_slice(&[0; 0x1000], GuestAddress(at)).expect("guest memory");
        }
        let queue = |base| DriverQueue::at(&memory, [base, base + 0x400, base + 0x800], SIZE);
        Self { receive: queue(RECEIVE), transmit: queue(TRANSMIT) }
    }

    /// Makes up to `count` receive buffers of up to a page available.
    pub fn provide(&mut self, count: u8, len: u16) {
        let room = usize::from(SIZE) - self.receive.outstanding();
        for _ in 0..usize::from(count).min(room) {
            let head = self.receive.build(&[(0, 0, WRITE)]);
            let at = RECEIVE_BUFFERS + u64::from(head) * 0x1000;
            self.receive.set_raw(head, (at, u32::from(len).clamp(1, 0x1000), WRITE, 0));
            self.receive.offer(head);
        }
    }

    /// True if there is room for a chain of two descriptors.
    fn may_send(&self) -> bool {
        self.transmit.outstanding() + 2 <= SIZE.into()
    }

    /// Makes a packet available, with its first `first` × 11 bytes in a separate descriptor. Returns false if there was
    /// no room.
    pub fn send(&mut self, header: &Header, data: &[u8], first: u8) -> bool {
        if !self.may_send() {
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
        let first = usize::from(first) * 11;
        let pieces: &[usize] = if first == 0 || first >= bytes.len() { &[] } else { &[first] };
        // A packet is taken before the next one is built.
        self.transmit.send(PACKETS, &bytes, pieces);
        true
    }

    /// Makes a chain of any descriptors available in the transmit queue.
    pub fn chain(&mut self, input: &mut Input<'_>) {
        if !self.may_send() {
            return;
        }
        let head = self.transmit.build(&[(0, 0, 0); 2]);
        let pieces = u16::from(input.u8() % 4) + 1;
        for piece in 0..pieces {
            let at = u64::from(input.u16()) << 4;
            let (len, flags) = (u32::from(input.u16()), u16::from(input.u8() % 8));
            let index = (head + piece) % SIZE;
            self.transmit.set_raw(index, (at, len, flags, (index + 1) % SIZE));
        }
        self.transmit.offer(head);
    }

    /// Releases the packets that the device has taken.
    pub fn take_transmitted(&mut self) {
        self.transmit.take_used();
    }

    /// The packets that the device has written.
    pub fn take_received(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut packets = Vec::new();
        while let Some((head, len)) = self.receive.take_one_used() {
            let bytes = self.receive.bytes(RECEIVE_BUFFERS + u64::from(head) * 0x1000, len as usize);
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
