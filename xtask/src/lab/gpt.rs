//! The partition table of a disk that firmware boots from (`UEFI 2.10 §5.3`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Context, Result};

/// The length of a logical block in bytes.
const BLOCK: u64 = 512;
/// The length of the array of entries in blocks: 128 of 128 bytes.
const ENTRY_BLOCKS: u64 = 32;
const ENTRY_LEN: usize = 128;
/// Partitions start at multiples of this many bytes. Only the first table is before the first partition.
const ALIGNMENT: u64 = 1 << 20;

/// Type of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The file system from which firmware loads programs.
    EfiSystem,
    /// A file system of Linux.
    Linux,
}

impl Kind {
    /// The type's GUID, in the byte order of the table.
    const fn guid(self) -> [u8; 16] {
        match self {
            // C12A7328-F81F-11D2-BA4B-00A0C93EC93B
            Kind::EfiSystem => {
                [0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b]
            }
            // 0FC63DAF-8483-4772-8E79-3D69D8477DE4
            Kind::Linux => {
                [0xaf, 0x3d, 0xc6, 0x0f, 0x83, 0x84, 0x72, 0x47, 0x8e, 0x79, 0x3d, 0x69, 0xd8, 0x47, 0x7d, 0xe4]
            }
        }
    }
}

/// Creates a sparse disk at `path` with empty partitions of these kinds and sizes in bytes, and returns their offsets.
pub(crate) fn create(path: &Path, partitions: &[(Kind, u64)]) -> Result<Vec<u64>> {
    let mut offsets = Vec::new();
    let mut entries = vec![0; ENTRY_BLOCKS as usize * BLOCK as usize];
    let mut end = ALIGNMENT;
    for ((number, (kind, size)), entry) in (1u8..).zip(partitions).zip(entries.chunks_exact_mut(ENTRY_LEN)) {
        let (first, last) = (end / BLOCK, (end + size) / BLOCK - 1);
        entry[..16].copy_from_slice(&kind.guid());
        entry[16..32].copy_from_slice(&unique(number));
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
        offsets.push(end);
        end = (end + size).next_multiple_of(ALIGNMENT);
    }
    let blocks = (end + ALIGNMENT) / BLOCK;
    let disk = File::create(path).context(path.display())?;
    disk.set_len(blocks * BLOCK).context(path.display())?;
    let put = |block: u64, bytes: &[u8]| disk.write_all_at(bytes, block * BLOCK).context(path.display());
    put(0, &protective_mbr(blocks))?;
    let backup = blocks - 1;
    for (here, other, array) in [(1, backup, 2), (backup, 1, backup - ENTRY_BLOCKS)] {
        put(here, &header(here, other, array, blocks, crc32(&entries)))?;
        put(array, &entries)?;
    }
    Ok(offsets)
}

/// A GUID that is the same on each created disk: version 4, variant 1.
fn unique(number: u8) -> [u8; 16] {
    let mut guid = *b"cloud-hypervisor";
    guid[7] = guid[7] & 0x0f | 0x40;
    guid[8] = guid[8] & 0x3f | 0x80;
    guid[15] = number;
    guid
}

/// The boot record that marks the whole disk as in use for software without support for these tables (`§5.2.3`).
fn protective_mbr(blocks: u64) -> [u8; BLOCK as usize] {
    let mut block = [0; BLOCK as usize];
    let len = u32::try_from(blocks - 1).unwrap_or(u32::MAX);
    block[446..454].copy_from_slice(&[0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff]);
    block[454..458].copy_from_slice(&1u32.to_le_bytes());
    block[458..462].copy_from_slice(&len.to_le_bytes());
    block[510..].copy_from_slice(&[0x55, 0xaa]);
    block
}

/// The header in block `here`, of entries in block `array` with the checksum `entries` (`§5.3.2`).
fn header(here: u64, other: u64, array: u64, blocks: u64, entries: u32) -> [u8; 92] {
    let mut header = [0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    header[8..12].copy_from_slice(&0x0001_0000u32.to_le_bytes());
    header[12..16].copy_from_slice(&92u32.to_le_bytes());
    let (first_usable, last_usable) = (2 + ENTRY_BLOCKS, blocks - 2 - ENTRY_BLOCKS);
    for (at, value) in (24..).step_by(8).zip([here, other, first_usable, last_usable]) {
        header[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    header[56..72].copy_from_slice(&unique(0));
    header[72..80].copy_from_slice(&array.to_le_bytes());
    header[80..84].copy_from_slice(&(ENTRY_BLOCKS as u32 * BLOCK as u32 / ENTRY_LEN as u32).to_le_bytes());
    header[84..88].copy_from_slice(&(ENTRY_LEN as u32).to_le_bytes());
    header[88..].copy_from_slice(&entries.to_le_bytes());
    let sum = crc32(&header);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    header
}

/// The CRC-32 of Ethernet (polynomial 0x04C11DB7, reflected).
fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 };
    !bytes.iter().fold(u32::MAX, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_standards() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn both_tables_check_and_say_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let offsets = create(&path, &[(Kind::EfiSystem, 3 << 20), (Kind::Linux, 5 << 20)]).unwrap();
        assert_eq!(offsets, [1 << 20, 4 << 20]);
        let disk = std::fs::read(&path).unwrap();
        assert_eq!(disk.len() as u64, 10 << 20);
        let last = disk.len() as u64 / BLOCK - 1;
        let mut arrays = Vec::new();
        for (here, other) in [(1, last), (last, 1)] {
            let mut header: Vec<u8> = disk[(here * BLOCK) as usize..][..92].to_vec();
            let dword = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let qword = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
            assert_eq!((qword(24), qword(32)), (here, other));
            let array = &disk[(qword(72) * BLOCK) as usize..][..(dword(80) * dword(84)) as usize];
            assert_eq!(crc32(array), dword(88));
            let sum = dword(16);
            header[16..20].fill(0);
            assert_eq!(crc32(&header), sum);
            arrays.push(array);
        }
        assert_eq!(arrays[0], arrays[1]);
        let qword = |at: usize| u64::from_le_bytes(arrays[0][at..at + 8].try_into().unwrap());
        assert_eq!((qword(32), qword(40), qword(160), qword(168)), (2048, 8191, 8192, 18431));
    }
}
