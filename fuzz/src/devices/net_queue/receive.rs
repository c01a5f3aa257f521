//! Checks received frames from the driver's side.
//!
//! Each received frame must be one that the backend delivered, whole and in order, in the first available buffers.
//! All others must be counted as dropped for a valid reason. The device may write only buffers and the used ring, and
//! may wait for a frame only when there is none. The backend is a pipe that preserves frame boundaries or, for frames
//! too long for that, a file with one frame.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use virtio_devices::Counter;
use virtio_devices::testing::{NetSteps, Step, StepQueue};

use super::{EVENT_IDX, FRAME, GUEST_CSUM, HEADER, KINDS, LINK, MAC, MRG_RXBUF, RUN, Then, has};
use crate::guest::{Chain, Driver, Segment, Snapshot, Verdict};
use crate::input::Input;

const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
const ETHERNET_HEADER: usize = 14;
/// The longest frame that a pipe keeps whole.
const PIPE_FRAME: usize = 4096;

/// The counters of dropped frames, by reason.
const DROPPED: [Counter; 5] =
    [Counter::RxTooLong, Counter::RxTooShort, Counter::RxFiltered, Counter::RxLinkDown, Counter::RxStopped];

/// The backend's source of frames.
enum Source {
    /// Both ends of a pipe.
    Pipe { reader: File, writer: File },
    /// A file that ends after one frame.
    File(File),
}

impl Source {
    fn new(long: bool) -> (Self, OwnedFd) {
        let shared = |file: &File| file.try_clone().expect("a second descriptor").into();
        if long {
            let file = File::from(memfd_create("frame", MemfdFlags::CLOEXEC).expect("a file in memory"));
            let backend = shared(&file);
            return (Self::File(file), backend);
        }
        let flags = PipeFlags::DIRECT | PipeFlags::NONBLOCK | PipeFlags::CLOEXEC;
        let (reader, writer) = pipe_with(flags).expect("a pipe");
        let reader = File::from(reader);
        let backend = shared(&reader);
        (Self::Pipe { reader, writer: writer.into() }, backend)
    }

    /// True if the file has an unread frame.
    fn is_unread(file: &mut File) -> bool {
        let (position, metadata) = (file.stream_position(), file.metadata());
        position.expect("its position") < metadata.expect("its length").len()
    }

    /// Adds a frame. Returns true if it was accepted, and true if it replaced an unread one.
    fn put(&mut self, frame: &mut Vec<u8>) -> (bool, bool) {
        match self {
            Self::Pipe { writer, .. } => {
                frame.truncate(PIPE_FRAME);
                // A full pipe accepts nothing.
                (!frame.is_empty() && writer.write(frame).is_ok(), false)
            }
            Self::File(file) => {
                let replaces = Self::is_unread(file);
                file.set_len(0).expect("it can be emptied");
                file.rewind().expect("it can be read again");
                file.write_all_at(frame, 0).expect("memory for a frame");
                (!frame.is_empty(), replaces)
            }
        }
    }

    /// Removes the unread frames, and returns their number.
    fn drain(&mut self) -> u64 {
        match self {
            Self::Pipe { reader, .. } => {
                let mut frame = [0; PIPE_FRAME];
                std::iter::from_fn(|| reader.read(&mut frame).ok()).count() as u64
            }
            Self::File(file) => Self::is_unread(file).into(),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Pipe { reader, .. } => rustix::io::ioctl_fionread(reader).expect("it is a pipe") == 0,
            Self::File(_) => true,
        }
    }
}

/// A receive queue, and the frames passed to its backend.
pub struct Receive {
    driver: Driver,
    steps: NetSteps,
    features: u64,
    source: Source,
    /// The frames that the driver has not seen yet, each with its header.
    frames: VecDeque<Vec<u8>>,
    fed: u64,
    /// Numbers of frames that are shorter than an Ethernet header, and of frames with another destination.
    short: u64,
    others: u64,
    link: bool,
    promiscuous: bool,
    /// True if frames can be recognized. They cannot in buffers that overlap, or that the driver changes while a frame
    /// waits in them.
    telling: bool,
    /// The available segments, and guest memory, at the time when a frame began to wait.
    held: Option<(Vec<Segment>, Snapshot)>,
}

impl Receive {
    pub fn new(input: &mut Input<'_>, features: u64, long: bool) -> Self {
        let driver = Driver::new(input, has(features, EVENT_IDX));
        let (source, backend) = Source::new(long);
        let steps = NetSteps::new(Driver::memory(), backend, MAC, features);
        Self {
            driver,
            steps,
            features,
            source,
            frames: VecDeque::new(),
            fed: 0,
            short: 0,
            others: 0,
            link: true,
            promiscuous: true,
            telling: true,
            held: None,
        }
    }

    /// Runs the operations. Returns the number of frames received and dropped.
    pub fn run(mut self, input: &mut Input<'_>) -> (u64, u64) {
        let shared = self.driver.queue.clone();
        let Some(mut queue) = self.steps.receive(&shared) else {
            assert!(!self.driver.usual_place);
            return (0, 0);
        };
        let mut then = Then::GoesOn;
        while then == Then::GoesOn && !input.is_empty() {
            match input.u8() % KINDS {
                RUN => then = self.run_queue(&mut queue),
                FRAME => self.feed(input.u16().into(), input.u8() & 1 == 1),
                LINK => {
                    let choice = input.u8();
                    (self.link, self.promiscuous) = (choice & 1 == 1, choice & 2 == 0);
                    self.steps.set_link(self.link);
                    self.steps.set_promiscuous(self.promiscuous);
                }
                kind => self.driver.apply(kind, input),
            }
        }
        let (received, dropped) = (self.steps.count(Counter::RxFrames), self.dropped());
        let accounted = received + dropped + u64::from(queue.has_waiting()) + self.source.drain();
        assert_eq!(self.fed, accounted, "a frame was lost without being counted");
        (received, dropped)
    }

    fn dropped(&self) -> u64 {
        DROPPED.iter().map(|counter| self.steps.count(*counter)).sum()
    }

    /// Passes a frame of `len` bytes, including its header, to the backend. Its bytes differ from those of other
    /// frames.
    fn feed(&mut self, len: usize, to_other: bool) {
        let key = self.fed as u8;
        let mut frame: Vec<u8> = (0..len).map(|n| (n as u8).wrapping_mul(3) ^ (n >> 8) as u8 ^ key).collect();
        let mac = if to_other { OTHER } else { MAC };
        frame.iter_mut().skip(HEADER).zip(mac).for_each(|(to, from)| *to = from);
        let (taken, replaces) = self.source.put(&mut frame);
        if replaces {
            self.frames.pop_back();
            self.fed -= 1;
        }
        if taken {
            self.short += u64::from(frame.len() < HEADER + ETHERNET_HEADER);
            self.others += u64::from(to_other);
            self.frames.push_back(frame);
            self.fed += 1;
        }
    }

    /// Runs the queue until it waits.
    fn run_queue(&mut self, queue: &mut StepQueue<'_>) -> Then {
        if !self.driver.usual_place {
            Driver::run_anyhow(|| self.steps.step(queue));
            return Then::GoesOn;
        }
        loop {
            self.driver.mend_used_index();
            let before = Snapshot::take();
            let counted = |this: &Self, counter| this.steps.count(counter);
            let counters = [
                Counter::RxBackendErrors,
                Counter::RxBadChains,
                Counter::RxTooLong,
                Counter::RxLinkDown,
                Counter::RxFiltered,
                Counter::RxFrames,
            ];
            let old_counts = counters.map(|counter| counted(self, counter));
            let chains = self.driver.waiting(&before);
            let step = self.steps.step(queue);
            let Some(chains) = chains else {
                // While the link is down, frames are dropped without reading the ring.
                assert!(step == Step::Broken || !self.link, "a broken ring, and {step:?}");
                return Then::Ends;
            };
            if self.is_unclear(&chains) {
                return Then::Ends;
            }
            let counts: Vec<_> = counters.iter().zip(old_counts).map(|(n, old)| counted(self, *n) - old).collect();
            let [errors, bad, too_long, link_down, filtered, received] = counts[..] else { return Then::Ends };
            assert_ne!(step, Step::Broken);
            self.judge_telling(&before, &chains);
            let after = Snapshot::take();
            self.check_writes(&before, &after, &chains);
            self.check_used(&after, &chains, [bad, received]);
            self.check_dropped(&chains, too_long);
            self.check_reasons(link_down, filtered, received);
            self.check_wait(step, &after, errors > 0);
            if step != Step::More {
                let segments = chains.into_iter().flat_map(|chain| chain.segments).collect();
                self.held = queue.has_waiting().then_some((segments, after));
                return Then::GoesOn;
            }
        }
    }

    /// True if a chain leaves the device free to do anything, or is overwritten while it is read.
    fn is_unclear(&self, chains: &[Chain]) -> bool {
        let [descriptors, available] = self.driver.drivers_part();
        let mut parts = vec![descriptors, available, self.driver.devices_part()];
        parts.extend(chains.iter().flat_map(|chain| chain.tables.clone()));
        let mut written = chains.iter().flat_map(|chain| &chain.segments).filter(|segment| segment.writable);
        chains.iter().any(|chain| chain.verdict == Verdict::Undefined)
            || written.any(|segment| parts.iter().any(|part| segment.overlaps(part)))
    }

    /// Notes buffers that overlap, or that change while a frame waits in them: they do not show the written data.
    fn judge_telling(&mut self, before: &Snapshot, chains: &[Chain]) {
        let segments: Vec<_> = chains.iter().flat_map(|chain| &chain.segments).copied().collect();
        let overlap = segments.iter().enumerate().any(|(n, segment)| {
            segments.iter().skip(n + 1).any(|other| segment.len > 0 && segment.overlaps(&other.range()))
        });
        let changed = self.held.take().is_some_and(|(held, memory)| {
            let bytes = |ram: &Snapshot, segment: &Segment| ram.get(segment.address, segment.len).map(<[u8]>::to_vec);
            !segments.starts_with(&held) || held.iter().any(|segment| bytes(&memory, segment) != bytes(before, segment))
        });
        self.telling &= !overlap && !changed;
    }

    /// Checks that only available buffers and the used ring have changed.
    fn check_writes(&self, before: &Snapshot, after: &Snapshot, chains: &[Chain]) {
        let segments = chains.iter().flat_map(|chain| &chain.segments).filter(|segment| segment.writable);
        let mut allowed: Vec<_> = segments.map(Segment::range).collect();
        allowed.push(self.driver.devices_part());
        assert_eq!(after.differs_from(before, &allowed), None, "the device wrote where it must not");
    }

    /// Checks that the first available chains were returned, each either unusable or with a frame in it.
    fn check_used(&mut self, after: &Snapshot, chains: &[Chain], [bad, received]: [u64; 2]) {
        let old = self.driver.given;
        let used = self.driver.take_used(after);
        assert_eq!(self.steps.take_interrupt(), self.driver.wants_interrupt(after, old));
        // Chains whose head is beyond the ring cannot be returned. They are counted as bad.
        let empty = used.iter().filter(|(_, len)| *len == 0).count();
        let taken = used.len() + (bad as usize).checked_sub(empty).expect("every empty buffer is counted as bad");
        self.driver.taken = self.driver.taken.wrapping_add(taken as u16);
        let named: Vec<_> = chains[..taken].iter().filter(|chain| chain.head < self.driver.size).collect();
        let heads = named.iter().map(|chain| u32::from(chain.head));
        assert!(heads.eq(used.iter().map(|(head, _)| *head)), "buffers are used in order");
        let mut frame = Vec::new();
        let (mut delivered, mut missing) = (0, 0);
        for (chain, (_, len)) in named.into_iter().zip(used) {
            if len == 0 {
                let usable = chain.verdict == Verdict::Sound && chain.is_all(true) && chain.len(true) >= HEADER as u64;
                assert!(!usable, "a usable buffer is returned unused");
                continue;
            }
            let mut bytes = chain.bytes(after, true);
            if frame.is_empty() {
                missing = u16::from_le_bytes([bytes[10], bytes[11]]);
            }
            missing = missing.wrapping_sub(1);
            assert!(len as usize <= bytes.len(), "more is written than fits");
            assert!(missing == 0 || len as usize == bytes.len() || !self.telling, "a buffer is not filled");
            bytes.truncate(len as usize);
            frame.extend(bytes);
            if missing == 0 {
                delivered += 1;
                self.check_frame(&std::mem::take(&mut frame));
            }
        }
        assert!(delivered == received && frame.is_empty() || !self.telling, "only a part of a frame was delivered");
    }

    /// Checks that a frame comes from the backend, and after all frames received before.
    fn check_frame(&mut self, bytes: &[u8]) {
        if !self.telling {
            return;
        }
        let flags = if has(self.features, GUEST_CSUM) { 0xff } else { 0 };
        let position = self.frames.iter().position(|fed| {
            let (Some(head), Some(rest)) = (fed.get(..HEADER), fed.get(HEADER..)) else { return false };
            bytes[0] == head[0] & flags && bytes[1..10] == head[1..10] && bytes[HEADER..] == *rest
        });
        let position = position.expect("the frame comes from the backend");
        let wanted = self.promiscuous || self.frames[position][HEADER..].starts_with(&MAC);
        assert!(wanted, "the driver received a frame that it does not want");
        self.frames.drain(..=position);
    }

    /// With merged buffers, a frame may be dropped as too long only if the ring is full or a buffer is unusable.
    fn check_dropped(&self, chains: &[Chain], too_long: u64) {
        let usable =
            |chain: &Chain| chain.verdict == Verdict::Sound && chain.is_all(true) && chain.len(true) >= HEADER as u64;
        let room = chains.len() < usize::from(self.driver.size) && chains.iter().all(usable);
        assert!(!has(self.features, MRG_RXBUF) || !room || too_long == 0, "a frame was dropped that could have waited");
    }

    /// Checks that frames were dropped by link, filter or length with good reason.
    fn check_reasons(&self, link_down: u64, filtered: u64, received: u64) {
        assert!(if self.link { link_down == 0 } else { received == 0 }, "the link is up: {}", self.link);
        assert!(filtered == 0 || !self.promiscuous, "a frame that the driver wants was filtered");
        assert!(self.steps.count(Counter::RxTooShort) <= self.short, "a frame was wrongly dropped as too short");
        // With overlapping buffers, the device may see another address than the backend delivered.
        let rightly = self.steps.count(Counter::RxFiltered) <= self.others;
        assert!(rightly || !self.telling, "a frame for the driver was filtered");
    }

    /// Checks that the device waits for an event that can still occur.
    fn check_wait(&self, step: Step, after: &Snapshot, failed: bool) {
        if step == Step::Frame {
            assert!(self.source.is_empty(), "the device waits although there is a frame");
        }
        if step == Step::Doorbell && !failed {
            let left = self.driver.waiting(after).map_or(0, |chains| chains.len());
            let seen = self.driver.taken.wrapping_add(left as u16);
            assert!(self.driver.wants_doorbell(after, seen), "the device would not be woken");
        }
    }
}
