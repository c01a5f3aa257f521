//! Compressed kernels of the Linux boot protocol (a vmlinuz; Linux `Documentation/arch/x86/boot.rst`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::layout::{ACPI, CMDLINE, HIGH_MEMORY, MapEntry};

/// The length of the boot sector and the setup header. The zero page has the header at the same offsets.
const HEADER_LEN: usize = 0x280;
/// The length of the zero page in bytes.
pub const ZERO_PAGE_LEN: usize = 4096;
/// The oldest protocol that has every field used here: 2.12, Linux 3.8.
const OLDEST_PROTOCOL: u16 = 0x20c;
/// The kernel is loaded at 1 MiB or above (`loadflags`).
const LOADED_HIGH: u8 = 1;
/// The kernel has a 64-bit entry (`xloadflags`).
const KERNEL_64: u16 = 1;
/// The offset of the 64-bit entry from the load address.
const ENTRY_64: u64 = 0x200;
/// The type of a boot loader that has no number of its own.
const LOADER_UNDEFINED: u8 = 0xff;

/// Offsets in the zero page.
mod offset {
    pub(super) const ACPI_RSDP: usize = 0x070;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    pub(super) const SETUP_SECTORS: usize = 0x1f1;
    pub(super) const JUMP: usize = 0x201;
    pub(super) const MAGIC: usize = 0x202;
    pub(super) const VERSION: usize = 0x206;
    pub(super) const TYPE_OF_LOADER: usize = 0x210;
    pub(super) const LOADFLAGS: usize = 0x211;
    pub(super) const CODE32_START: usize = 0x214;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    pub(super) const CMDLINE: usize = 0x228;
    pub(super) const INITRD_MAX: usize = 0x22c;
    pub(super) const RELOCATABLE: usize = 0x234;
    pub(super) const XLOADFLAGS: usize = 0x236;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const PREF_ADDRESS: usize = 0x258;
    pub(super) const INIT_SIZE: usize = 0x260;
    pub(super) const E820_TABLE: usize = 0x2d0;
}

/// Reason why a bzImage cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BzImageError {
    /// The file cannot be read to the end.
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The kernel has no 64-bit entry, or is older than the protocol used here.
    #[error("a Linux kernel that is 32-bit or older than 3.8; give a newer 64-bit kernel")]
    TooOld,
    /// Contradiction in the header, or between the header and the file's length.
    #[error("a bzImage with a malformed header; the file may be incomplete")]
    Malformed,
}

/// A bzImage, as its header describes it.
#[derive(Debug, Clone)]
pub struct BzImage {
    header: [u8; HEADER_LEN],
    /// The file offset of the part that is loaded.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The guest address it is loaded to.
    pub address: u64,
    /// The first address after all memory that the kernel uses until it is uncompressed and running.
    pub end: u64,
    /// The longest command line that the kernel reads, in bytes without the NUL.
    pub cmdline_max: u32,
    /// The last address that the initramfs may use.
    pub initramfs_max: u32,
}

impl BzImage {
    /// Reads the header of `file`. `None` if it is not a bzImage.
    ///
    /// # Errors
    ///
    /// Fails if it is a bzImage that cannot be booted.
    pub fn parse(file: &File) -> Result<Option<Self>, BzImageError> {
        let mut header = [0; HEADER_LEN];
        if file.read_exact_at(&mut header, 0).is_err() || header[offset::MAGIC..offset::MAGIC + 4] != *b"HdrS" {
            return Ok(None);
        }
        let [version, xloadflags] =
            [offset::VERSION, offset::XLOADFLAGS].map(|at| u16::from_le_bytes(get(&header, at)));
        if version < OLDEST_PROTOCOL || header[offset::LOADFLAGS] & LOADED_HIGH == 0 || xloadflags & KERNEL_64 == 0 {
            return Err(BzImageError::TooOld);
        }
        let sectors = match header[offset::SETUP_SECTORS] {
            0 => 4,
            sectors => u64::from(sectors),
        };
        let start = (sectors + 1) * 512;
        let len = file.metadata()?.len().checked_sub(start).filter(|len| *len > 0).ok_or(BzImageError::Malformed)?;
        let preferred = u64::from_le_bytes(get(&header, offset::PREF_ADDRESS));
        let address = if header[offset::RELOCATABLE] == 0 { HIGH_MEMORY } else { preferred };
        let [cmdline_max, initramfs_max, init_size] = [offset::CMDLINE_SIZE, offset::INITRD_MAX, offset::INIT_SIZE]
            .map(|at| u32::from_le_bytes(get(&header, at)));
        // The kernel uncompresses itself to the preferred address or to the load address, whichever is higher.
        let end = address.max(preferred).checked_add(len.max(init_size.into())).ok_or(BzImageError::Malformed)?;
        if address < HIGH_MEMORY || address > u32::MAX.into() {
            return Err(BzImageError::Malformed);
        }
        Ok(Some(Self { header, offset: start, len, address, end, cmdline_max, initramfs_max }))
    }

    /// The address at which the boot CPU starts, in 64-bit mode.
    pub fn entry(&self) -> u64 {
        self.address + ENTRY_64
    }

    /// The zero page, which describes the machine to the kernel. `initramfs` is an address and a length in bytes.
    pub fn zero_page(&self, map: &[MapEntry], initramfs: Option<(u32, u32)>) -> [u8; ZERO_PAGE_LEN] {
        let mut page = [0; ZERO_PAGE_LEN];
        // The header ends at the target of its jump instruction.
        let end = (offset::MAGIC + usize::from(self.header[offset::JUMP])).min(HEADER_LEN);
        page[offset::SETUP_SECTORS..end].copy_from_slice(&self.header[offset::SETUP_SECTORS..end]);
        page[offset::TYPE_OF_LOADER] = LOADER_UNDEFINED;
        put(&mut page, offset::CODE32_START, &(self.address as u32).to_le_bytes());
        put(&mut page, offset::CMDLINE, &(CMDLINE as u32).to_le_bytes());
        put(&mut page, offset::ACPI_RSDP, &ACPI.to_le_bytes());
        if let Some((address, len)) = initramfs {
            put(&mut page, offset::RAMDISK_IMAGE, &address.to_le_bytes());
            put(&mut page, offset::RAMDISK_SIZE, &len.to_le_bytes());
        }
        page[offset::E820_ENTRIES] = map.len() as u8;
        for (entry, at) in map.iter().zip((offset::E820_TABLE..).step_by(20)) {
            put(&mut page, at, &entry.range.start.to_le_bytes());
            put(&mut page, at + 8, &(entry.range.end - entry.range.start).to_le_bytes());
            put(&mut page, at + 16, &(entry.kind as u32).to_le_bytes());
        }
        page
    }
}

fn get<const N: usize>(header: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|i| header[at + i])
}

fn put(page: &mut [u8; ZERO_PAGE_LEN], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::layout::Layout;
    use super::*;

    /// The header of a relocatable 64-bit kernel with one setup sector and 100 bytes to load.
    fn image() -> Vec<u8> {
        let mut bytes = vec![0; 1024 + 100];
        bytes[offset::SETUP_SECTORS] = 1;
        bytes[offset::JUMP] = 0x6a;
        bytes[offset::MAGIC..offset::MAGIC + 4].copy_from_slice(b"HdrS");
        bytes[offset::VERSION..offset::VERSION + 2].copy_from_slice(&0x20fu16.to_le_bytes());
        bytes[offset::LOADFLAGS] = LOADED_HIGH;
        bytes[offset::INITRD_MAX..offset::INITRD_MAX + 4].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
        bytes[offset::RELOCATABLE] = 1;
        bytes[offset::XLOADFLAGS] = 0x7f;
        bytes[offset::CMDLINE_SIZE..offset::CMDLINE_SIZE + 4].copy_from_slice(&2047u32.to_le_bytes());
        bytes[offset::PREF_ADDRESS..offset::PREF_ADDRESS + 8].copy_from_slice(&0x100_0000u64.to_le_bytes());
        bytes[offset::INIT_SIZE..offset::INIT_SIZE + 4].copy_from_slice(&0x300_0000u32.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Option<BzImage>, BzImageError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        BzImage::parse(&file)
    }

    #[test]
    fn a_relocatable_kernel_is_loaded_at_its_preferred_address() {
        let image = parse(&image()).unwrap().unwrap();
        assert_eq!((image.offset, image.len), (1024, 100));
        assert_eq!((image.address, image.entry(), image.end), (0x100_0000, 0x100_0200, 0x400_0000));
        assert_eq!((image.cmdline_max, image.initramfs_max), (2047, 0x7fff_ffff));
    }

    #[test]
    fn a_kernel_that_cannot_move_is_loaded_at_1_mib() {
        let mut bytes = image();
        bytes[offset::RELOCATABLE] = 0;
        assert_eq!(parse(&bytes).unwrap().unwrap().address, HIGH_MEMORY);
    }

    #[test]
    fn an_old_or_32_bit_kernel_is_refused() {
        for (at, value) in [(offset::VERSION, 0x0b), (offset::LOADFLAGS, 0), (offset::XLOADFLAGS, 0)] {
            let mut bytes = image();
            bytes[at] = value;
            assert!(matches!(parse(&bytes), Err(BzImageError::TooOld)), "{at:#x}");
        }
    }

    #[test]
    fn malformed_header_is_an_error_other_files_are_not_bzimages() {
        assert!(matches!(parse(&image()[..1024]), Err(BzImageError::Malformed)));
        let mut bytes = image();
        bytes[offset::PREF_ADDRESS..offset::PREF_ADDRESS + 8].fill(0xff);
        assert!(matches!(parse(&bytes), Err(BzImageError::Malformed)));
        assert!(parse(&image()[..0x200]).unwrap().is_none());
        assert!(parse(&[0; 8192]).unwrap().is_none());
    }

    #[test]
    fn the_zero_page_holds_the_header_the_map_and_the_initramfs() {
        let image = parse(&image()).unwrap().unwrap();
        let map = Layout::new(5 << 30, 0, 46).unwrap().memory_map();
        let page = image.zero_page(&map, Some((0x7000_0000, 0x1234)));
        let dword = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().unwrap());
        assert_eq!(dword(offset::MAGIC), u32::from_le_bytes(*b"HdrS"));
        assert_eq!((dword(offset::RAMDISK_IMAGE), dword(offset::RAMDISK_SIZE)), (0x7000_0000, 0x1234));
        assert_eq!((dword(offset::CMDLINE), dword(offset::ACPI_RSDP)), (0x2_0000, 0xa_0000));
        assert_eq!(usize::from(page[offset::E820_ENTRIES]), map.len());
        // The last entry: the memory above 4 GiB.
        let last = offset::E820_TABLE + 20 * (map.len() - 1);
        assert_eq!([0, 4, 8, 12, 16].map(|at| dword(last + at)), [0, 1, 0x8000_0000, 0, 1]);
    }
}
