//! What persistent memory is made of.

use std::path::PathBuf;

/// What a persistent memory device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PmemSpec {
    /// Its id, which its thread is named after.
    pub id: String,
    /// A file, a block device, or a folder for an unnamed temporary file.
    pub file: PathBuf,
    /// Its size in bytes, a multiple of [`Self::UNIT`]; `None` for that of the file.
    pub size: Option<u64>,
    /// Whether the file does not get what the guest writes.
    pub discard_writes: bool,
}

impl PmemSpec {
    /// The unit of sizes, in bytes: Linux maps such memory in pages of 2 MiB.
    pub const UNIT: u64 = 2 << 20;
    /// The largest size, in bytes: more than a guest can address beside its memory.
    pub const MOST: u64 = 1 << 45;
}
