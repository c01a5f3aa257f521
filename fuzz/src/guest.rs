//! A guest's memory with one split virtqueue (`virtio 1.4 §2.7`): written arbitrarily by a driver, and read according
//! to the standard.

mod chain;
mod step;

use std::ops::Range;
use std::sync::Arc;

use virtio_devices::testing::Step;
use virtio_devices::{GuestMap, SharedQueue};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::input::{Input, Seed};
pub use chain::{Chain, Segment, Verdict};
pub use step::Expected;

/// Two adjacent regions, a hole, and a third region.
const REGIONS: [Range<usize>; 3] = [0..0x2000, 0x2000..0x5000, 0x6000..0x7000];
/// The end of the last region.
const END: usize = 0x7000;

/// The usual addresses of the queue's parts.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x400;
/// The usual address of the used ring, which begins with its flags.
pub const USED: u64 = 0x800;
/// The start of the buffers. The whole queue is below.
pub const BUFFERS: u32 = 0x1000;

/// The maximum length of a used ring, and more.
const USED_LEN: u64 = 6 + 8 * 16;

// Flags of a descriptor.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

// The kinds of a driver's operation.
pub const DESCRIPTOR: u8 = 0;
pub const OFFER: u8 = 1;
pub const MEMORY: u8 = 2;
pub const AVAILABLE_INDEX: u8 = 3;
pub const USED_EVENT: u8 = 4;
pub const FLAGS: u8 = 5;
/// The number of these kinds. Targets number their own from here.
pub const KINDS: u8 = 6;

thread_local! {
    /// Created once, because that takes longer than running an input.
    static RAM: GuestMap = {
        let ranges = REGIONS.map(|range| (GuestAddress(range.start as u64), range.len()));
        GuestMap::from_ranges(&ranges).expect("memory for a guest")
    };
}

/// The contents of guest memory at one time.
#[derive(Clone, PartialEq, Eq)]
pub struct Snapshot(Vec<u8>);

impl Snapshot {
    /// Takes a snapshot of guest memory.
    pub fn take() -> Self {
        let mut bytes = vec![0; END];
        for range in REGIONS {
            let at = GuestAddress(range.start as u64);
            RAM.with(|ram| ram.read_slice(&mut bytes[range], at)).expect("guest memory can be read");
        }
        Self(bytes)
    }

    /// The range of `len` bytes at `address`, if all of it is memory.
    fn range(address: u64, len: u64) -> Option<Range<usize>> {
        let (start, end) = (usize::try_from(address).ok()?, usize::try_from(address.checked_add(len)?).ok()?);
        let below_hole = end <= REGIONS[1].end;
        let above_hole = start >= REGIONS[2].start && end <= END;
        (below_hole || above_hole).then_some(start..end)
    }

    /// The bytes at `address`, if all of them are memory.
    pub fn get(&self, address: u64, len: u64) -> Option<&[u8]> {
        self.0.get(Self::range(address, len)?)
    }

    /// Writes expected contents.
    pub fn put(&mut self, address: u64, bytes: &[u8]) {
        let range = Self::range(address, bytes.len() as u64).expect("in guest memory");
        self.0[range].copy_from_slice(bytes);
    }

    fn u16(&self, address: u64) -> u16 {
        self.get(address, 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    /// The first address outside `allowed` at which the two differ.
    pub fn differs_from(&self, other: &Self, allowed: &[Range<u64>]) -> Option<u64> {
        let mut mine = self.clone();
        for range in allowed {
            let range = range.start as usize..range.end as usize;
            mine.0[range.clone()].copy_from_slice(&other.0[range]);
        }
        // Compare byte by byte only if there is a difference.
        if mine == *other {
            return None;
        }
        mine.0.iter().zip(&other.0).position(|(a, b)| a != b).map(|at| at as u64)
    }
}

/// The driver's side of one queue.
pub struct Driver {
    pub queue: SharedQueue,
    pub size: u16,
    /// True if the queue is at its usual address, not at one from the input.
    pub usual_place: bool,
    descriptors: u64,
    available: u64,
    used: u64,
    event_idx: bool,
    /// The driver's available index.
    index: u16,
    /// Number of chains that the device has taken and returned, according to the oracle.
    pub taken: u16,
    pub given: u16,
}

impl Driver {
    /// A queue of 4, 8 or 16 descriptors in zeroed memory, or a queue at an invalid address.
    pub fn new(input: &mut Input<'_>, event_idx: bool) -> Self {
        for range in REGIONS {
            let zeros = [0; REGIONS[1].end - REGIONS[1].start];
            let at = GuestAddress(range.start as u64);
            RAM.with(|ram| ram.write_slice(&zeros[..range.len()], at)).expect("guest memory can be written");
        }
        let choice = input.u8();
        let size = [4, 8, 16, 8][usize::from(choice % 4)];
        let usual_place = choice < 0xe0;
        let [descriptors, available, used] = match usual_place {
            true => [DESCRIPTORS, AVAILABLE, USED],
            // The transport accepts only aligned addresses.
            false => [16, 2, 4].map(|align| address(input) / align * align),
        };
        let mut queue = Queue::new(16).expect("a power of two");
        queue.try_set_size(size).expect("a power of two");
        queue.try_set_desc_table_address(GuestAddress(descriptors)).expect("aligned");
        queue.try_set_avail_ring_address(GuestAddress(available)).expect("aligned");
        queue.try_set_used_ring_address(GuestAddress(used)).expect("aligned");
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        let queue = Arc::new(parking_lot::Mutex::new(queue));
        Self { queue, size, usual_place, descriptors, available, used, event_idx, index: 0, taken: 0, given: 0 }
    }

    /// The guest's memory.
    pub fn memory() -> GuestMap {
        RAM.with(GuestMap::clone)
    }

    /// Writes to guest memory.
    pub fn store(&self, address: u64, bytes: &[u8]) {
        // A queue at an invalid address cannot be written.
        let _ = RAM.with(|ram| ram.write_slice(bytes, GuestAddress(address)));
    }

    /// Performs one of the driver's operations.
    pub fn apply(&mut self, kind: u8, input: &mut Input<'_>) {
        match kind {
            DESCRIPTOR => {
                let index = u16::from(input.u8() % 16);
                let (address, len, flags, next) = (address(input), length(input), input.u8(), input.u8());
                self.set(index, (address, len, flags.into(), next.into()));
            }
            OFFER => self.offer(input.u8().into()),
            MEMORY => {
                let (at, len) = (address(input), usize::from(input.u8()));
                self.store(at, input.slice(len));
            }
            AVAILABLE_INDEX => {
                self.index = input.u16();
                self.store(self.available + 2, &self.index.to_le_bytes());
            }
            USED_EVENT => {
                let event = input.u16();
                self.store(self.available + 4 + 2 * u64::from(self.size), &event.to_le_bytes());
            }
            FLAGS => self.store(self.available, &[input.u8(), 0]),
            _ => {}
        }
    }

    /// Writes a descriptor: address, length, flags, next.
    fn describe(&self, at: u64, (address, len, flags, next): (u64, u32, u16, u16)) {
        self.store(at, &address.to_le_bytes());
        self.store(at + 8, &len.to_le_bytes());
        self.store(at + 12, &flags.to_le_bytes());
        self.store(at + 14, &next.to_le_bytes());
    }

    /// Writes the descriptor `index`.
    pub fn set(&self, index: u16, descriptor: (u64, u32, u16, u16)) {
        self.describe(self.descriptors + 16 * u64::from(index), descriptor);
    }

    /// A free descriptor, for a driver that uses four per chain.
    pub fn next_free(&self) -> u16 {
        self.index.wrapping_mul(4) % self.size
    }

    /// Fills the buffers so that neighbouring bytes differ.
    pub fn fill_buffers(&self) {
        let bytes: Vec<u8> = (0..END - BUFFERS as usize).map(|n| (n % 251) as u8).collect();
        for range in REGIONS {
            let start = range.start.max(BUFFERS as usize);
            self.store(start as u64, &bytes[start - BUFFERS as usize..range.end - BUFFERS as usize]);
        }
    }

    /// Runs a queue at an invalid address: nothing may break. If the device's part overlaps the driver's, returned
    /// chains may become available at once without end, so the number of steps is limited.
    pub fn run_anyhow(mut step: impl FnMut() -> Step) {
        for _ in 0..100 {
            if step() != Step::More {
                break;
            }
        }
    }

    /// Makes a chain available.
    pub fn offer(&mut self, head: u16) {
        self.store(self.available + 4 + 2 * u64::from(self.index % self.size), &head.to_le_bytes());
        self.index = self.index.wrapping_add(1);
        self.store(self.available + 2, &self.index.to_le_bytes());
    }

    /// The addresses of the driver's parts of the queue.
    pub fn drivers_part(&self) -> [Range<u64>; 2] {
        let size = u64::from(self.size);
        [self.descriptors..self.descriptors + 16 * size, self.available..self.available + 6 + 2 * size]
    }

    /// The addresses of the device's part.
    pub fn devices_part(&self) -> Range<u64> {
        self.used..self.used + USED_LEN.min(6 + 8 * u64::from(self.size))
    }

    /// The available chains that have not been taken, or `None` if the index is invalid.
    pub fn waiting(&self, ram: &Snapshot) -> Option<Vec<Chain>> {
        let count = ram.u16(self.available + 2).wrapping_sub(self.taken);
        let head = |n: u16| ram.u16(self.available + 4 + 2 * u64::from(self.taken.wrapping_add(n) % self.size));
        (count <= self.size).then(|| (0..count).map(|n| self.chain(ram, head(n))).collect())
    }

    /// The chain that starts at `head`.
    pub fn chain(&self, ram: &Snapshot, head: u16) -> Chain {
        let mut chain = Chain { head, segments: Vec::new(), tables: Vec::new(), verdict: Verdict::Sound };
        let (mut table, mut entries, mut index) = (self.descriptors, u64::from(self.size), u64::from(head));
        let (mut length, mut total) = (0, 0);
        loop {
            let descriptor = if index < entries { ram.get(table + 16 * index, 16) } else { None };
            let Some(descriptor) = descriptor else { return chain.judge(Verdict::Unsound) };
            let word = |at: usize| u16::from_le_bytes([descriptor[at], descriptor[at + 1]]);
            let len = u64::from(u32::from(word(8)) | u32::from(word(10)) << 16);
            let address = u64::from_le_bytes(descriptor[..8].try_into().expect("8 bytes"));
            let (flags, next) = (word(12), word(14));
            if flags & INDIRECT != 0 {
                // A table inside a table, or one that is not last: the driver must avoid both (§2.7.5.3.1).
                if !chain.tables.is_empty() || flags & NEXT != 0 {
                    return chain.judge(Verdict::Undefined);
                }
                if len == 0 || len % 16 != 0 || ram.get(address, len).is_none() {
                    // Only the entries that are read must be in memory.
                    return chain.judge(if len % 16 == 0 { Verdict::Undefined } else { Verdict::Unsound });
                }
                chain.tables.push(address..address + len);
                (table, entries, index) = (address, len / 16, 0);
                continue;
            }
            chain.add(ram, Segment { address, len, writable: flags & WRITE != 0 });
            (length, total) = (length + 1, total + len);
            // A driver must not make a longer chain (§2.7.5.2).
            if total > u64::from(u32::MAX) {
                return chain.judge(Verdict::Undefined);
            }
            if flags & NEXT == 0 {
                break;
            }
            // A loop, or a chain longer than the queue (§2.7.5.3.1).
            if length >= u64::from(self.size) {
                let verdict = if chain.tables.is_empty() { Verdict::Unsound } else { Verdict::Undefined };
                return chain.judge(verdict);
            }
            index = next.into();
        }
        chain
    }

    /// Adds an entry to the used ring of `ram`, as the device must. A head beyond the ring cannot be represented.
    pub fn expect_used(&mut self, ram: &mut Snapshot, head: u16, len: u32) {
        if head < self.size {
            let at = self.used + 4 + 8 * u64::from(self.given % self.size);
            ram.put(at, &[u32::from(head).to_le_bytes(), len.to_le_bytes()].concat());
            self.given = self.given.wrapping_add(1);
        }
        // The device owns the index, whatever the driver wrote there.
        ram.put(self.used + 2, &self.given.to_le_bytes());
    }

    /// Restores the used index after the driver has overwritten it. Such a driver cannot tell which chains are
    /// returned.
    pub fn mend_used_index(&self) {
        self.store(self.used + 2, &self.given.to_le_bytes());
    }

    /// The entries that the device has added to the used ring since the last call: heads and lengths.
    pub fn take_used(&mut self, ram: &Snapshot) -> Vec<(u32, u32)> {
        let mut entries = Vec::new();
        let index = ram.u16(self.used + 2);
        assert!(index.wrapping_sub(self.given) <= self.size, "more buffers are returned than there are");
        while self.given != index {
            let at = self.used + 4 + 8 * u64::from(self.given % self.size);
            let entry = ram.get(at, 8).expect("the used ring is in memory");
            let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
            entries.push((word(0), word(4)));
            self.given = self.given.wrapping_add(1);
        }
        entries
    }

    /// True if the driver wants an interrupt for chains returned since the used index was `old` (§2.7.7.2, §2.7.10).
    pub fn wants_interrupt(&self, ram: &Snapshot, old: u16) -> bool {
        let new = self.given;
        if !self.event_idx {
            return new != old && ram.u16(self.available) & 1 == 0;
        }
        let event = ram.u16(self.available + 4 + 2 * u64::from(self.size));
        (0..new.wrapping_sub(old)).any(|n| old.wrapping_add(n) == event)
    }

    /// True if the device wants a doorbell for the next chain, after `seen` chains.
    pub fn wants_doorbell(&self, ram: &Snapshot, seen: u16) -> bool {
        match self.event_idx {
            true => ram.u16(self.used + 4 + 8 * u64::from(self.size)) == seen,
            false => ram.u16(self.used) & 1 == 0,
        }
    }
}

/// An address: mostly in memory, sometimes just outside, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    let [low, middle, high] = input.array();
    let address = u64::from(u16::from_le_bytes([low, middle])) % (END as u64 + 0x100);
    if high >= 0xf0 { address | u64::from(high) << 56 } else { address }
}

/// A length, mostly a short one.
fn length(input: &mut Input<'_>) -> u32 {
    let len = input.u16();
    if len >= 0xff00 { u32::from(len) << 16 } else { len.into() }
}

/// The bytes from which [`Driver::apply`] makes a descriptor.
pub fn descriptor(seed: Seed, index: u8, (at, len, flags, next): (u32, u16, u16, u8)) -> Seed {
    let [a, b, c, _] = at.to_le_bytes();
    seed.with([DESCRIPTOR, index, a, b, c]).with(len.to_le_bytes()).with([flags as u8, next])
}

/// The bytes from which [`Driver::apply`] writes `bytes` to an address.
pub fn memory(seed: Seed, at: u32, bytes: &[u8]) -> Seed {
    bytes.chunks(0xff).zip((at..).step_by(0xff)).fold(seed, |seed, (bytes, at)| {
        let [a, b, c, _] = at.to_le_bytes();
        seed.with([MEMORY, a, b, c, bytes.len() as u8]).with(bytes)
    })
}
