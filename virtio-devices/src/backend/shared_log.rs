//! A dirty log that others write to: the host's kernel, and processes behind vhost-user sockets.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{FileOffset, GuestMemoryBackend, MmapRegion, VolatileMemory};

use crate::{GuestMap, PAGE_SIZE};

/// The bytes of a word, and the pages that its bits stand for.
const WORD: usize = size_of::<u64>();
const PAGES: u64 = u64::BITS as u64;

/// A dirty log: a bit for each page of 4 KiB, from guest address 0 to the end of guest memory, holes included. Writers
/// of memory set the bits, and the reader of the log clears them.
#[derive(Debug)]
pub struct SharedLog {
    file: File,
    mapping: MmapRegion,
}

impl SharedLog {
    /// A log for all of `map`, without a bit set. It takes memory where bits are set.
    ///
    /// # Errors
    ///
    /// Fails if the host has no memory or descriptor left.
    pub fn new(map: &GuestMap) -> io::Result<Self> {
        let pages = map.last_addr().0 / PAGE_SIZE as u64 + 1;
        // Whole pages, which can be mapped.
        let len = pages.div_ceil(8).next_multiple_of(PAGE_SIZE as u64);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("dirty-log", flags)?);
        file.set_len(len)?;
        // Otherwise a process that maps the file could crash this one by truncating it.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let offset = FileOffset::new(file.try_clone()?, 0);
        let mapping = MmapRegion::build(
            Some(offset),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
        );
        Ok(Self { file, mapping: mapping.map_err(io::Error::other)? })
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.mapping.size() as u64
    }

    /// The address in this process.
    pub(crate) fn address(&self) -> u64 {
        self.mapping.as_ptr() as u64
    }

    /// The file that others map.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Clears all bits, and calls `each` for those that were set: the number of the first of 64 pages, and a bit for
    /// each of them.
    pub fn take(&self, mut each: impl FnMut(u64, u64)) {
        for (word, first) in (0..self.mapping.size()).step_by(WORD).zip((0..).step_by(PAGES as usize)) {
            let Ok(word) = self.mapping.get_atomic_ref::<AtomicU64>(word) else { break };
            if word.load(Ordering::Relaxed) != 0 {
                // In the byte order of the host, as writers set bits on a little-endian host.
                let bits = u64::from_le(word.swap(0, Ordering::AcqRel));
                each(first, bits);
            }
        }
    }

    /// Sets the bit of a page, as a writer of it does.
    #[cfg(any(test, feature = "testing"))]
    pub fn set(&self, page: u64) {
        if let Ok(word) = self.mapping.get_atomic_ref::<AtomicU64>((page / PAGES) as usize * WORD) {
            word.fetch_or((1u64 << (page % PAGES)).to_le(), Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    fn taken(log: &SharedLog) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        log.take(|first, bits| all.push((first, bits)));
        all
    }

    #[test]
    fn a_log_reaches_to_the_end_of_memory_and_gives_each_bit_once() {
        let map = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)]).unwrap();
        let log = SharedLog::new(&map).unwrap();
        let last = ((1 << 32) + (1 << 20)) / 4096 - 1;
        assert!(log.len() * 8 > last && log.len().is_multiple_of(4096));
        [0, 63, 64, last].into_iter().for_each(|page| log.set(page));
        assert_eq!(taken(&log), [(0, 1 << 63 | 1), (64, 1), (last / 64 * 64, 1 << (last % 64))]);
        assert!(taken(&log).is_empty());
    }

    #[test]
    fn the_length_of_a_shared_memory_file_is_sealed() {
        let map = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let log = SharedLog::new(&map).unwrap();
        assert!(log.file.set_len(0).is_err() && log.file.set_len(1 << 20).is_err());
        let seals = rustix::fs::fcntl_get_seals(&log.file).unwrap();
        assert!(seals.contains(SealFlags::SEAL));
    }
}
