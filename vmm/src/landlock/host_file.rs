//! A file or folder of the host, as rules identify it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use landlock::{ABI, AccessFs, BitFlags};

/// A file or folder of the host.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostFile {
    /// Device and inode number.
    pub id: (u64, u64),
    is_folder: bool,
}

impl HostFile {
    /// The file at `path`, following symbolic links.
    pub(super) fn at(path: &Path) -> std::io::Result<Self> {
        let found = fs::metadata(path)?;
        Ok(Self { id: (found.dev(), found.ino()), is_folder: found.is_dir() })
    }

    /// The part of `access` that a rule for this file may contain.
    pub(super) fn legitimate(&self, access: BitFlags<AccessFs>) -> BitFlags<AccessFs> {
        if self.is_folder { access } else { access & AccessFs::from_file(ABI::V5) }
    }
}
