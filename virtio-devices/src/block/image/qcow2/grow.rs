//! Enlarges the disk of an image, in the image's file: changes the header, and adds a larger L1 table if needed.
//!
//! The write to the header's first block commits the change. If the program ends before it, the disk has its old size,
//! and afterwards its new one. Data written before it is unused until then.

use std::io;

use super::blocks::Blocks;
use super::header::{Header, Tables, l1_entries};
use super::refcounts::Refcounts;
use crate::block::error::ResizeError;

/// The header's fields from the size to the offset of the L1 table, with the encryption method between them.
const FIELDS: u64 = 24;

/// Enlarges the disk of the image in `file`, which has `header`, to `size` bytes. The file ends at `end`.
///
/// # Errors
///
/// The disk keeps its old size then.
pub(super) fn grow(file: &Blocks<'_>, header: &Header, size: u64, end: u64) -> Result<(), ResizeError> {
    let Tables { l1, l1_entries: entries, .. } = header.tables;
    let cluster = u64::from(header.cluster);
    let needed = l1_entries(size, header.cluster).ok_or(ResizeError::TooLarge)?;
    let bytes = entries * 8;
    let whole = bytes.next_multiple_of(cluster);
    if needed <= entries {
        return Ok(announce(file, size, l1, entries)?);
    }
    if needed * 8 <= whole {
        // The rest of the table's last cluster belongs to the table.
        file.write(l1 + bytes, &vec![0; (whole - bytes) as usize])?;
        file.sync()?;
        return Ok(announce(file, size, l1, needed)?);
    }
    // At most as large as a table may be.
    let mut table = file.read(l1, bytes as usize)?;
    table.resize((needed * 8).next_multiple_of(cluster) as usize, 0);
    let refcounts = Refcounts::new(file, header);
    let place = refcounts.place(end, &table)?;
    announce(file, size, place, needed)?;
    // If this fails, the old table's clusters are leaked.
    let _ = refcounts.drop_references(l1, whole);
    Ok(())
}

/// Writes the header's fields.
fn announce(file: &Blocks<'_>, size: u64, l1: u64, entries: u64) -> io::Result<()> {
    let old = file.read(FIELDS, 24)?;
    let entries = u32::try_from(entries).map_err(|_| io::ErrorKind::InvalidInput)?;
    let method = old.get(8..12).unwrap_or_default();
    let new = [&size.to_be_bytes()[..], method, &entries.to_be_bytes(), &l1.to_be_bytes()].concat();
    file.write(FIELDS, &new).and_then(|()| file.sync()).inspect_err(|_| {
        // The old table is still there.
        let _ = file.write(FIELDS, &old);
    })
}
