//! Reasons why a file cannot be persistent memory.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::spec::PmemSpec;
use crate::ErrorKind;

/// Reason why a persistent memory device cannot be opened: one line, to follow the option's name.
#[derive(Debug, Error)]
pub enum PmemError {
    /// The file, or the folder, cannot be used.
    #[error(
        "file={}: cannot be {action}: {error}; give a file, a block device, or a folder with size=",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Failed action: "opened".
        action: &'static str,
        /// Cause.
        error: io::Error,
    },
    /// The path is neither a file nor a block device nor a folder.
    #[error("file={}: is not a file; give a file, a block device, or a folder with size=", .0.display())]
    Kind(PathBuf),
    /// The path is a folder, and no size is given for the temporary file.
    #[error("file={}: is a folder; add size= for a temporary file in it, or give a file", .0.display())]
    Folder(PathBuf),
    /// The file is too short.
    #[error("file={},size={size}: the file has {len} bytes; give at most that, or enlarge it", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The requested size, in bytes.
        size: u64,
        /// Length of the file in bytes.
        len: u64,
    },
    /// No such memory has this size.
    #[error(
        "file={}: its size, {size} bytes, is not a multiple of 2M, or is zero or above {} GiB; give size=, or change \
         the file's: truncate -s %2M {}", path.display(), PmemSpec::MOST >> 30, path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Size in bytes.
        size: u64,
    },
}

impl PmemError {
    /// Class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File { error, .. } => match error.kind() {
                io::ErrorKind::NotFound => ErrorKind::Missing,
                io::ErrorKind::PermissionDenied => ErrorKind::Denied,
                io::ErrorKind::OutOfMemory => ErrorKind::Host,
                _ => ErrorKind::Unsuitable,
            },
            Self::Kind(_) | Self::Folder(_) | Self::TooShort { .. } | Self::Size { .. } => ErrorKind::Unsuitable,
        }
    }
}
