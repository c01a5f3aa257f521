//! A driver's side of a split virtqueue (`virtio 1.4 §2.7`), for tests of the crate and from outside it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::GuestMap;
use parking_lot::Mutex;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Size of guest memory in bytes.
pub const MEMORY: u64 = 4 << 20;
/// Address of the buffers. The queues are below.
pub const BUFFERS: u64 = 1 << 20;

// Flags of a descriptor.
/// The chain continues.
pub const NEXT: u16 = 1;
/// The device writes the buffer.
pub const WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;
/// The time limit for actions of a worker.
const PATIENCE: Duration = Duration::from_secs(60);

/// Guest memory of [`MEMORY`] bytes at address 0.
pub fn memory() -> GuestMap {
    GuestMap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap()
}

/// Repeats `condition` until it holds.
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    wait(what, condition, || std::thread::sleep(Duration::from_millis(1)));
}

/// As [`eventually`], for a test of many rounds, which does not sleep in each.
pub fn soon(what: &str, condition: impl FnMut() -> bool) {
    wait(what, condition, std::thread::yield_now);
}

fn wait(what: &str, mut condition: impl FnMut() -> bool, rest: impl Fn()) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come about");
        rest();
    }
}

/// The driver's side of one queue. It always uses new descriptors and buffers.
///
/// All methods panic if an address that they use is not in guest memory.
#[derive(Debug)]
pub struct DriverQueue {
    /// The guest's memory.
    pub memory: GuestMap,
    /// The device's side.
    pub queue: Arc<Mutex<Queue>>,
    /// The addresses of the descriptor table, the available ring and the used ring.
    parts: [u64; 3],
    size: u16,
    next_descriptor: u16,
    available: u16,
    used_seen: u16,
}

impl DriverQueue {
    /// A queue in the 64 KiB with this index.
    pub fn new(memory: &GuestMap, index: u16, size: u16) -> Self {
        let base = u64::from(index) << 16;
        Self::at(memory, [base, base + 0x8000, base + 0xa000], size)
    }

    /// A queue whose descriptor table, available ring and used ring have these addresses.
    pub fn at(memory: &GuestMap, parts: [u64; 3], size: u16) -> Self {
        let mut queue = Queue::new(size).unwrap();
        let [table, avail, used] = parts.map(|at| (Some(at as u32), Some((at >> 32) as u32)));
        queue.set_desc_table_address(table.0, table.1);
        queue.set_avail_ring_address(avail.0, avail.1);
        queue.set_used_ring_address(used.0, used.1);
        queue.set_ready(true);
        let queue = Arc::new(Mutex::new(queue));
        Self { memory: memory.clone(), queue, parts, size, next_descriptor: 0, available: 0, used_seen: 0 }
    }

    /// Address of the available ring.
    pub fn avail(&self) -> u64 {
        self.parts[1]
    }

    /// Address of the used ring.
    pub fn used(&self) -> u64 {
        self.parts[2]
    }

    /// Writes a value to guest memory.
    pub fn write<const N: usize>(&self, address: u64, value: [u8; N]) {
        self.memory.write_slice(&value, GuestAddress(address)).unwrap();
    }

    /// Writes data to guest memory.
    pub fn memory_write(&self, address: u64, data: &[u8]) {
        self.memory.write_slice(data, GuestAddress(address)).unwrap();
    }

    /// Reads 16 bits of guest memory.
    pub fn read_u16(&self, address: u64) -> u16 {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    /// Writes the descriptor `index` of a table: address, length, flags, next.
    pub fn set_descriptor(&self, table: u64, index: u16, (address, len, flags, next): (u64, u32, u16, u16)) {
        let at = table + 16 * u64::from(index);
        self.write(at, address.to_le_bytes());
        self.write(at + 8, len.to_le_bytes());
        self.write(at + 12, flags.to_le_bytes());
        self.write(at + 14, next.to_le_bytes());
    }

    /// Writes descriptors of `buffers` without making them available, and returns the head.
    pub fn build(&mut self, buffers: &[(u64, u32, u16)]) -> u16 {
        let index = |offset: usize| (self.next_descriptor + offset as u16) % self.size;
        for (offset, &(address, len, flags)) in buffers.iter().enumerate() {
            let next = if offset + 1 < buffers.len() { NEXT } else { 0 };
            self.set_descriptor(self.parts[0], index(offset), (address, len, flags | next, index(offset + 1)));
        }
        let head = index(0);
        self.next_descriptor = index(buffers.len());
        head
    }

    /// Writes the descriptor `index` of the queue: address, length, flags, next.
    pub fn set_raw(&mut self, index: u16, descriptor: (u64, u32, u16, u16)) {
        self.set_descriptor(self.parts[0], index, descriptor);
    }

    /// Makes the chain that begins with the descriptor `head` available.
    pub fn offer(&mut self, head: u16) {
        self.write(self.avail() + 4 + 2 * u64::from(self.available % self.size), head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.set_avail_index(self.available);
    }

    /// Writes an available index, which may be invalid.
    pub fn set_avail_index(&self, index: u16) {
        self.write(self.avail() + 2, index.to_le_bytes());
    }

    /// Makes a chain of these buffers available, each with address, length and flags, and returns its head.
    pub fn add(&mut self, buffers: &[(u64, u32, u16)]) -> u16 {
        let head = self.build(buffers);
        self.offer(head);
        head
    }

    /// Makes a chain available that consists of the table at `table`.
    pub fn add_indirect(&mut self, table: u64, buffers: &[(u64, u32, u16)]) -> u16 {
        for (index, &(address, len, flags)) in (0..).zip(buffers) {
            let next = if usize::from(index) + 1 < buffers.len() { NEXT } else { 0 };
            self.set_descriptor(table, index, (address, len, flags | next, index + 1));
        }
        self.add(&[(table, 16 * buffers.len() as u32, INDIRECT)])
    }

    /// Writes `data` at `address` and makes it available in pieces of these lengths; the rest is the last piece.
    pub fn send(&mut self, address: u64, data: &[u8], pieces: &[usize]) -> u16 {
        self.memory.write_slice(data, GuestAddress(address)).unwrap();
        let mut buffers = Vec::new();
        let mut done = 0;
        for piece in pieces.iter().copied().chain([data.len() - pieces.iter().sum::<usize>()]) {
            buffers.push((address + done as u64, piece as u32, 0));
            done += piece;
        }
        self.add(&buffers)
    }

    /// The chains that the device has returned since the last call: heads and lengths.
    pub fn take_used(&mut self) -> Vec<(u32, u32)> {
        let end = self.read_u16(self.used() + 2);
        let mut taken = Vec::new();
        while self.used_seen != end {
            taken.extend(self.take_one_used());
        }
        taken
    }

    /// The next chain that the device has returned.
    pub fn take_one_used(&mut self) -> Option<(u32, u32)> {
        if self.read_u16(self.used() + 2) == self.used_seen {
            return None;
        }
        let at = self.used() + 4 + 8 * u64::from(self.used_seen % self.size);
        self.used_seen = self.used_seen.wrapping_add(1);
        let read = |at| self.memory.read_obj(GuestAddress(at)).unwrap();
        Some((read(at), read(at + 4)))
    }

    /// The number of chains that the device has, or that were not taken back.
    pub fn outstanding(&self) -> usize {
        usize::from(self.available.wrapping_sub(self.used_seen))
    }

    /// Requests an interrupt when the device has used the buffer with this number.
    pub fn set_used_event(&self, event: u16) {
        self.write(self.avail() + 4 + 2 * u64::from(self.size), event.to_le_bytes());
    }

    /// The number of the buffer for which the device has requested a doorbell.
    pub fn avail_event(&self) -> u16 {
        self.read_u16(self.used() + 4 + 8 * u64::from(self.size))
    }

    /// Reads `len` bytes of guest memory.
    pub fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }
}
