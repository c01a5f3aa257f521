//! Frames of pages: a table of runs, and the bytes of nonzero runs.

use super::bounds::{MAX_DATA, MAX_RANGES, PAGE, RANGE, TABLE};
use super::error::{WireError, u32_at, u64_at};
use super::frame::{Header, Kind};

/// A run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First guest physical address, a multiple of [`PAGE`].
    pub start: u64,
    /// Length in bytes, a multiple of [`PAGE`], not 0.
    pub len: u32,
    /// True if all bytes are zero, and are not sent.
    pub is_zero: bool,
}

/// Table of a frame: disjoint runs by ascending address. The bytes of nonzero runs follow, in the same order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pages {
    ranges: Vec<Range>,
    data: usize,
}

impl Pages {
    /// The runs.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Number of page bytes in the frame.
    pub const fn data(&self) -> usize {
        self.data
    }

    /// True if there are no runs.
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Removes all runs.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.data = 0;
    }

    /// Appends a run, merged with the last one if adjacent. Returns false without a change if the frame is full.
    pub fn push(&mut self, run: Range) -> bool {
        let data = self.data + if run.is_zero { 0 } else { run.len as usize };
        if data > MAX_DATA {
            return false;
        }
        if let Some(last) = self.ranges.last_mut()
            && last.is_zero == run.is_zero
            && last.start + u64::from(last.len) == run.start
            && let Some(len) = last.len.checked_add(run.len)
        {
            last.len = len;
        } else if self.ranges.len() < MAX_RANGES {
            self.ranges.push(run);
        } else {
            return false;
        }
        self.data = data;
        true
    }

    /// Serializes header and table; [`Self::data`] bytes follow.
    pub fn bytes(&self) -> Vec<u8> {
        let len = TABLE + self.ranges.len() * RANGE + self.data;
        let mut bytes = Header { kind: Kind::Pages, len: len as u32 }.bytes().to_vec();
        bytes.extend((self.ranges.len() as u64).to_le_bytes());
        for Range { start, len, is_zero } in &self.ranges {
            bytes.extend(start.to_le_bytes());
            bytes.extend(len.to_le_bytes());
            bytes.extend(u32::from(*is_zero).to_le_bytes());
        }
        bytes
    }

    /// Returns the length of the table from `count`, the first eight bytes of a body.
    ///
    /// # Errors
    ///
    /// Fails if there are no runs, or too many.
    pub fn table_len(count: [u8; TABLE]) -> Result<usize, WireError> {
        match usize::try_from(u64::from_le_bytes(count)) {
            Ok(count) if (1..=MAX_RANGES).contains(&count) => Ok(count * RANGE),
            _ => Err(WireError::Field("number of ranges")),
        }
    }

    /// Parses the `table` of a frame whose body has `len` bytes.
    ///
    /// # Errors
    ///
    /// Fails if the table is invalid.
    pub fn read(table: &[u8], len: u32) -> Result<Self, WireError> {
        let (mut pages, mut next) = (Self::default(), 0);
        for entry in table.chunks(RANGE) {
            let (start, len, zero) = (u64_at(entry, 0)?, u32_at(entry, 8)?, u32_at(entry, 12)?);
            let end = start.checked_add(len.into()).ok_or(WireError::Field("range"))?;
            let is_aligned = start.is_multiple_of(PAGE) && u64::from(len).is_multiple_of(PAGE);
            if !is_aligned || len == 0 || start < next || zero > 1 || pages.ranges.len() == MAX_RANGES {
                return Err(WireError::Field("range"));
            }
            next = end;
            let is_zero = zero == 1;
            pages.data += if is_zero { 0 } else { len as usize };
            if pages.data > MAX_DATA {
                return Err(WireError::Field("range"));
            }
            pages.ranges.push(Range { start, len, is_zero });
        }
        if TABLE + table.len() + pages.data != len as usize {
            return Err(WireError::Field("length"));
        }
        Ok(pages)
    }
}
