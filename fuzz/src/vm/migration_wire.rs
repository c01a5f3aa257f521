//! A live migration's peer that sends any bytes on a connection, from its greeting to its end.
//!
//! The input is the peer's data. Received pages must be in guest memory as sent and nowhere else, a refusal is one
//! line, and only Go in its turn starts the guest.

use std::cell::Cell;
use std::io::{self, Read};

use virtio_devices::GuestMap;
use vm_memory::{Bytes, GuestAddress};
use vmm::migration::handover::target::{Action, Event, Phase, TargetMachine};
use vmm::migration::incoming::{Incoming, Item, ReadError};
use vmm::migration::loader::Loader;
use vmm::migration::wire::{
    Document, Features, Frame, GREETING, Greeting, Kind, MAGIC, MAX_DOCUMENT, MAX_LINE, OLDEST, PAGE, Pages, Part,
    Range, Role, VERSION,
};

/// The guest's memory: three pages, a hole, and another three.
const REGIONS: [(u64, usize); 2] = [(0, 0x3000), (0x10_000, 0x3000)];

/// The peer's bytes, and the number read so far.
struct Peer<'a> {
    bytes: &'a [u8],
    read: &'a Cell<usize>,
}

impl Read for Peer<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = &self.bytes[self.read.get()..];
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        self.read.set(self.read.get() + len);
        Ok(len)
    }
}

/// Result of an input.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    greeted: bool,
    frames: usize,
    pages: u64,
    documents: usize,
    started: bool,
    /// True if the peer ended in the middle of a message, and was not refused.
    ended: bool,
}

/// Runs an input.
pub fn run(input: &[u8]) {
    follow(input);
}

fn follow(input: &[u8]) -> Seen {
    let read = Cell::new(0);
    let mut target = Target::new(input, &read);
    let refused = match target.greet() {
        Ok(()) => loop {
            if let Err(refused) = target.step() {
                break refused;
            }
        },
        Err(refused) => refused,
    };
    let line = refused.to_string();
    assert!(!line.contains(char::is_control) && !line.is_empty() && line.len() < 2 * MAX_LINE, "{line:?}");
    target.seen.ended = matches!(refused, ReadError::Lost(_));
    target.seen
}

struct Target<'a> {
    input: &'a [u8],
    read: &'a Cell<usize>,
    incoming: Incoming<Peer<'a>>,
    memory: GuestMap,
    loader: Loader,
    /// The memory, a second time.
    expected: Vec<(u64, Vec<u8>)>,
    document: Document,
    machine: TargetMachine,
    seen: Seen,
}

impl<'a> Target<'a> {
    fn new(input: &'a [u8], read: &'a Cell<usize>) -> Self {
        let ranges = REGIONS.map(|(start, len)| (GuestAddress(start), len));
        let memory = GuestMap::from_ranges(&ranges).expect("memory for a guest");
        let mut machine = TargetMachine::new();
        machine.on(Event::Accepted);
        Self {
            input,
            read,
            incoming: Incoming::new(Peer { bytes: input, read }),
            loader: Loader::new(memory.clone()),
            memory,
            expected: REGIONS.map(|(start, len)| (start, vec![0; len])).into(),
            document: Document::default(),
            machine,
            seen: Seen::default(),
        }
    }

    fn greet(&mut self) -> Result<(), ReadError> {
        let greeting = self.incoming.greeting()?;
        assert!(self.input.starts_with(&MAGIC) && self.read.get() == GREETING);
        assert_eq!(Greeting::read(&greeting.bytes()), Ok(greeting));
        if let Ok(version) = greeting.common_version() {
            assert!(version >= OLDEST && version <= VERSION && version >= greeting.oldest);
        }
        self.machine.on(Event::Greeted);
        self.seen.greeted = true;
        Ok(())
    }

    fn step(&mut self) -> Result<(), ReadError> {
        let before = self.read.get();
        match self.incoming.receive()? {
            Item::Frame(frame) => {
                // A text line may be shown with other characters than it was sent with.
                let is_line = matches!(frame, Frame::Failed(_));
                assert!(is_line || frame.bytes() == self.input[before..self.read.get()], "{frame:?}");
                self.frame(frame)?;
            }
            Item::Pages(pages) => self.pages(&pages, before)?,
        }
        self.seen.frames += 1;
        Ok(())
    }

    fn frame(&mut self, frame: Frame) -> Result<(), ReadError> {
        let phase = self.machine.phase();
        let event = match &frame {
            Frame::Offer(part) | Frame::State(part) => {
                if !self.document.add(part)? {
                    return Ok(());
                }
                assert!(self.document.bytes().is_some_and(|bytes| bytes.len() <= MAX_DOCUMENT));
                self.document = Document::default();
                self.seen.documents += 1;
                if frame.kind() == Kind::Offer { Event::Offered } else { Event::Received }
            }
            Frame::Failed(line) => {
                assert!(line.len() <= MAX_LINE && !line.contains(char::is_control));
                Event::Frame(Kind::Failed)
            }
            frame => Event::Frame(frame.kind()),
        };
        let actions = self.machine.on(event);
        assert!(!actions.contains(&Action::StartGuest), "the locks are taken before");
        assert_eq!(actions.contains(&Action::TakeLocks), phase == Phase::Held && matches!(frame, Frame::Go(_)));
        // This side's own work succeeds.
        let work = [
            (Action::PrepareVm, Event::Prepared),
            (Action::LoadState, Event::Loaded),
            (Action::TakeLocks, Event::Locked),
        ];
        for (action, event) in work {
            if actions.contains(&action) {
                self.seen.started |= self.machine.on(event).contains(&Action::StartGuest);
            }
        }
        Ok(())
    }

    fn pages(&mut self, pages: &Pages, before: usize) -> Result<(), ReadError> {
        let table = pages.bytes();
        assert_eq!(table, self.input[before..self.read.get()]);
        let mut at = self.read.get();
        let loaded = self.incoming.load(pages, &self.loader);
        for range in pages.ranges() {
            let len = range.len as usize;
            let Some((start, region)) = self.expected.iter_mut().find(|(start, region)| {
                range.start >= *start && range.start + range.len as u64 <= *start + region.len() as u64
            }) else {
                assert!(loaded.is_err(), "pages that the guest does not have: {range:?}");
                break;
            };
            let place = &mut region[(range.start - *start) as usize..][..len];
            if range.is_zero {
                place.fill(0);
            } else if let Some(bytes) = self.input.get(at..at + len) {
                place.copy_from_slice(bytes);
                at += len;
            } else {
                assert!(matches!(loaded, Err(ReadError::Lost(_))));
                break;
            }
            self.seen.pages += range.len as u64 / PAGE;
        }
        loaded?;
        for (start, region) in &self.expected {
            let mut bytes = vec![0; region.len()];
            self.memory.read_slice(&mut bytes, GuestAddress(*start)).expect("the guest's memory");
            assert!(bytes == *region, "memory at {start:#x} is not what was sent");
        }
        Ok(())
    }
}

fn greeting(role: Role) -> Vec<u8> {
    let features = Features::default();
    Greeting { version: VERSION, oldest: OLDEST, role, connections: 1, features, session: [7; 16] }.bytes().into()
}

fn frames(frames: &[Frame]) -> Vec<u8> {
    frames.iter().flat_map(Frame::bytes).collect()
}

fn with_pages(ranges: &[(u64, u64, bool)]) -> Vec<u8> {
    let mut pages = Pages::default();
    for (start, count, is_zero) in ranges {
        assert!(pages.push(Range { start: *start, len: (count * PAGE) as u32, is_zero: *is_zero }));
    }
    let data = (0..pages.data()).map(|n| (n / 64) as u8 | 1);
    pages.bytes().into_iter().chain(data).collect()
}

fn document(kind: fn(Part) -> Frame, parts: &[&[u8]]) -> Vec<u8> {
    let count = parts.len();
    let frame = |(n, bytes): (usize, &&[u8])| kind(Part { is_last: n + 1 == count, bytes: bytes.to_vec() });
    frames(&parts.iter().enumerate().map(frame).collect::<Vec<_>>())
}

/// Seeds: a whole migration on one connection, the pages of another, messages that end a migration, and another
/// program.
pub fn seeds() -> Vec<Vec<u8>> {
    let whole = [
        greeting(Role::Control),
        document(Frame::Offer, &[b"{\"config\":", b"{}}"]),
        frames(&[Frame::Keepalive]),
        document(Frame::State, &[b"{}"]),
        frames(&[Frame::Go(None)]),
    ];
    let pages = [
        greeting(Role::Pages(0)),
        with_pages(&[(0, 2, false), (0x2000, 1, true), (0x10_000, 3, false)]),
        frames(&[Frame::Flush(0)]),
        with_pages(&[(0x1000, 1, true), (0x11_000, 1, false)]),
        frames(&[Frame::Flush(1)]),
    ];
    let outside = [greeting(Role::Pages(1)), with_pages(&[(0x2000, 2, false)])];
    let failed =
        [greeting(Role::Control), frames(&[Frame::Failed("no tap\n".into()), Frame::Cancel, Frame::Running(9)])];
    let foreign = vec![vec![1, 0, 0, 0, 0, 0, 0, 0], vec![0; 64]];
    [whole.to_vec(), pages.to_vec(), outside.to_vec(), failed.to_vec(), foreign].map(|parts| parts.concat()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_lead_to_a_started_guest_pages_and_refusals() {
        let seen: Vec<_> = seeds().iter().map(|seed| follow(seed)).collect();
        assert!(seen[0].started && seen[0].documents == 2 && seen[0].ended, "{:?}", seen[0]);
        assert_eq!((seen[1].pages, seen[1].frames, seen[1].ended), (8, 4, true));
        assert!(!seen[2].ended && seen[2].frames == 0 && seen[2].greeted);
        assert!(!seen[3].started && seen[3].frames == 3);
        assert_eq!(seen[4], Seen::default());
    }
}
