//! A chain of descriptors, and what the standard says of it (`virtio 1.4 §2.7.5`).

use std::ops::Range;

use super::Snapshot;

/// A part of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub len: u64,
    pub writable: bool,
}

impl Segment {
    /// Its addresses; it must be in memory.
    pub fn range(&self) -> Range<u64> {
        self.address..self.address + self.len
    }

    /// Whether it shares bytes with `range`.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.address < range.end && range.start < self.address + self.len
    }
}

/// What the standard says of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It describes buffers.
    Sound,
    /// It does not: an address that is no memory, a loop, an index beyond the table.
    Unsound,
    /// A driver must not do that, and a device may make of it what it likes.
    Undefined,
}

/// A chain of descriptors.
#[derive(Debug, Clone)]
pub struct Chain {
    pub head: u16,
    /// The segments that are in memory, in order. Of an unsound chain as far as it can be followed.
    pub segments: Vec<Segment>,
    /// Where an indirect table was read.
    pub tables: Vec<Range<u64>>,
    pub verdict: Verdict,
}

impl Chain {
    /// Whether all of it has one direction.
    pub fn is_all(&self, writable: bool) -> bool {
        self.segments.iter().all(|segment| segment.writable == writable)
    }

    /// The bytes of one direction.
    pub fn len(&self, writable: bool) -> u64 {
        self.segments.iter().filter(|segment| segment.writable == writable).map(|segment| segment.len).sum()
    }

    /// What `ram` has in the segments of one direction.
    pub fn bytes(&self, ram: &Snapshot, writable: bool) -> Vec<u8> {
        let segments = self.segments.iter().filter(|segment| segment.writable == writable);
        segments.flat_map(|segment| ram.get(segment.address, segment.len).unwrap_or_default()).copied().collect()
    }

    /// Whether it, or a table of it, shares bytes with `range`.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        self.tables.iter().any(overlaps) || self.segments.iter().any(|segment| segment.overlaps(range))
    }
    /// Notes what the standard says of it as far as it was followed. What is undefined stays so.
    pub(super) fn judge(mut self, verdict: Verdict) -> Self {
        self.verdict = match (self.verdict, verdict) {
            (Verdict::Undefined, _) | (_, Verdict::Undefined) => Verdict::Undefined,
            (_, verdict) => verdict,
        };
        self
    }

    /// Adds a segment, which may make it unsound.
    pub(super) fn add(&mut self, ram: &Snapshot, segment: Segment) {
        let Segment { address, len, writable } = segment;
        let verdict = if ram.get(address, len).is_some() {
            // What the driver reads comes after what the device reads (§2.7.4.2).
            let misplaced = !writable && self.segments.iter().any(|segment| segment.writable);
            self.segments.push(segment);
            if misplaced { Verdict::Unsound } else { Verdict::Sound }
        } else if len == 0 || ram.get(address, 1).is_some() {
            // Nothing at no address, and a buffer of which only the beginning is memory.
            Verdict::Undefined
        } else {
            Verdict::Unsound
        };
        if verdict != Verdict::Sound {
            self.verdict = if self.verdict == Verdict::Undefined { Verdict::Undefined } else { verdict };
        }
    }
}
