//! The payload: checks a kernel, its initramfs and its command line, or firmware, and loads them to guest memory.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use virtio_devices::GuestMap;
use vm_memory::{Bytes, GuestAddress};

use crate::arch::x86_64::bzimage::{self, BzImage};
use crate::arch::x86_64::elf::{self, Elf};
use crate::arch::x86_64::layout::{
    ACPI, ACPI_END, CMDLINE, CMDLINE_MAX, GDT, Layout, MP_POINTER, MP_TABLE, PAGE_TABLES, PVH_MODULES, PVH_START_INFO,
    RESET_VECTOR, RSDP_COPY, SMBIOS, SMBIOS_END, ZERO_PAGE,
};
use crate::arch::x86_64::legacy::LegacyHardware;
use crate::arch::x86_64::regs::{self, Entry};
use crate::arch::x86_64::{mp_table, pvh};
use crate::config::PayloadConfig;

const PAGE: u64 = 4096;
/// The option that names firmware.
const FIRMWARE: &str = "--firmware";
/// The length of the RSDP (`ACPI 6.5 §5.2.5.3`), which is the first of the ACPI tables.
const RSDP_LEN: usize = 36;
/// The last address of a PVH kernel's initramfs. PVH has 64-bit addresses, but Linux keeps only 32 bits of this one.
const PVH_INITRAMFS_MAX: u64 = u32::MAX as u64;

/// Reason why a payload cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// No kernel is given.
    #[error("--kernel: missing; give a bzImage or an ELF kernel with a PVH entry, or --firmware")]
    NoKernel,
    /// A file cannot be opened or read.
    #[error("{option} {}: cannot be read: {error}", path.display())]
    Read {
        /// The option that names the file.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// A path names something other than a regular file.
    #[error("{option} {}: not a regular file", path.display())]
    NotAFile {
        /// The option that names the file.
        option: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The kernel's format is unknown.
    #[error("--kernel {}: neither a bzImage nor an ELF file; give an x86_64 vmlinuz or vmlinux", .0.display())]
    UnknownFormat(PathBuf),
    /// The kernel is a compressed file that does not unpack itself.
    #[error(
        "--kernel {}: compressed by {program}; unpack it, by {program} -dc FILE > vmlinux, and give that",
        path.display()
    )]
    Compressed {
        /// The kernel.
        path: PathBuf,
        /// The program that unpacks it.
        program: &'static str,
    },
    /// The firmware is not an ELF file.
    #[error("--firmware {}: not an ELF file; give firmware with a PVH entry, such as CLOUDHV.fd or \
         hypervisor-fw", .0.display())]
    NotFirmware(PathBuf),
    /// The kernel or firmware is an ELF file that cannot be booted.
    #[error("{option} {}: {error}", path.display())]
    Elf {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause.
        error: elf::ElfError,
    },
    /// The kernel is a bzImage that cannot be booted.
    #[error("--kernel {}: {error}", path.display())]
    BzImage {
        /// The kernel.
        path: PathBuf,
        /// Cause.
        error: bzimage::BzImageError,
    },
    /// The kernel and the initramfs need more memory than there is.
    #[error(
        "{option} {}: does not fit into the guest's memory; {needed} MiB are needed, give more with --memory size=",
        path.display()
    )]
    TooLarge {
        /// The option that names the file that does not fit.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The memory that would suffice, in MiB.
        needed: u64,
    },
    /// The command line is too long.
    #[error("--cmdline: {len} bytes long; this kernel takes at most {limit}; shorten it")]
    CmdlineTooLong {
        /// Length in bytes.
        len: usize,
        /// The longest that the kernel accepts, in bytes.
        limit: u64,
    },
    /// The command line contains a NUL byte.
    #[error("--cmdline: contains a NUL byte; remove it")]
    CmdlineNul,
    /// A file that was checked before cannot be loaded.
    #[error("{option} {}: cannot be loaded: {error}", path.display())]
    Load {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause.
        error: vm_memory::GuestMemoryError,
    },
}

#[derive(Debug)]
enum Format {
    Elf(Elf),
    BzImage(Box<BzImage>),
}

#[derive(Debug)]
struct Initramfs {
    path: PathBuf,
    file: File,
    len: u64,
}

/// The tables that describe the machine.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// The ACPI tables, the RSDP first.
    pub acpi: &'a [u8],
    /// The SMBIOS tables.
    pub smbios: &'a [u8],
    /// The floating pointer structure and the configuration table of the MultiProcessor Specification.
    pub mp: Option<&'a ([u8; mp_table::POINTER_LEN], Vec<u8>)>,
}

/// Payload to boot; opening it finds every error. Its files stay open, so that a reboot gets the same kernel.
#[derive(Debug)]
pub struct Payload {
    option: &'static str,
    path: PathBuf,
    kernel: File,
    format: Format,
    initramfs: Option<Initramfs>,
    cmdline: Vec<u8>,
}

impl Payload {
    /// Opens the files and reads the kernel's headers.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read, the kernel cannot be booted, or the payload does not fit into the memory of
    /// `layout`.
    pub fn open(config: &PayloadConfig, layout: &Layout) -> Result<Self, BootError> {
        let (option, path) = match (&config.firmware, &config.kernel) {
            (Some(path), _) => (FIRMWARE, path.clone()),
            (None, Some(path)) => ("--kernel", path.clone()),
            (None, None) => return Err(BootError::NoKernel),
        };
        let (kernel, _) = open(option, &path)?;
        let format = Format::of(&kernel, option, &path)?;
        let (initramfs, cmdline_text) = if option == FIRMWARE {
            for (given, dropped) in
                [(config.initramfs.is_some(), "--initramfs"), (config.cmdline.is_some(), "--cmdline")]
            {
                if given {
                    log::warn!("{dropped} has no effect with {FIRMWARE}, which boots what it finds on a disk");
                }
            }
            (None, None)
        } else {
            (config.initramfs.as_deref(), config.cmdline.as_deref())
        };
        let initramfs = initramfs.map(Initramfs::open).transpose()?;
        let cmdline = cmdline(cmdline_text.unwrap_or_default(), format.cmdline_max())?;
        let payload = Self { option, path, kernel, format, initramfs, cmdline };
        payload.check_fits(layout)?;
        Ok(payload)
    }

    /// Checks that the payload fits into the memory of `layout`.
    ///
    /// # Errors
    ///
    /// Fails with [`BootError::TooLarge`].
    pub fn check_fits(&self, layout: &Layout) -> Result<(), BootError> {
        let end = self.format.end();
        if end > layout.low.end {
            let needed = end.div_ceil(1 << 20);
            return Err(BootError::TooLarge { option: self.option, path: self.path.clone(), needed });
        }
        self.initramfs_place(layout).map(drop)
    }

    /// The address and the length of the initramfs, if there is one: as high as possible in the memory of `layout`, and
    /// after the kernel.
    fn initramfs_place(&self, layout: &Layout) -> Result<Option<(u64, u64)>, BootError> {
        let Some(Initramfs { path, len, .. }) = &self.initramfs else { return Ok(None) };
        let kernel_end = self.format.end();
        let end = layout.low.end.min(self.format.initramfs_end());
        let address = end.checked_sub(*len).map(|address| address / PAGE * PAGE);
        match address.filter(|address| *address >= kernel_end) {
            Some(address) => Ok(Some((address, *len))),
            None => {
                let needed = kernel_end.saturating_add(*len).saturating_add(PAGE).div_ceil(1 << 20);
                Err(BootError::TooLarge { option: "--initramfs", path: path.clone(), needed })
            }
        }
    }

    /// True for firmware, by either option: users of libvirt give firmware as a kernel.
    pub fn is_firmware(&self) -> bool {
        match &self.format {
            Format::Elf(elf) => self.option == FIRMWARE || elf.is_firmware(),
            Format::BzImage(_) => false,
        }
    }

    /// The hardware of older PCs that the payload needs. Linux gets what its command line asks for, because it would
    /// use everything else that it finds; firmware and other kernels get all.
    pub fn legacy(&self) -> LegacyHardware {
        let is_linux = match &self.format {
            Format::Elf(elf) => self.option != FIRMWARE && elf.is_linux,
            Format::BzImage(_) => true,
        };
        if is_linux {
            LegacyHardware::of_linux(String::from_utf8_lossy(&self.cmdline).trim_end_matches('\0'))
        } else {
            LegacyHardware::ALL
        }
    }

    /// Loads the payload and `tables` to memory that is all zero.
    ///
    /// # Errors
    ///
    /// Fails if a file became shorter since it was opened, or can no longer be read; or if the payload does not
    /// fit.
    pub fn load(&self, memory: &GuestMap, layout: &Layout, tables: &Tables) -> Result<Entry, BootError> {
        debug_assert!(tables.acpi.len() as u64 <= ACPI_END - ACPI);
        debug_assert!(tables.smbios.len() as u64 <= SMBIOS_END - SMBIOS);
        let place = self.initramfs_place(layout)?;
        self.try_load(memory, layout, place, tables).map_err(|error| BootError::Load {
            option: self.option,
            path: self.path.clone(),
            error,
        })
    }

    fn try_load(
        &self,
        memory: &GuestMap,
        layout: &Layout,
        place: Option<(u64, u64)>,
        tables: &Tables,
    ) -> Result<Entry, vm_memory::GuestMemoryError> {
        let put = |address, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(address));
        if let (Some(initramfs), Some((address, len))) = (&self.initramfs, place) {
            read(memory, &initramfs.file, 0, address, len)?;
        }
        put(ACPI, tables.acpi)?;
        // A kernel that found the RSDP through PVH does not pass it on to the next one in a kexec.
        put(RSDP_COPY, tables.acpi.get(..RSDP_LEN).unwrap_or_default())?;
        put(SMBIOS, tables.smbios)?;
        if let Some((pointer, table)) = tables.mp {
            if tables.smbios.len() as u64 <= MP_POINTER - SMBIOS {
                put(MP_TABLE, table)?;
                put(MP_POINTER, pointer)?;
            } else {
                log::warn!(
                    "--platform: the strings leave no room for the MP table's pointer, so a guest without ACPI finds \
                     one CPU; shorten them by 16 bytes"
                );
            }
        }
        put(CMDLINE, &self.cmdline)?;
        put(RESET_VECTOR, &regs::firmware())?;
        let map = layout.memory_map();
        let entry = match &self.format {
            Format::Elf(elf) => {
                for segment in &elf.segments {
                    read(memory, &self.kernel, segment.offset, segment.address, segment.len)?;
                }
                put(PVH_START_INFO, &pvh::start_info(place.is_some().into(), &map))?;
                if let Some((address, len)) = place {
                    put(PVH_MODULES, &pvh::modules(address, len))?;
                }
                put(ZERO_PAGE, &pvh::memory_map(&map))?;
                Entry::Pvh(elf.entry)
            }
            Format::BzImage(image) => {
                read(memory, &self.kernel, image.offset, image.address, image.len)?;
                // Both are below 4 GiB, because of `initramfs_end`.
                let place = place.map(|(address, len)| (address as u32, len as u32));
                put(ZERO_PAGE, &image.zero_page(&map, place))?;
                put(PAGE_TABLES, &regs::page_tables())?;
                Entry::Linux64(image.entry())
            }
        };
        let descriptors = entry.descriptors().map(u64::to_le_bytes);
        put(GDT, descriptors.as_flattened())?;
        Ok(entry)
    }
}

impl Format {
    fn of(kernel: &File, option: &'static str, path: &Path) -> Result<Self, BootError> {
        if let Some(elf) = Elf::parse(kernel).map_err(|error| BootError::Elf { option, path: path.into(), error })? {
            return Ok(Self::Elf(elf));
        }
        if option == FIRMWARE {
            return Err(BootError::NotFirmware(path.into()));
        }
        match BzImage::parse(kernel).map_err(|error| BootError::BzImage { path: path.into(), error })? {
            Some(image) => Ok(Self::BzImage(Box::new(image))),
            None => Err(match compressed_by(kernel) {
                Some(program) => BootError::Compressed { path: path.into(), program },
                None => BootError::UnknownFormat(path.into()),
            }),
        }
    }

    /// The first address after the memory that the kernel uses at its start.
    fn end(&self) -> u64 {
        match self {
            Self::Elf(elf) => elf.end,
            Self::BzImage(image) => image.end,
        }
    }

    /// The first address that an initramfs may not use.
    fn initramfs_end(&self) -> u64 {
        match self {
            Self::Elf(_) => PVH_INITRAMFS_MAX + 1,
            Self::BzImage(image) => u64::from(image.initramfs_max) + 1,
        }
    }

    /// The longest command line in bytes, without its NUL.
    fn cmdline_max(&self) -> u64 {
        match self {
            Self::Elf(_) => CMDLINE_MAX - 1,
            Self::BzImage(image) => u64::from(image.cmdline_max).min(CMDLINE_MAX - 1),
        }
    }
}

impl Initramfs {
    fn open(path: &Path) -> Result<Self, BootError> {
        let (file, len) = open("--initramfs", path)?;
        Ok(Self { path: path.into(), file, len })
    }
}

/// The program that compressed a file, from the file's first bytes.
fn compressed_by(file: &File) -> Option<&'static str> {
    const FORMATS: [(&[u8], &str); 6] = [
        (b"\x1f\x8b", "gzip"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x04\x22\x4d\x18", "lz4"),
        // Its older format, which the kernel's own build writes.
        (b"\x02\x21\x4c\x18", "lz4"),
        (b"BZh", "bzip2"),
    ];
    let mut start = [0; 6];
    let len = file.read_at(&mut start, 0).ok()?;
    let found = FORMATS.iter().find(|(magic, _)| start[..len].starts_with(magic));
    found.map(|(_, program)| *program)
}

fn open(option: &'static str, path: &Path) -> Result<(File, u64), BootError> {
    let failed = |error| BootError::Read { option, path: path.into(), error };
    // Opening something other than a regular file may block.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(BootError::NotAFile { option, path: path.into() });
    }
    let file = File::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    Ok((file, len))
}

/// The command line with its NUL.
fn cmdline(text: &str, limit: u64) -> Result<Vec<u8>, BootError> {
    if text.len() as u64 > limit {
        return Err(BootError::CmdlineTooLong { len: text.len(), limit });
    }
    if text.contains('\0') {
        return Err(BootError::CmdlineNul);
    }
    Ok([text.as_bytes(), &[0]].concat())
}

/// Reads a part of a file directly into guest memory.
fn read(
    memory: &GuestMap,
    mut file: &File,
    offset: u64,
    address: u64,
    len: u64,
) -> Result<(), vm_memory::GuestMemoryError> {
    // A segment without bytes in the file may name an offset that no file has.
    if len == 0 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(offset)).map_err(vm_memory::GuestMemoryError::IOError)?;
    memory.read_exact_volatile_from(GuestAddress(address), &mut file, len as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_a_start_info_finds_the_rsdp() {
        let payload = Payload {
            option: "--kernel",
            path: PathBuf::new(),
            kernel: File::open("/dev/null").unwrap(),
            format: Format::Elf(Elf { segments: Vec::new(), entry: 0x10_0000, end: 0x10_0000, is_linux: false }),
            initramfs: None,
            cmdline: vec![0],
        };
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let acpi: Vec<u8> = b"RSD PTR ".iter().copied().chain(8..=255).collect();
        let tables = Tables { acpi: &acpi, smbios: &[], mp: None };
        payload.load(&memory, &Layout::new(1 << 20, 0, 46).unwrap(), &tables).unwrap();
        // The OS searches for the RSDP on 16-byte boundaries.
        let read = |address| {
            let mut bytes = [0; RSDP_LEN];
            memory.read_slice(&mut bytes, GuestAddress(address)).map(|()| bytes).unwrap()
        };
        let found = (0xe_0000..0xf_ff00).step_by(16).map(read).find(|bytes| bytes.starts_with(b"RSD PTR "));
        assert_eq!(found.unwrap()[..], acpi[..RSDP_LEN]);
    }

    /// Legacy hardware for a payload with the file `kernel`, given by `option` with a command line.
    fn legacy(option: &'static str, kernel: Format, cmdline: &str) -> LegacyHardware {
        let (path, file) = (PathBuf::new(), File::open("/dev/null").unwrap());
        let cmdline = self::cmdline(cmdline, 99).unwrap();
        Payload { option, path, kernel: file, format: kernel, initramfs: None, cmdline }.legacy()
    }

    fn elf(is_linux: bool) -> Format {
        Format::Elf(Elf { segments: Vec::new(), entry: 0, end: 0, is_linux })
    }

    #[test]
    fn only_a_linux_kernel_does_without_what_it_does_not_name() {
        assert_eq!(legacy("--kernel", elf(true), "quiet"), LegacyHardware::NONE);
        assert_eq!(legacy("--kernel", elf(true), "quiet acpi=off"), LegacyHardware::of_linux("acpi=off"));
        // The NUL terminates the last word.
        assert!(legacy("--kernel", elf(true), "nopv").pm_timer);
        assert_eq!(legacy("--kernel", elf(false), "quiet"), LegacyHardware::ALL);
        assert_eq!(legacy(FIRMWARE, elf(true), ""), LegacyHardware::ALL);
    }

    #[test]
    fn the_mp_table_is_found_where_kernels_search() {
        let format = elf(false);
        let (path, kernel) = (PathBuf::new(), File::open("/dev/null").unwrap());
        let payload = Payload { option: "--kernel", path, kernel, format, initramfs: None, cmdline: vec![0] };
        let processors = mp_table::Processors { apic_ids: vec![0, 1], signature: 1, features: 2 };
        let mp = mp_table::tables(&processors);
        let pointers = |mp, smbios_len: u64| {
            let memory = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
            let tables = Tables { acpi: &[], smbios: &vec![1; smbios_len as usize], mp };
            payload.load(&memory, &Layout::new(1 << 20, 0, 46).unwrap(), &tables).unwrap();
            let read = |address: u64, len: usize| {
                let mut bytes = vec![0; len];
                memory.read_slice(&mut bytes, GuestAddress(address)).map(|()| bytes).unwrap()
            };
            // The OS searches the 64 KiB below 1 MiB, on 16-byte boundaries.
            let found = (0xf_0000..0x10_0000).step_by(16).map(|at| read(at, 16)).find(|bytes| bytes[..4] == *b"_MP_");
            found.map(|found| {
                let at = u32::from_le_bytes(found[4..8].try_into().unwrap());
                let len = u16::from_le_bytes(read(u64::from(at) + 4, 2).try_into().unwrap());
                (found, read(at.into(), len.into()))
            })
        };
        let expected = Some((mp.0.to_vec(), mp.1.clone()));
        assert_eq!(pointers(Some(&mp), 64), expected);
        assert_eq!(pointers(None, 64), None);
        // Strings up to the pointer were accepted by earlier versions.
        assert_eq!(pointers(Some(&mp), SMBIOS_END - SMBIOS - 16), expected);
        assert_eq!(pointers(Some(&mp), SMBIOS_END - SMBIOS - 15), None);
        assert_eq!(pointers(Some(&mp), SMBIOS_END - SMBIOS), None);
    }
}
