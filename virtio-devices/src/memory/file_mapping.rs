//! A file mapped as memory of the guest.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// The beginning of a file, or a part of a device's, mapped for reading and writing until dropped. This process never
/// accesses it, so truncating the file harms only the guest.
pub struct FileMapping {
    start: NonNull<u8>,
    len: usize,
    private: bool,
}

// SAFETY: the mapping belongs to the process and not to a thread, and nothing in this process accesses its contents.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first `len` bytes of `file`, not 0. Writes to a `private` mapping do not reach the file.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be mapped, or there is no address space.
    pub fn new(file: impl AsFd, len: u64, private: bool) -> io::Result<Self> {
        Self::at(file, 0, len, private)
    }

    /// Maps `len` bytes, not 0, of a device's file at `offset`, a multiple of the page size: registers or memory of the
    /// device.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be mapped, or there is no address space.
    pub fn of_device(file: impl AsFd, offset: u64, len: u64) -> io::Result<Self> {
        Self::at(file, offset, len, false)
    }

    fn at(file: impl AsFd, offset: u64, len: u64, private: bool) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let share = if private { MapFlags::PRIVATE } else { MapFlags::SHARED };
        // SAFETY: the kernel chooses the address, so that no other mapping is touched.
        let start = unsafe {
            // A private mapping allocates memory only when written to.
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, share | MapFlags::NORESERVE, file, offset)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { start, len, private };
        // SAFETY: the range is this mapping, whose pages do not change. It is kept out of core dumps.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontDump) }?;
        Ok(mapping)
    }

    /// Address in this process.
    pub fn address(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Always false: a mapping is never empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Discards writes to a private mapping, which then reads as the file again. Leaves a shared mapping as it is.
    pub fn forget_writes(&self) {
        if self.private {
            // SAFETY: the range is this mapping, which no reference points into.
            let forgotten = unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxDontNeed) };
            debug_assert!(forgotten.is_ok());
        }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and the VMM keeps this value while a guest can access the memory.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

impl fmt::Debug for FileMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMapping({:p}, {:#x} bytes)", self.start, self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    fn write(mapping: &FileMapping, byte: u8) {
        // SAFETY: the first byte is mapped, and no reference points to it.
        unsafe { mapping.address().write_volatile(byte) };
    }

    fn read(mapping: &FileMapping) -> u8 {
        // SAFETY: the first byte is mapped, and no reference points to it.
        unsafe { mapping.address().read_volatile() }
    }

    #[test]
    fn a_shared_mapping_is_the_file_and_a_private_one_a_copy() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 4096]).unwrap();
        let private = FileMapping::new(&file, 4096, true).unwrap();
        let shared = FileMapping::new(&file, 4096, false).unwrap();
        assert_eq!((read(&private), read(&shared), shared.len()), (7, 7, 4096));
        write(&private, 8);
        assert_eq!((read(&private), read(&shared)), (8, 7));
        private.forget_writes();
        assert_eq!(read(&private), 7);
        write(&shared, 9);
        shared.forget_writes();
        assert_eq!(read(&shared), 9);
        let mut byte = [0];
        file.rewind().unwrap();
        file.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [9]);
        assert!(FileMapping::new(&file, u64::MAX, false).is_err());
    }
}
