//! Memory for the part of a frame that exceeds the driver's buffers.

use std::io;

use vm_memory::MmapRegion;

/// Zeroed memory whose pages are allocated when written to, which for most queues is never.
///
/// Huge pages are turned off. The kernel would build them from allocator memory: that of 255 queues is adjacent, and
/// after an hour all of it was resident, unused.
#[derive(Debug)]
pub struct Spill(MmapRegion);

impl Spill {
    /// Memory of `len` bytes.
    ///
    /// # Errors
    ///
    /// Fails if the host has no memory for it.
    pub fn new(len: usize) -> io::Result<Self> {
        let region = MmapRegion::new(len).map_err(io::Error::other)?;
        // A kernel without huge pages refuses, and needs no such advice. SAFETY: the mapping is our own, and the advice
        // does not change its contents.
        let _ = unsafe { libc::madvise(region.as_ptr().cast(), region.size(), libc::MADV_NOHUGEPAGE) };
        Ok(Self(region))
    }

    /// The memory.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is private and of this size, and nothing else has its address.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), self.0.size()) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn spill_memory_is_zero_and_never_uses_huge_pages() {
        let mut spill = Spill::new(1 << 22).unwrap();
        let start = spill.bytes().as_ptr() as usize;
        spill.bytes()[5] = 1;
        assert_eq!(spill.bytes()[..8], [0, 0, 0, 0, 0, 1, 0, 0]);
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut mappings = smaps.split_inclusive('\n').skip_while(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            !range.is_some_and(|(low, high)| {
                let parse = |text| usize::from_str_radix(text, 16).unwrap_or(0);
                (parse(low)..parse(high)).contains(&start)
            })
        });
        let flags = mappings.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.contains(" nh"), "{flags}");
    }
}
