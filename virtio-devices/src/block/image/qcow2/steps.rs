//! A qcow2 image without a disk: for fuzz targets of other crates.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::Qcow2;
use crate::block::call::Call;
use crate::block::geometry::SECTOR;
use crate::block::image::access::{Access, ImageFormat, LockGranularity};
use crate::block::operation::Range;

/// An open image.
pub struct Qcow2Steps(Qcow2);

impl Qcow2Steps {
    /// Opens the image in a file; `None` if it is refused.
    pub fn open(file: OwnedFd, read_only: bool) -> Option<Self> {
        let format = ImageFormat::Qcow2 { backing_files: false };
        let access = Access { read_only, direct: false, format, sparse: true, lock: LockGranularity::ByteRange };
        Qcow2::open(Path::new("image"), file, access).ok().map(Self)
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.0.abilities().geometry.sectors.saturating_mul(SECTOR)
    }

    /// Fills `data` from `offset`; returns true on success.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> bool {
        self.0.read(data, offset).is_ok()
    }

    /// As [`Self::read`], writes `data`.
    pub fn write(&self, offset: u64, data: &[u8]) -> bool {
        self.0.write(data, offset, false).is_ok()
    }

    /// As [`Self::write`], zeroes `len` bytes, and frees their space if `unmap`.
    pub fn zero(&self, offset: u64, len: u64, unmap: bool) -> bool {
        let mut range = Range { offset, len };
        while range.len > 0 {
            let Ok(done) = self.0.execute(Call::Zero { range, unmap }) else { return false };
            let done = done as u64;
            range = Range { offset: range.offset.saturating_add(done), len: range.len.saturating_sub(done) };
        }
        true
    }

    /// Enlarges the disk; returns true on success.
    pub fn resize(&self, size: u64) -> bool {
        self.0.resize(size).is_ok()
    }

    /// Writes cached metadata; returns true on success.
    pub fn flush(&self) -> bool {
        self.0.execute(Call::Sync).is_ok()
    }
}
