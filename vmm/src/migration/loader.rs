//! Guest memory that receives pages, in any order, from several connections at once.

use std::sync::atomic::{AtomicU64, Ordering};

use virtio_devices::GuestMap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::wire::PAGE;

/// Error for pages outside guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent {len} bytes of memory at {start:#x}, where this guest has none")]
pub struct LoadError {
    /// First address.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Memory that is zero until pages arrive.
#[derive(Debug)]
pub struct Loader {
    memory: GuestMap,
    /// Bitmap of written pages per region: only these need clearing when a zero page arrives.
    written: Vec<(u64, Vec<AtomicU64>)>,
}

impl Loader {
    /// Takes `memory`, which must be zero.
    pub fn new(memory: GuestMap) -> Self {
        let bits = |region: &virtio_devices::GuestRegion| {
            let words = (region.len() / PAGE).div_ceil(64) as usize;
            (region.start_addr().0, (0..words).map(|_| AtomicU64::new(0)).collect())
        };
        let written = memory.iter().map(bits).collect();
        Self { memory, written }
    }

    /// Size of the memory, in bytes.
    pub fn size(&self) -> u64 {
        self.memory.iter().map(GuestMemoryRegion::len).sum()
    }

    /// Writes pages from `start`, a multiple of the page size.
    ///
    /// # Errors
    ///
    /// Fails if some are not in guest memory.
    pub fn write(&self, start: u64, bytes: &[u8]) -> Result<(), LoadError> {
        let fail = LoadError { start, len: bytes.len() as u64 };
        self.check(start, bytes.len() as u64)?;
        for page in 0..bytes.len() as u64 / PAGE {
            let (word, bit) = self.bit(start + page * PAGE).ok_or(fail)?;
            // A pass starts after the previous one is complete, so that no order is needed.
            word.fetch_or(bit, Ordering::Relaxed);
        }
        self.memory.write_slice(bytes, GuestAddress(start)).map_err(|_| fail)
    }

    /// Zeroes pages. Pages that were never written are not touched, and stay unallocated.
    ///
    /// # Errors
    ///
    /// Fails if some are not in guest memory.
    pub fn clear(&self, start: u64, len: u64) -> Result<(), LoadError> {
        let fail = LoadError { start, len };
        self.check(start, len)?;
        for page in (start..start + len).step_by(PAGE as usize) {
            let (word, bit) = self.bit(page).ok_or(fail)?;
            if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
                self.memory.write_slice(&[0; PAGE as usize], GuestAddress(page)).map_err(|_| fail)?;
            }
        }
        Ok(())
    }

    /// Checks that the whole range is memory, before a part of it is changed.
    fn check(&self, start: u64, len: u64) -> Result<(), LoadError> {
        let fail = LoadError { start, len };
        let end = start.checked_add(len).ok_or(fail)?;
        let mut at = start;
        while at < end {
            let region = self.memory.find_region(GuestAddress(at)).ok_or(fail)?;
            at = region.start_addr().0 + region.len();
        }
        Ok(())
    }

    fn bit(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        let after = self.written.partition_point(|(start, _)| *start <= page);
        let (start, words) = self.written.get(after.checked_sub(1)?)?;
        let number = (page - start) / PAGE;
        Some((words.get((number / 64) as usize)?, 1 << (number % 64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader() -> Loader {
        let ranges = [(GuestAddress(0), 0x4000), (GuestAddress(0x4000), 0x2000), (GuestAddress(0x10_0000), 0x3000)];
        Loader::new(GuestMap::from_ranges(&ranges).unwrap())
    }

    fn read(loader: &Loader, at: u64) -> u8 {
        loader.memory.read_obj(GuestAddress(at)).unwrap()
    }

    #[test]
    fn pages_are_written_and_cleared_across_regions() {
        let loader = loader();
        assert_eq!(loader.size(), 0x9000);
        loader.write(0x3000, &[7; 0x2000]).unwrap();
        assert_eq!([0x2fff, 0x3000, 0x4fff, 0x5000].map(|at| read(&loader, at)), [0, 7, 7, 0]);
        loader.clear(0x4000, 0x1000).unwrap();
        assert_eq!([0x3000, 0x4000, 0x4fff].map(|at| read(&loader, at)), [7, 0, 0]);
        loader.write(0x4000, &[9; 0x1000]).unwrap();
        loader.clear(0, 0x6000).unwrap();
        assert_eq!([0x3000, 0x4000].map(|at| read(&loader, at)), [0, 0]);
    }

    #[test]
    fn a_page_that_never_came_is_not_touched() {
        let loader = loader();
        // Not zero, to show that nothing clears the page.
        loader.memory.write_obj(5_u8, GuestAddress(0x10_0000)).unwrap();
        loader.clear(0x10_0000, 0x3000).unwrap();
        assert_eq!(read(&loader, 0x10_0000), 5);
    }

    #[test]
    fn memory_outside_the_guest_is_refused_without_effect() {
        let loader = loader();
        for (start, len) in [(0x6000, 0x1000), (0x5000, 0x2000), (0x10_2000, 0x2000), (u64::MAX - 4095, 0x2000)] {
            assert_eq!(loader.clear(start, len), Err(LoadError { start, len }));
            let bytes = vec![1; len as usize];
            assert_eq!(loader.write(start, &bytes), Err(LoadError { start, len }));
        }
        assert_eq!([0x5000, 0x10_2000].map(|at| read(&loader, at)), [0, 0]);
    }
}
