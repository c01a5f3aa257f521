//! Frames of pages: a table of runs, and the bytes of those that are not zero.

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
    /// True if all its bytes are zero, and do not follow.
    pub is_zero: bool,
}

/// The pages of a frame: runs by ascending addresses, which do not overlap. The bytes of those that are not zero
/// follow, in the same order.
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

    /// Number of bytes that follow.
    pub const fn data(&self) -> usize {
        self.data
    }

    /// True if there is none.
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Forgets all runs.
    pub fn clear(&mut self) {
        self.ranges.clear();
        self.data = 0;
    }

    /// Adds a run behind those that are there, joined with the last where it continues that. Returns false, and adds
    /// nothing, if the frame is full.
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

    /// The header and the table, as bytes; [`Self::data`] bytes are to follow.
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

    /// Number of bytes of the table that follow the first eight of a body, which are `count`.
    ///
    /// # Errors
    ///
    /// There are more runs than a frame may have, or none.
    pub fn table_len(count: [u8; TABLE]) -> Result<usize, WireError> {
        match usize::try_from(u64::from_le_bytes(count)) {
            Ok(count) if (1..=MAX_RANGES).contains(&count) => Ok(count * RANGE),
            _ => Err(WireError::Field("number of ranges")),
        }
    }

    /// Reads the `table` of a frame whose body has `len` bytes.
    ///
    /// # Errors
    ///
    /// It is not one of pages.
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
