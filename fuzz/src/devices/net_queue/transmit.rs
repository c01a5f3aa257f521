//! Predicts transmitted frames to the byte. The backend is a file to which the device appends each frame.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use virtio_devices::Counter;
use virtio_devices::testing::{NetSteps, Step};

use super::{
    CSUM, EVENT_IDX, FRAME, HEADER, HOST_ECN, HOST_TSO4, HOST_TSO6, HOST_UFO, HOST_USO, KINDS, LINK, MAC, RUN, Then,
    has,
};
use crate::guest::{BUFFERS, Chain, Driver, NEXT, Snapshot, Verdict};
use crate::input::Input;

const ETHERNET_HEADER: u64 = 14;
/// The longest frame: 64 KiB, an Ethernet header and two VLAN tags.
const MAX_FRAME: u64 = 65_558;
/// The address of frames' headers.
const HEADER_AT: u64 = 0xf00;
/// The most bytes of a frame in one descriptor: up to the end of the buffers, across two memory regions.
const MAX_PIECE: u32 = 0x4000;

/// The header of a frame of `len` bytes as passed to the backend, or `None` if the driver must not send it.
fn checked_header(mut header: [u8; HEADER], len: u64, features: u64) -> Option<[u8; HEADER]> {
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    if header[0] & 1 == 1 {
        // The two bytes of the checksum must be inside the frame.
        (has(features, CSUM) && half(6) + half(8) + 2 <= len).then_some(())?;
    }
    let (ecn, kind) = (header[1] & 0x80 != 0, header[1] & 0x7f);
    let feature = match kind {
        0 => None,
        1 => Some(HOST_TSO4),
        3 => Some(HOST_UFO),
        4 => Some(HOST_TSO6),
        5 => Some(HOST_USO),
        _ => return None,
    };
    if let Some(feature) = feature {
        (has(features, feature) && half(4) > 0).then_some(())?;
    }
    (!ecn || matches!(kind, 1 | 4) && has(features, HOST_ECN)).then_some(())?;
    header[0] &= 1;
    (header[10], header[11]) = (0, 0);
    Some(header)
}

/// A transmit queue, and its output file.
pub struct Transmit {
    driver: Driver,
    steps: NetSteps,
    features: u64,
    link: bool,
    file: File,
    /// The expected contents of the file.
    sent: Vec<u8>,
    /// The expected counters.
    counts: Vec<(Counter, u64)>,
}

impl Transmit {
    pub fn new(input: &mut Input<'_>, features: u64) -> Self {
        let driver = Driver::new(input, has(features, EVENT_IDX));
        driver.fill_buffers();
        let file = File::from(memfd_create("frames", MemfdFlags::CLOEXEC).expect("a file in memory"));
        let backend = file.try_clone().expect("a second descriptor");
        let steps = NetSteps::new(Driver::memory(), backend.into(), MAC, features);
        Self { driver, steps, features, link: true, file, sent: Vec::new(), counts: Vec::new() }
    }

    pub fn apply(&mut self, input: &mut Input<'_>) -> Then {
        match input.u8() % KINDS {
            RUN => return self.run(),
            FRAME => self.make_available(input),
            LINK => {
                self.link = input.u8() & 1 == 1;
                self.steps.set_link(self.link);
            }
            kind => self.driver.apply(kind, input),
        }
        Then::GoesOn
    }

    /// Makes a well-formed frame available: a header from the input, and pieces of a buffer.
    fn make_available(&mut self, input: &mut Input<'_>) {
        let (len, pieces) = (u32::from(input.u16()), u32::from(input.u8() % 3) + 1);
        let [flags, gso, size, checksum] = input.array();
        let header = HEADER_AT + 16 * u64::from(self.driver.next_free());
        self.driver.store(header, &[flags, gso, 54, 0, size, 0, checksum, 0, 6, 0, 0, 0]);
        let first = u64::from(self.driver.next_free());
        let at = |n: u32| ((first + u64::from(n)) % u64::from(self.driver.size)) as u16;
        for n in 1..=pieces {
            let part = if n == pieces { len - len / pieces * (pieces - 1) } else { len / pieces };
            let flags = if n == pieces { 0 } else { NEXT };
            self.driver.set(at(n), (BUFFERS.into(), part.min(MAX_PIECE), flags, at(n + 1)));
        }
        self.driver.set(at(0), (header, HEADER as u32, NEXT, at(1)));
        self.driver.offer(at(0));
    }

    fn count(&mut self, counter: Counter, amount: u64) {
        match self.counts.iter_mut().find(|(other, _)| *other == counter) {
            Some((_, count)) => *count += amount,
            None => self.counts.push((counter, amount)),
        }
    }

    /// The required result for a chain: the bytes for the backend, or the reason for dropping it.
    fn expect(&self, chain: &Chain, ram: &Snapshot) -> Result<Vec<u8>, Counter> {
        // Bytes beyond the longest frame are not read, so a fault there is not detected.
        let readable = chain.segments.iter().take_while(|segment| !segment.writable);
        if readable.map(|segment| segment.len).sum::<u64>() > HEADER as u64 + MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        if chain.verdict == Verdict::Unsound || !chain.is_all(false) {
            return Err(Counter::TxBadChains);
        }
        let frame_len = chain.len(false).checked_sub(HEADER as u64).filter(|len| *len >= ETHERNET_HEADER);
        let frame_len = frame_len.ok_or(Counter::TxTooShort)?;
        if frame_len > MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        let mut bytes = chain.bytes(ram, false);
        let header = bytes.first_chunk_mut::<HEADER>().expect("it is long enough");
        *header = checked_header(*header, frame_len, self.features).ok_or(Counter::TxBadHeaders)?;
        if self.link { Ok(bytes) } else { Err(Counter::TxLinkDown) }
    }

    fn run(&mut self) -> Then {
        let shared = self.driver.queue.clone();
        let Some(mut queue) = self.steps.transmit(&shared) else {
            assert!(!self.driver.usual_place);
            return Then::Ends;
        };
        if !self.driver.usual_place {
            Driver::run_anyhow(|| self.steps.step(&mut queue));
            return Then::GoesOn;
        }
        let (mut ram, old) = (Snapshot::take(), self.driver.given);
        let Some(chains) = self.driver.waiting(&ram) else {
            assert_eq!(self.steps.step(&mut queue), Step::Broken);
            return Then::Ends;
        };
        let used = self.driver.devices_part();
        if chains.iter().any(|chain| chain.verdict == Verdict::Undefined || chain.touches(&used)) {
            self.steps.step(&mut queue);
            return Then::Ends;
        }
        for chain in &chains {
            match self.expect(chain, &ram) {
                Ok(bytes) => {
                    self.count(Counter::TxFrames, 1);
                    self.count(Counter::TxBytes, (bytes.len() - HEADER) as u64);
                    self.sent.extend(bytes);
                }
                Err(reason) => self.count(reason, 1),
            }
        }
        self.driver.taken = self.driver.taken.wrapping_add(chains.len() as u16);
        for chain in &chains {
            self.driver.expect_used(&mut ram, chain.head, 0);
        }
        assert_eq!(self.steps.step(&mut queue), Step::Doorbell, "the chains fit into one batch");
        self.compare(&ram, old, chains.is_empty());
        Then::GoesOn
    }

    fn compare(&self, expected: &Snapshot, old: u16, idle: bool) {
        let after = Snapshot::take();
        let used = self.driver.devices_part();
        // The device may choose whether it wants doorbells. If it was idle, it may have rewritten the used index.
        let index = if idle { used.start + 4 } else { used.start + 2 };
        let free = [used.start..index, used.end - 2..used.end];
        assert_eq!(after.differs_from(expected, &free), None, "the device wrote where it must not");
        for counter in Counter::ALL.iter().filter(|counter| counter.name().starts_with("tx_")) {
            let expected = self.counts.iter().find(|(other, _)| other == counter).map_or(0, |(_, count)| *count);
            assert_eq!(self.steps.count(*counter), expected, "{counter:?}");
        }
        assert_eq!(self.file.metadata().expect("its length").len(), self.sent.len() as u64);
        assert_eq!(self.steps.take_interrupt(), self.driver.wants_interrupt(&after, old));
        assert!(self.driver.wants_doorbell(&after, self.driver.taken), "the device would not be woken");
    }

    /// Checks the contents of the file. Returns the number of frames sent and dropped.
    pub fn finish(self) -> (u64, u64) {
        let mut written = vec![0; self.sent.len()];
        self.file.read_exact_at(&mut written, 0).expect("the file has all bytes sent");
        assert!(written == self.sent, "the bytes sent are not the driver's");
        let dropped =
            self.counts.iter().filter(|(counter, _)| !matches!(counter, Counter::TxFrames | Counter::TxBytes));
        (self.steps.count(Counter::TxFrames), dropped.map(|(_, count)| count).sum())
    }
}
