//! ELF files with a PVH entry: kernels (a vmlinux) and firmware.
//!
//! A Xen note gives the entry's address (`xen/include/public/elfnote.h`, `XEN_ELFNOTE_PHYS32_ENTRY`).
//!
//! linux-loader 0.14 is not used, for these reasons. It parses and loads in one call, so a kernel that does not fit is
//! found only once the guest's memory exists. It ignores segments without file contents, so an initramfs may be put
//! into the kernel's `.bss`; for a bzImage it ignores `init_size`. It loads kernels for other machines,
//! and kernels that overwrite the boot tables below 1 MiB. A second PT_NOTE hides the entry in the first, and notes of
//! any length are read in steps of 12 bytes (2 s for 48 MiB).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::layout::HIGH_MEMORY;

const MAGIC: [u8; 4] = *b"\x7fELF";
/// The length of the part of the header that determines the layout of the rest.
const IDENT_LEN: usize = 16;
const LITTLE_ENDIAN: u8 = 1;
/// The machine of 32-bit kernels, and of firmware that starts in 32-bit mode, such as edk2's, even if the file is a
/// 64-bit one.
const MACHINE_386: u16 = 3;
const MACHINE_X86_64: u16 = 62;
/// No 64-bit Linux kernel is loaded below this address, the least alignment that it can be built with
/// (`CONFIG_PHYSICAL_ALIGN`). Firmware is: it leaves the memory above to kernels.
const LOWEST_KERNEL: u64 = 0x20_0000;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// The most program headers accepted. A Linux kernel has five.
const MAX_PROGRAM_HEADERS: u16 = 64;
/// The most bytes of notes searched. A Linux kernel has some hundred.
const MAX_NOTES_LEN: u64 = 0x1_0000;
const NOTE_NAME: &[u8] = b"Xen\0";
/// The owner of notes that only Linux kernels have, all of them.
const LINUX_NAME: &[u8] = b"Linux\0\0\0";
const NOTE_PHYS32_ENTRY: u32 = 18;

/// The layout of the headers of a class of files (System V ABI, chapters 4 and 5).
struct Class {
    /// EI_CLASS in the file's header: 1 for 32-bit files, 2 for 64-bit files.
    number: u8,
    /// The length of the file's header.
    header_len: usize,
    /// The offsets in the header of the program headers' offset and of their length, which is followed by their count.
    table: [usize; 2],
    /// The length of a program header.
    program_header_len: usize,
    /// The offsets in the program header of the segment's offset, physical address, length in the file and length in
    /// memory.
    segment: [usize; 4],
    /// Reads the number at an offset.
    read: fn(&[u8], usize) -> u64,
}

const CLASSES: [Class; 2] = [
    Class {
        number: 1,
        header_len: 52,
        table: [28, 42],
        program_header_len: 32,
        segment: [4, 12, 16, 20],
        read: |bytes, at| u32_at(bytes, at).into(),
    },
    Class {
        number: 2,
        header_len: 64,
        table: [32, 54],
        program_header_len: 56,
        segment: [8, 24, 32, 40],
        read: u64_at,
    },
];

/// A part of the file that is loaded to a guest address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The guest address.
    pub address: u64,
}

/// Reason why an ELF file cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// Headers or notes that cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The file is for another machine.
    #[error("an ELF file, but not one for x86; give an x86_64 kernel")]
    Machine,
    /// The file is shorter than its headers claim.
    #[error("an ELF file that is cut off; copy or build it again")]
    CutOff,
    /// Headers that contradict each other.
    #[error("an ELF file with malformed headers; the file may be incomplete")]
    Malformed,
    /// A segment is below 1 MiB, as in programs of an operating system.
    #[error(
        "an ELF file, but not a kernel: it loads to addresses below 1 MiB; give a bzImage, or a vmlinux with a PVH \
         entry"
    )]
    NotAKernel,
    /// The file has no PVH entry.
    #[error("an ELF file without a PVH entry; give a bzImage, or a vmlinux built with CONFIG_PVH")]
    NoEntry,
}

/// A kernel or firmware, as its headers describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// The parts to load.
    pub segments: Vec<Segment>,
    /// The first address after the last segment, including its `.bss`.
    pub end: u64,
    /// The address at which the boot CPU starts, in 32-bit mode.
    pub entry: u32,
    /// True if it is a Linux kernel, according to its notes.
    pub is_linux: bool,
}

impl Elf {
    /// Reads the headers of `file`. `None` if it is not an ELF file.
    ///
    /// # Errors
    ///
    /// Fails if it is an ELF file that cannot be booted.
    pub fn parse(file: &File) -> Result<Option<Self>, ElfError> {
        let mut magic = [0; 4];
        if file.read_exact_at(&mut magic, 0).is_err() || magic != MAGIC {
            return Ok(None);
        }
        let mut ident = [0; IDENT_LEN];
        read(file, &mut ident, 0)?;
        let class = CLASSES.iter().find(|class| class.number == ident[4]).filter(|_| ident[5] == LITTLE_ENDIAN);
        let class = class.ok_or(ElfError::Machine)?;
        let mut header = vec![0; class.header_len];
        read(file, &mut header, 0)?;
        if ![MACHINE_386, MACHINE_X86_64].contains(&u16_at(&header, 18)) {
            return Err(ElfError::Machine);
        }
        let [offset_at, len_at] = class.table;
        let (offset, count) = ((class.read)(&header, offset_at), u16_at(&header, len_at + 2));
        if usize::from(u16_at(&header, len_at)) != class.program_header_len || count > MAX_PROGRAM_HEADERS {
            return Err(ElfError::Malformed);
        }
        let mut headers = vec![0; class.program_header_len * usize::from(count)];
        read(file, &mut headers, offset)?;
        Self::from_program_headers(file, class, &headers).map(Some)
    }

    /// True if its load addresses are those of firmware, not of a kernel.
    pub fn is_firmware(&self) -> bool {
        !self.is_linux && self.segments.iter().any(|segment| segment.address < LOWEST_KERNEL)
    }

    fn from_program_headers(file: &File, class: &Class, headers: &[u8]) -> Result<Self, ElfError> {
        let mut segments = Vec::new();
        let mut end = 0;
        let (mut entry, mut is_linux) = (None, false);
        for header in headers.chunks_exact(class.program_header_len) {
            let [offset, address, len, memory] = class.segment.map(|at| (class.read)(header, at));
            match u32_at(header, 0) {
                PT_LOAD if memory > 0 => {
                    if address < HIGH_MEMORY {
                        return Err(ElfError::NotAKernel);
                    }
                    if len > memory {
                        return Err(ElfError::Malformed);
                    }
                    end = end.max(address.checked_add(memory).ok_or(ElfError::Malformed)?);
                    // A segment without bytes in the file may have any offset.
                    if len != 0 {
                        let last = offset.checked_add(len - 1).ok_or(ElfError::CutOff)?;
                        read(file, &mut [0], last)?;
                    }
                    segments.push(Segment { offset, len, address });
                }
                PT_NOTE => {
                    let mut notes = vec![0; len.min(MAX_NOTES_LEN) as usize];
                    read(file, &mut notes, offset)?;
                    let found = Notes::of(&notes);
                    entry = entry.or(found.entry);
                    is_linux |= found.is_linux;
                }
                _ => {}
            }
        }
        Ok(Self { segments, end, entry: entry.ok_or(ElfError::NoEntry)?, is_linux })
    }
}

/// Reads a part of the file that its headers refer to.
fn read(file: &File, bytes: &mut [u8], offset: u64) -> Result<(), ElfError> {
    file.read_exact_at(bytes, offset).map_err(|error| match error.kind() {
        // No file has an offset that is negative as a signed number.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput => ElfError::CutOff,
        _ => ElfError::Read(error),
    })
}

/// Contents of the notes.
#[derive(Default)]
struct Notes {
    /// The address in the PVH note.
    entry: Option<u32>,
    /// True if a note is Linux's.
    is_linux: bool,
}

impl Notes {
    /// Reads `notes`, up to the first malformed one.
    fn of(mut notes: &[u8]) -> Self {
        let mut found = Self::default();
        while let Some((note, rest)) = Note::first(notes) {
            match (note.name, note.kind) {
                (NOTE_NAME, NOTE_PHYS32_ENTRY) if found.entry.is_none() => {
                    found.entry = note.data.get(..4).map(|entry| u32_at(entry, 0));
                }
                (LINUX_NAME, _) => found.is_linux = true,
                _ => {}
            }
            notes = rest;
        }
        found
    }
}

/// A note.
struct Note<'a> {
    /// The owner, with padding.
    name: &'a [u8],
    /// The type, which the owner defines.
    kind: u32,
    /// The contents.
    data: &'a [u8],
}

impl<'a> Note<'a> {
    /// The first of `notes`, and those after it.
    fn first(notes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (header, rest) = notes.split_at_checked(12)?;
        let [name_len, len, kind] = [0, 4, 8].map(|at| u32_at(header, at));
        let (name, rest) = rest.split_at_checked((name_len as usize).next_multiple_of(4))?;
        let data = rest.get(..len as usize)?;
        // The last note may lack its padding.
        let rest = rest.get((len as usize).next_multiple_of(4)..).unwrap_or_default();
        Some((Self { name, kind, data }, rest))
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const HEADER_LEN: usize = 64;
    const PROGRAM_HEADER_LEN: usize = 56;

    /// An ELF file with one segment of `code` at 2 MiB and the given notes.
    fn elf(code: &[u8], notes: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([2, LITTLE_ENDIAN, 1]);
        bytes.resize(HEADER_LEN, 0);
        bytes[18..20].copy_from_slice(&MACHINE_X86_64.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&2u16.to_le_bytes());
        let data = (HEADER_LEN + 2 * PROGRAM_HEADER_LEN) as u64;
        let segments =
            [(PT_LOAD, data, code.len() as u64, 0x1000), (PT_NOTE, data + code.len() as u64, notes.len() as u64, 0)];
        for (kind, offset, len, memory) in segments {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(0u32.to_le_bytes());
            for field in [offset, 0xffff_ffff_8020_0000, 0x20_0000, len, memory, 0] {
                bytes.extend(field.to_le_bytes());
            }
        }
        bytes.extend(code);
        bytes.extend(notes);
        bytes
    }

    /// The ELF file of [`elf`] as a 32-bit file.
    fn elf_32(code: &[u8], notes: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, LITTLE_ENDIAN, 1]);
        bytes.resize(52, 0);
        bytes[18..20].copy_from_slice(&MACHINE_386.to_le_bytes());
        bytes[28..32].copy_from_slice(&52u32.to_le_bytes());
        bytes[42..44].copy_from_slice(&32u16.to_le_bytes());
        bytes[44..46].copy_from_slice(&2u16.to_le_bytes());
        let (data, len, notes_len) = (52 + 2 * 32, code.len() as u32, notes.len() as u32);
        for (kind, offset, len, memory) in [(PT_LOAD, data, len, 0x1000), (PT_NOTE, data + len, notes_len, 0)] {
            // Type, offset, addresses, lengths, flags, alignment.
            for field in [kind, offset, 0xc020_0000, 0x20_0000, len, memory, 0, 0] {
                bytes.extend(field.to_le_bytes());
            }
        }
        [&bytes[..], code, notes].concat()
    }

    fn note(name: &[u8], kind: u32, data: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for field in [name.len() as u32, data.len() as u32, kind] {
            note.extend(field.to_le_bytes());
        }
        for part in [name, data] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    fn parse(bytes: &[u8]) -> Result<Option<Elf>, ElfError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Elf::parse(&file)
    }

    #[test]
    fn the_pvh_entry_is_found_among_other_notes() {
        let mut notes = note(b"GNU\0", 3, &[1, 2, 3]);
        notes.extend(note(b"Xen\0", 5, b"linux\0"));
        notes.extend(note(b"Xen\0", NOTE_PHYS32_ENTRY, &0x20_0010u64.to_le_bytes()));
        let elf = parse(&elf(b"code", &notes)).unwrap().unwrap();
        assert_eq!(elf.entry, 0x20_0010);
        assert_eq!(elf.segments, [Segment { offset: 176, len: 4, address: 0x20_0000 }]);
        assert_eq!(elf.end, 0x20_1000);
    }

    #[test]
    fn a_kernel_without_a_pvh_entry_is_refused() {
        for notes in [vec![], note(b"GNU\0", 18, &[0; 8]), note(b"Xen\0", 18, &[0; 2]), vec![0xff; 64]] {
            assert!(matches!(parse(&elf(b"code", &notes)), Err(ElfError::NoEntry)), "{notes:?}");
        }
    }

    #[test]
    fn a_file_of_another_kind_is_not_an_elf_file() {
        assert!(parse(b"").unwrap().is_none());
        assert!(parse(&[0; 4096]).unwrap().is_none());
    }

    #[test]
    fn firmware_is_known_by_where_it_is_loaded() {
        let mut file = elf(b"code", &note(b"Xen\0", NOTE_PHYS32_ENTRY, &[0; 4]));
        assert!(!parse(&file).unwrap().unwrap().is_firmware());
        // Like edk2's CLOUDHV.fd: a 64-bit file for a 32-bit machine, loaded to 1 MiB.
        file[18..20].copy_from_slice(&MACHINE_386.to_le_bytes());
        file[HEADER_LEN + 24..HEADER_LEN + 32].copy_from_slice(&HIGH_MEMORY.to_le_bytes());
        assert!(parse(&file).unwrap().unwrap().is_firmware());
    }

    #[test]
    fn a_32_bit_file_is_read_like_a_64_bit_one() {
        let notes = note(b"Xen\0", NOTE_PHYS32_ENTRY, &0x20_0010u32.to_le_bytes());
        let found = parse(&elf_32(b"code", &notes)).unwrap().unwrap();
        let segments = vec![Segment { offset: 116, len: 4, address: 0x20_0000 }];
        assert_eq!(found, Elf { segments, end: 0x20_1000, entry: 0x20_0010, is_linux: false });
        let notes = [&notes[..], &note(b"Linux\0", 0x100, &[0; 4])].concat();
        assert!(parse(&elf_32(b"code", &notes)).unwrap().unwrap().is_linux);
        assert!(matches!(parse(&elf_32(b"code", b"")), Err(ElfError::NoEntry)));
    }

    #[test]
    fn a_wrong_32_bit_file_is_an_error() {
        let whole = elf_32(b"code", &note(b"Xen\0", NOTE_PHYS32_ENTRY, &[0; 4]));
        for len in 4..whole.len() {
            assert!(matches!(parse(&whole[..len]), Err(ElfError::CutOff)), "{len}");
        }
        let with = |at: usize, bytes: &[u8]| {
            let mut file = whole.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            parse(&file)
        };
        // Another class, another byte order, another machine.
        for (at, byte) in [(4, 0), (4, 3), (5, 2), (18, 0xb7)] {
            assert!(matches!(with(at, &[byte]), Err(ElfError::Machine)), "{at}");
        }
        // Headers of another length; a segment with more bytes in the file than in memory.
        for (at, bytes) in [(42, [56, 0, 2, 0]), (52 + 20, [3, 0, 0, 0])] {
            assert!(matches!(with(at, &bytes), Err(ElfError::Malformed)), "{at}");
        }
        assert!(matches!(with(52 + 12, &[0; 4]), Err(ElfError::NotAKernel)), "a segment below 1 MiB");
        // The 4 GiB that its numbers can address.
        assert_eq!(with(52 + 20, &[0xff; 4]).unwrap().unwrap().end, 0x1_001f_ffff);
    }

    #[test]
    fn linux_is_known_by_a_note_before_or_after_the_entry() {
        let entry = note(b"Xen\0", NOTE_PHYS32_ENTRY, &0x20_0010u64.to_le_bytes());
        let linux = note(b"Linux\0", 0x100, &[0; 4]);
        for notes in [[&linux[..], &entry].concat(), [&entry[..], &linux].concat()] {
            let mut file = elf(b"code", &notes);
            let found = parse(&file).unwrap().unwrap();
            assert!(found.is_linux && found.entry == 0x20_0010);
            // Wherever it is loaded.
            file[HEADER_LEN + 24..HEADER_LEN + 32].copy_from_slice(&HIGH_MEMORY.to_le_bytes());
            assert!(!parse(&file).unwrap().unwrap().is_firmware());
        }
        for name in [&b"linux\0"[..], b"Linux2\0", b"Lin\0", b"Xen\0"] {
            let notes = [&entry[..], &note(name, 0x100, &[0; 4])].concat();
            assert!(!parse(&elf(b"code", &notes)).unwrap().unwrap().is_linux, "{name:?}");
        }
    }

    #[test]
    fn a_malformed_note_hides_those_after_it_alone() {
        let entry = note(b"Xen\0", NOTE_PHYS32_ENTRY, &0x20_0010u64.to_le_bytes());
        let linux = note(b"Linux\0", 0x100, &[0; 4]);
        let notes = [&entry[..], &[0xff; 12], &linux].concat();
        let found = parse(&elf(b"code", &notes)).unwrap().unwrap();
        assert!(!found.is_linux && found.entry == 0x20_0010);
    }

    #[test]
    fn a_truncated_or_foreign_elf_file_is_an_error() {
        let whole = elf(b"code", &note(b"Xen\0", 18, &[0; 4]));
        for len in 4..whole.len() {
            assert!(matches!(parse(&whole[..len]), Err(ElfError::CutOff)), "{len}");
        }
        let mut foreign = whole.clone();
        foreign[18] = 0xb7;
        assert!(matches!(parse(&foreign), Err(ElfError::Machine)));
    }

    #[test]
    fn a_segment_without_bytes_in_the_file_may_name_any_offset() {
        let mut file = elf(b"", &note(b"Xen\0", NOTE_PHYS32_ENTRY, &[0; 4]));
        for offset in [0x10_0000, 1 << 63, u64::MAX] {
            file[HEADER_LEN + 8..HEADER_LEN + 16].copy_from_slice(&offset.to_le_bytes());
            let found = parse(&file).unwrap().unwrap();
            assert_eq!((found.segments[0].len, found.end), (0, 0x20_1000), "{offset:#x}");
            let mut longer = file.clone();
            longer[HEADER_LEN + 32..HEADER_LEN + 40].copy_from_slice(&2u64.to_le_bytes());
            assert!(matches!(parse(&longer), Err(ElfError::CutOff)), "{offset:#x}");
        }
    }

    #[test]
    fn a_segment_that_wraps_or_lies_below_1_mib_is_refused() {
        let whole = elf(b"code", &note(b"Xen\0", 18, &[0; 4]));
        for address in [0u64, u64::MAX - 0x10] {
            let mut wrong = whole.clone();
            wrong[HEADER_LEN + 24..HEADER_LEN + 32].copy_from_slice(&address.to_le_bytes());
            let refused = parse(&wrong).unwrap_err();
            let is_expected = matches!((address, refused), (0, ElfError::NotAKernel) | (1.., ElfError::Malformed));
            assert!(is_expected, "{address:#x}");
        }
    }
}
