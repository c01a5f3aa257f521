//! Description of persistent memory.

use std::path::PathBuf;

/// Description of a persistent memory device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PmemSpec {
    /// Id, also the name of its thread.
    pub id: String,
    /// A file, a block device, or a folder for an unnamed temporary file.
    pub file: PathBuf,
    /// Size in bytes, a multiple of [`Self::UNIT`]; `None` for the file's.
    pub size: Option<u64>,
    /// True if the guest's writes are not written to the file.
    pub discard_writes: bool,
}

impl PmemSpec {
    /// The unit of sizes, in bytes: Linux maps such memory in pages of 2 MiB.
    pub const UNIT: u64 = 2 << 20;
    /// The largest size, in bytes: more than a guest can address in addition to its memory.
    pub const MOST: u64 = 1 << 45;
}
