//! A descriptor chain, and its validity by the standard (`virtio 1.4 §2.7.5`).

use std::ops::Range;

use super::Snapshot;

/// A buffer in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub len: u64,
    pub writable: bool,
}

impl Segment {
    /// Addresses of the segment. It must be in memory.
    pub fn range(&self) -> Range<u64> {
        self.address..self.address + self.len
    }

    /// True if it shares bytes with `range`.
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        self.address < range.end && range.start < self.address + self.len
    }
}

/// Verdict of the standard on a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Valid.
    Sound,
    /// Invalid: an address outside memory, a loop, or an index beyond the table.
    Unsound,
    /// A driver must not make such a chain, and a device may do anything with it.
    Undefined,
}

/// A chain of descriptors.
#[derive(Debug, Clone)]
pub struct Chain {
    pub head: u16,
    /// The segments that are in memory, in order. An unsound chain has those before the fault.
    pub segments: Vec<Segment>,
    /// The addresses of the indirect tables that were read.
    pub tables: Vec<Range<u64>>,
    pub verdict: Verdict,
}

impl Chain {
    /// True if all segments have this direction.
    pub fn is_all(&self, writable: bool) -> bool {
        self.segments.iter().all(|segment| segment.writable == writable)
    }

    /// The total length of the segments of one direction.
    pub fn len(&self, writable: bool) -> u64 {
        self.segments.iter().filter(|segment| segment.writable == writable).map(|segment| segment.len).sum()
    }

    /// The contents of the segments of one direction.
    pub fn bytes(&self, ram: &Snapshot, writable: bool) -> Vec<u8> {
        let segments = self.segments.iter().filter(|segment| segment.writable == writable);
        segments.flat_map(|segment| ram.get(segment.address, segment.len).unwrap_or_default()).copied().collect()
    }

    /// Writes `bytes` to the device-writable segments, in order.
    pub fn fill(&self, ram: &mut Snapshot, mut bytes: &[u8]) {
        for segment in self.segments.iter().filter(|segment| segment.writable) {
            let (part, rest) = bytes.split_at(bytes.len().min(segment.len as usize));
            ram.put(segment.address, part);
            bytes = rest;
        }
    }

    /// The address of the last device-writable byte, if there is any.
    pub fn last_writable(&self) -> Option<u64> {
        let last = self.segments.iter().rfind(|segment| segment.writable && segment.len > 0)?;
        Some(last.address + last.len - 1)
    }

    /// True if the chain, or one of its tables, shares bytes with `range`.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        self.tables.iter().any(overlaps) || self.segments.iter().any(|segment| segment.overlaps(range))
    }
    /// Sets the verdict on the chain so far. An undefined chain stays undefined.
    pub(super) fn judge(mut self, verdict: Verdict) -> Self {
        self.verdict = match (self.verdict, verdict) {
            (Verdict::Undefined, _) | (_, Verdict::Undefined) => Verdict::Undefined,
            (_, verdict) => verdict,
        };
        self
    }

    /// Adds a segment, which may make the chain unsound.
    pub(super) fn add(&mut self, ram: &Snapshot, segment: Segment) {
        let Segment { address, len, writable } = segment;
        let verdict = if ram.get(address, len).is_some() {
            // Readable segments must come before writable ones (§2.7.4.2).
            let misplaced = !writable && self.segments.iter().any(|segment| segment.writable);
            self.segments.push(segment);
            if misplaced { Verdict::Unsound } else { Verdict::Sound }
        } else if len == 0 || ram.get(address, 1).is_some() {
            // An empty segment outside memory, or a buffer with only its start in memory.
            Verdict::Undefined
        } else {
            Verdict::Unsound
        };
        if verdict != Verdict::Sound {
            self.verdict = if self.verdict == Verdict::Undefined { Verdict::Undefined } else { verdict };
        }
    }
}
