//! The archive that Linux unpacks as its initramfs: cpio's `newc` format
//! (Linux `Documentation/driver-api/early-userspace/buffer-format.rst`).

use std::io::Write;

use cpio::newc::{Builder, trailer};

use crate::error::{Context, Result};

/// An archive being written. Every entry belongs to root, and the same calls produce the same bytes.
#[derive(Default)]
pub(crate) struct Cpio {
    bytes: Vec<u8>,
    inode: u32,
}

const DIRECTORY: u32 = 0o040_755;
const SYMLINK: u32 = 0o120_777;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_600;

impl Cpio {
    /// Adds a directory. Add parents first: the kernel does not create them.
    pub(crate) fn directory(&mut self, path: &str) -> Result<()> {
        self.entry(path, DIRECTORY, (0, 0), &[])
    }

    /// Adds a regular file with the permission bits `mode`.
    pub(crate) fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> Result<()> {
        self.entry(path, REGULAR | mode, (0, 0), contents)
    }

    /// Adds a symbolic link at `path` that points to `target`.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        self.entry(path, SYMLINK, (0, 0), target.as_bytes())
    }

    /// Adds a character device with the numbers `major` and `minor`.
    pub(crate) fn character_device(&mut self, path: &str, major: u32, minor: u32) -> Result<()> {
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[])
    }

    /// The finished archive.
    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        trailer(self.bytes).context("writing an initramfs")
    }

    fn entry(&mut self, path: &str, mode: u32, (major, minor): (u32, u32), contents: &[u8]) -> Result<()> {
        self.inode += 1;
        let entry = Builder::new(path).ino(self.inode).nlink(1).mode(mode).rdev_major(major).rdev_minor(minor);
        let length = u32::try_from(contents.len()).context(path)?;
        let mut writer = entry.write(&mut self.bytes, length);
        writer.write_all(contents).and_then(|()| writer.finish()).map(drop).context(path)
    }
}
