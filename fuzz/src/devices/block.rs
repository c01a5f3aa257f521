//! A disk with arbitrary requests, over rings and chains in guest memory that a driver wrote arbitrarily.
//!
//! After each step the image must equal a plain array of bytes, and every status, every byte of guest memory and every
//! counter must follow the standard. Some chains leave the device free to do anything; the run ends with the first of
//! those.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtio_devices::BlockCounter;
use virtio_devices::testing::{BlockSteps, Step};

use crate::guest::{self, BUFFERS, Chain, Driver, Expected, NEXT, OFFER, Snapshot, Verdict, WRITE};
use crate::input::{Input, Seed};

const SECTOR: usize = 512;
const SECTORS: u64 = 16;
const SIZE: usize = SECTORS as usize * SECTOR;
const SERIAL: [u8; 20] = *b"a disk with a serial";
/// The feature bit of event indexes.
const EVENT_IDX: u32 = 29;
/// The most requests that are begun in one step.
const BATCH: usize = 32;
/// The most sectors that a request discards or zeroes.
const MAX_RANGE: u32 = 1 << 18;

// Flags of an input.
const READ_ONLY: u8 = 1;
const ALIGNED: u8 = 2;
const EVENTS: u8 = 4;

// Types of requests (`virtio 1.4 §5.2.6`).
const IN: u8 = 0;
const OUT: u8 = 1;
const FLUSH: u8 = 4;
const GET_ID: u8 = 8;
const DISCARD: u8 = 11;
const WRITE_ZEROES: u8 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

// The kinds of operation, after those of the driver.
const REQUEST: u8 = guest::KINDS;
const RUN: u8 = guest::KINDS + 1;
const KINDS: u8 = guest::KINDS + 2;

thread_local! {
    /// The file of the image, in memory.
    static FILE: OwnedFd = {
        let file = memfd_create("image", MemfdFlags::CLOEXEC).expect("the host makes files in memory");
        ftruncate(&file, SIZE as u64).expect("room for the image");
        file
    };
}

/// The contents of an image at first.
fn pattern() -> Vec<u8> {
    (0..SIZE).map(|n| (n % 249) as u8).collect()
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// The expected counters: bytes read, reads, bytes written, writes, flushes, discards, zeroings, bad chains, bad
/// requests, unsupported ones.
type Counts = [u64; 10];

const COUNTERS: [BlockCounter; 10] = [
    BlockCounter::ReadBytes,
    BlockCounter::ReadOps,
    BlockCounter::WriteBytes,
    BlockCounter::WriteOps,
    BlockCounter::FlushOps,
    BlockCounter::DiscardOps,
    BlockCounter::WriteZeroesOps,
    BlockCounter::BadChains,
    BlockCounter::BadRequests,
    BlockCounter::Unsupported,
];

/// As [`run`]. Returns the counters.
fn run_to_end(input: &[u8]) -> Counts {
    let mut input = Input::new(input);
    let flags = input.u8();
    let features = u64::from(flags & EVENTS != 0) << EVENT_IDX;
    let driver = Driver::new(&mut input, features != 0);
    let path = FILE.with(|file| {
        assert_eq!(rustix::io::pwrite(file, &pattern(), 0), Ok(SIZE));
        PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
    });
    let read_only = flags & READ_ONLY != 0;
    let alignment = if flags & ALIGNED != 0 { SECTOR } else { 1 };
    let steps = BlockSteps::open(Driver::memory(), &path, read_only, alignment, SERIAL, features).expect("an image");
    let mut disk = Disk { driver, steps, image: pattern(), read_only, counts: Counts::default() };
    while !input.is_empty() {
        match input.u8() % KINDS {
            RUN if !disk.run() => break,
            RUN => {}
            REQUEST => disk.request(&mut input),
            kind => disk.driver.apply(kind, &mut input),
        }
    }
    disk.counts
}

struct Disk {
    driver: Driver,
    steps: BlockSteps,
    image: Vec<u8>,
    read_only: bool,
    counts: Counts,
}

impl Disk {
    /// Makes a request available: a header, data in one descriptor, and a status.
    fn request(&mut self, input: &mut Input<'_>) {
        let (kind, sector, len, flags) = (input.u8(), input.u8(), input.u16(), input.u8());
        let index = self.driver.next_free();
        let at = u64::from(BUFFERS) + 0x40 * u64::from(index);
        self.driver.store(at, &[u64::from(kind), u64::from(sector)].map(u64::to_le_bytes).concat());
        let data = u64::from(BUFFERS) + 0x1000 + u64::from(flags >> 4) * 0x100;
        self.driver.set(index, (at, 16, NEXT, index + 1));
        self.driver.set(index + 1, (data, len.into(), NEXT | u16::from(flags) & WRITE, index + 2));
        self.driver.set(index + 2, (at + 32, 1, WRITE, 0));
        self.driver.offer(index);
    }

    /// Runs a step. Returns false if the run must end.
    fn run(&mut self) -> bool {
        let Some(mut ram) = self.driver.before_step(&mut self.steps) else { return false };
        let expected = self.expect(&mut ram);
        let step = self.driver.step(&mut self.steps, expected, &ram);
        let size = FILE.with(|file| rustix::fs::fstat(file).expect("a file").st_size);
        assert_eq!(size, SIZE as i64, "the image has another size");
        let Some(step) = step else { return false };
        assert_eq!(COUNTERS.map(|counter| self.steps.count(counter)), self.counts);
        assert_eq!(self.steps.count(BlockCounter::BackendErrors), 0);
        let mut image = vec![0; SIZE];
        FILE.with(|file| assert_eq!(rustix::io::pread(file, &mut image, 0), Ok(SIZE)));
        assert!(image == self.image, "the image is not what was written");
        step != Step::Broken
    }

    /// Expected effect of a step on `ram` and on the image, its end, and true if it interrupts the driver; `None` if
    /// any effect is valid.
    fn expect(&mut self, ram: &mut Snapshot) -> Option<Expected> {
        let mut used = Vec::new();
        let mut step = Step::More;
        for _ in 0..BATCH {
            // Completed requests are not returned over an invalid ring.
            let Some(chains) = self.driver.waiting(ram) else { return Some(Expected::new(Step::Broken, false)) };
            let Some(chain) = chains.first() else {
                step = Step::Doorbell;
                break;
            };
            if chain.verdict == Verdict::Undefined || chain.touches(&self.driver.devices_part()) {
                return None;
            }
            self.driver.taken = self.driver.taken.wrapping_add(1);
            used.push((chain.head, self.carry_out(ram, chain)));
        }
        let old = self.driver.given;
        used.iter().for_each(|(head, len)| self.driver.expect_used(ram, *head, *len));
        Some(Expected::new(step, self.driver.wants_interrupt(ram, old)))
    }

    /// Executes a request. Returns the number of bytes written to guest memory.
    fn carry_out(&mut self, ram: &mut Snapshot, chain: &Chain) -> u32 {
        let Some(status_at) = chain.last_writable().filter(|_| chain.verdict == Verdict::Sound) else {
            self.counts[7] += 1;
            return 0;
        };
        let (readable, room) = (chain.bytes(ram, false), chain.len(true) as usize - 1);
        let (status, data) = match readable.split_first_chunk() {
            Some((header, data)) => self.answer(header, data, room),
            None => (IOERR, Vec::new()),
        };
        if status == IOERR {
            self.counts[8] += 1;
        } else if status == UNSUPP {
            self.counts[9] += 1;
        }
        chain.fill(ram, &data);
        ram.put(status_at, &[status]);
        data.len() as u32 + 1
    }

    /// The status of a request, and the data for the driver.
    fn answer(&mut self, header: &[u8; 16], data: &[u8], room: usize) -> (u8, Vec<u8>) {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        let place = |sector: u64, len: usize| {
            let start = sector.checked_mul(SECTOR as u64).and_then(|start| usize::try_from(start).ok())?;
            let end = start.checked_add(len)?;
            (len.is_multiple_of(SECTOR) && end <= SIZE).then_some(start..end)
        };
        let (kind, sector) = (word(&header[..8]) as u32, word(&header[8..]));
        match u8::try_from(kind).unwrap_or(u8::MAX) {
            IN => {
                let Some(place) = place(sector, room) else { return (IOERR, Vec::new()) };
                self.counts[0] += room as u64;
                self.counts[1] += 1;
                (OK, self.image[place].to_vec())
            }
            OUT => {
                let Some(place) = place(sector, data.len()).filter(|_| !self.read_only) else {
                    return (IOERR, Vec::new());
                };
                self.counts[2] += data.len() as u64;
                self.counts[3] += 1;
                self.image[place].copy_from_slice(data);
                (OK, Vec::new())
            }
            FLUSH => {
                self.counts[4] += 1;
                (OK, Vec::new())
            }
            GET_ID => (OK, SERIAL[..room.min(SERIAL.len())].to_vec()),
            kind @ (DISCARD | WRITE_ZEROES) if !self.read_only => {
                let Some(segment) = data.first_chunk::<16>() else { return (IOERR, Vec::new()) };
                let (sector, rest) = (word(&segment[..8]), word(&segment[8..]));
                let (count, flags) = (rest as u32, (rest >> 32) as u32);
                if flags & !1 != 0 {
                    return (UNSUPP, Vec::new());
                }
                let bounded = data.len() == 16 && (1..=MAX_RANGE).contains(&count);
                let Some(place) = place(sector, count as usize * SECTOR).filter(|_| bounded) else {
                    return (IOERR, Vec::new());
                };
                if kind == DISCARD && flags == 1 {
                    return (UNSUPP, Vec::new());
                }
                self.counts[if kind == DISCARD { 5 } else { 6 }] += 1;
                self.image[place].fill(0);
                (OK, Vec::new())
            }
            _ => (UNSUPP, Vec::new()),
        }
    }
}

fn start(flags: u8) -> Seed {
    // A queue of 16 descriptors.
    Seed::new().with([flags, 2])
}

/// A request with `len` bytes of data from the driver, or for it.
fn request(seed: Seed, kind: u8, sector: u8, len: u16, writable: bool) -> Seed {
    seed.with([REQUEST, kind, sector]).with(len.to_le_bytes()).with([if writable { WRITE as u8 } else { 0 }])
}

/// The segment of a request to discard or to zero.
fn segment(seed: Seed, sector: u64, count: u32, flags: u32) -> Seed {
    let rest = [count, flags].map(u32::to_le_bytes).concat();
    guest::memory(seed, BUFFERS + 0x1000, &[sector.to_le_bytes().to_vec(), rest].concat())
}

/// Seeds: reads, writes, flushes, serial numbers, ranges that are discarded and zeroed; requests beyond the disk, in
/// parts, of unknown types and without a status.
pub fn seeds() -> Vec<Vec<u8>> {
    let bytes: Vec<u8> = (0..=255).collect();
    let written = |flags| request(guest::memory(start(flags), BUFFERS + 0x1000, &bytes), OUT, 3, 1024, false);
    let both = request(request(written(0), IN, 2, 2048, true), FLUSH, 0, 0, true).with([RUN]);
    let bounced = request(written(ALIGNED), IN, 3, 512, true).with([RUN]);
    let read_only = request(request(written(READ_ONLY), IN, 15, 512, true), GET_ID, 0, 20, true).with([RUN]);
    let discarded = request(segment(start(EVENTS), 1, 4, 0), DISCARD, 0, 16, false).with([RUN]);
    let zeroed = request(segment(start(0), 1, 4, 1), WRITE_ZEROES, 0, 16, false).with([RUN]);
    let zeroed = request(segment(zeroed, 2, 1, 0), WRITE_ZEROES, 0, 16, false).with([RUN]);
    let beyond = request(request(start(0), IN, 15, 1024, true), OUT, 16, 512, false);
    let beyond = request(segment(beyond, 15, 2, 0), DISCARD, 0, 16, false).with([RUN]);
    let odd = request(request(request(start(0), IN, 0, 100, true), 77, 0, 512, true), FLUSH, 0, 64, false).with([RUN]);
    let parts = guest::memory(start(0), BUFFERS, &[0; 16]);
    let parts = guest::descriptor(parts, 0, (BUFFERS, 7, NEXT, 1));
    let parts = guest::descriptor(parts, 1, (BUFFERS + 7, 9, NEXT, 2));
    let parts = guest::descriptor(parts, 2, (BUFFERS + 0x100, 1000, NEXT | WRITE, 3));
    let parts = guest::descriptor(parts, 3, (BUFFERS + 0xf00, 25, WRITE, 0)).with([OFFER, 0, RUN]);
    let no_status = guest::descriptor(start(0), 0, (BUFFERS, 16, 0, 0)).with([OFFER, 0, RUN]);
    let short = guest::descriptor(start(0), 0, (BUFFERS, 15, NEXT, 1));
    let short = guest::descriptor(short, 1, (BUFFERS + 64, 1, WRITE, 0)).with([OFFER, 0, RUN]);
    let broken = request(start(0), FLUSH, 0, 0, true).with([guest::AVAILABLE_INDEX, 0xff, 0xff, RUN]);
    let seeds = [both, bounced, read_only, discarded, zeroed, beyond, odd, parts, no_status, short, broken];
    seeds.into_iter().map(Seed::done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_reach_each_request_and_each_refusal() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let expected = [
            [2048, 1, 1024, 1, 1, 0, 0, 0, 0, 0],
            [512, 1, 1024, 1, 0, 0, 0, 0, 0, 0],
            [512, 1, 0, 0, 0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 2, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 3, 0],
            [0, 0, 0, 0, 1, 0, 0, 0, 1, 1],
            [1024, 1, 0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            [0; 10],
        ];
        assert_eq!(done, expected);
    }
}
