//! A disk with an EFI system partition, made without tools: a partition table and a FAT32 file system.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::gpt::{self, Kind};

const SECTOR: usize = 512;
/// The size of the partition in sectors. Each cluster has one sector: FAT32 has at least 65,525 clusters.
const SECTORS: u32 = 70_000;
/// The sectors before the first table.
const RESERVED: u16 = 32;
/// Two tables of 4 bytes for each cluster.
const TABLE_SECTORS: u32 = (SECTORS * 4).div_ceil(SECTOR as u32);
/// The end of a chain of clusters, and an entry's attributes.
const LAST: u32 = 0x0fff_ffff;
const DIRECTORY: u8 = 0x10;
const LONG_NAME: u8 = 0x0f;

/// A file or a directory. Names have at most 13 characters. Directories have no entries for themselves and their
/// parents, which a boot loader does not use.
pub(crate) enum Node<'a> {
    File(&'a str, &'a [u8]),
    Directory(&'a str, Vec<Self>),
}

/// The clusters in use, of one sector each; the first has number 2.
struct Volume {
    table: Vec<u32>,
    data: Vec<u8>,
}

impl Volume {
    /// Adds a chain of clusters, and returns its first.
    fn add(&mut self, bytes: &[u8]) -> u32 {
        let first = self.table.len() as u32;
        let count = bytes.len().div_ceil(SECTOR).max(1) as u32;
        self.table.extend((first + 1..first + count).chain([LAST]));
        self.data.extend(bytes);
        self.data.resize((self.table.len() - 2) * SECTOR, 0);
        first
    }

    /// Adds a directory, and returns its first cluster.
    fn add_directory(&mut self, nodes: &[Node]) -> u32 {
        let mut entries = Vec::new();
        for (node, number) in nodes.iter().zip(b'A'..) {
            let (name, attributes, cluster, len) = match node {
                Node::File(name, bytes) => (name, 0, self.add(bytes), bytes.len() as u32),
                Node::Directory(name, nodes) => (name, DIRECTORY, self.add_directory(nodes), 0),
            };
            let mut short = *b"SHORT-X    ";
            short[6] = number;
            entries.extend(long_name(name, &short));
            let mut entry = [0; 32];
            entry[..11].copy_from_slice(&short);
            entry[11] = attributes;
            entry[20..22].copy_from_slice(&((cluster >> 16) as u16).to_le_bytes());
            entry[26..28].copy_from_slice(&(cluster as u16).to_le_bytes());
            entry[28..].copy_from_slice(&len.to_le_bytes());
            entries.extend(entry);
        }
        self.add(&entries)
    }
}

/// The long-name entry, which precedes the short-name entry.
fn long_name(name: &str, short: &[u8; 11]) -> [u8; 32] {
    let mut characters: Vec<u16> = name.encode_utf16().collect();
    assert!(characters.len() <= 13, "{name}");
    if characters.len() < 13 {
        characters.push(0);
    }
    characters.resize(13, 0xffff);
    let mut entry = [0; 32];
    // The first and last of its parts.
    entry[0] = 0x41;
    entry[11] = LONG_NAME;
    entry[13] = short.iter().fold(0, |sum: u8, byte| sum.rotate_right(1).wrapping_add(*byte));
    let places = (1..11).step_by(2).chain((14..26).step_by(2)).chain([28, 30]);
    for (place, character) in places.zip(characters) {
        entry[place..place + 2].copy_from_slice(&character.to_le_bytes());
    }
    entry
}

/// The first sector, which describes the file system.
fn boot_sector(root: u32) -> [u8; SECTOR] {
    let mut sector = [0; SECTOR];
    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0xeb, 0x58, 0x90]);
    put(3, b"MSWIN4.1");
    put(11, &(SECTOR as u16).to_le_bytes());
    // A sector for a cluster; the tables.
    put(13, &[1]);
    put(14, &RESERVED.to_le_bytes());
    put(16, &[2]);
    put(21, &[0xf8]);
    put(32, &SECTORS.to_le_bytes());
    put(36, &TABLE_SECTORS.to_le_bytes());
    put(44, &root.to_le_bytes());
    put(66, &[0x29]);
    put(71, b"NO NAME    FAT32   ");
    put(510, &[0x55, 0xaa]);
    sector
}

/// Makes a raw image at `path` with these files in its EFI system partition.
pub(crate) fn create(path: &Path, nodes: &[Node]) {
    let offsets = gpt::create(path, &[(Kind::EfiSystem, u64::from(SECTORS) * SECTOR as u64)]).unwrap();
    let mut volume = Volume { table: vec![0x0fff_fff8, LAST], data: Vec::new() };
    let root = volume.add_directory(nodes);
    let table: Vec<u8> = volume.table.iter().flat_map(|next| next.to_le_bytes()).collect();
    let disk = File::options().write(true).open(path).unwrap();
    let put = |sector: u32, bytes: &[u8]| {
        disk.write_all_at(bytes, offsets[0] + u64::from(sector) * SECTOR as u64).unwrap();
    };
    let first_table = u32::from(RESERVED);
    put(0, &boot_sector(root));
    put(first_table, &table);
    put(first_table + TABLE_SECTORS, &table);
    put(first_table + 2 * TABLE_SECTORS, &volume.data);
}
