//! An untrusted qcow2 image: a valid one with some of its bytes changed.
//!
//! An image is refused, or it is read and written without a panic, in memory that its header does not size. A sound
//! image holds the written data, also after reopening.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};
use virtio_devices::testing::Qcow2Steps;

use crate::input::{Input, Seed};

const SECTOR: usize = 512;
/// The smallest cluster size, so that a short input reaches all tables.
const CLUSTER: usize = 512;
/// The size of the disk: as much as two L2 tables describe.
const SIZE: usize = 2 * (CLUSTER / 8) * CLUSTER;

// The clusters of the image.
const REFCOUNT_TABLE: usize = 1;
const REFCOUNTS: usize = 2;
const L1: usize = 3;
const L2: usize = 4;
const DATA: usize = 5;
const CLUSTERS: usize = 6;

/// A unit of growth: 64 of them need a larger L1 table.
const GROWTH: usize = (CLUSTER / 8) * CLUSTER;

/// Flag of an entry whose cluster has a single reference.
const COPIED: u64 = 1 << 63;

// The kinds of operation.
const READ: u8 = 0;
const WRITE: u8 = 1;
const ZERO: u8 = 2;
const DISCARD: u8 = 3;
const FLUSH: u8 = 4;
const REOPEN: u8 = 5;
const GROW: u8 = 6;
const KINDS: u8 = 7;

/// A sound image of version 3 whose first cluster holds [`first`].
fn sound() -> Vec<u8> {
    let mut image = vec![0; CLUSTERS * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    let place = |cluster: usize| (cluster * CLUSTER) as u64;
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &(CLUSTER.trailing_zeros()).to_be_bytes());
    put(24, &(SIZE as u64).to_be_bytes());
    put(36, &2u32.to_be_bytes());
    put(40, &place(L1).to_be_bytes());
    put(48, &place(REFCOUNT_TABLE).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    put(REFCOUNT_TABLE * CLUSTER, &place(REFCOUNTS).to_be_bytes());
    for cluster in 0..CLUSTERS {
        put(REFCOUNTS * CLUSTER + 2 * cluster, &1u16.to_be_bytes());
    }
    put(L1 * CLUSTER, &(place(L2) | COPIED).to_be_bytes());
    put(L2 * CLUSTER, &(place(DATA) | COPIED).to_be_bytes());
    put(DATA * CLUSTER, &first());
    image
}

fn first() -> [u8; CLUSTER] {
    std::array::from_fn(|n| n as u8)
}

/// A file of these bytes, in memory.
fn file(bytes: &[u8]) -> OwnedFd {
    let file = memfd_create("image", MemfdFlags::CLOEXEC).expect("the host makes files in memory");
    assert_eq!(rustix::io::pwrite(&file, bytes, 0), Ok(bytes.len()));
    file
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of operations that succeeded; `None` if the image was refused at first.
fn run_to_end(input: &[u8]) -> Option<usize> {
    let mut input = Input::new(input);
    let (flags, changes) = (input.u8(), input.u8());
    let mut bytes = sound();
    for _ in 0..changes {
        let (at, len) = (usize::from(input.u16()) % bytes.len(), usize::from(input.u8() % 9));
        let change = input.slice(len.min(bytes.len() - at));
        bytes[at..at + change.len()].copy_from_slice(change);
    }
    let read_only = flags & 1 != 0;
    let mut model = (changes == 0 && !read_only).then(|| {
        let mut model = vec![0; SIZE];
        model[..CLUSTER].copy_from_slice(&first());
        model
    });
    let file = file(&bytes);
    let open = || Qcow2Steps::open(file.try_clone().expect("a descriptor is left"), read_only);
    let mut image = open();
    assert!(image.is_some() || changes != 0, "a sound image is opened");
    let opened = image.is_some();
    let mut succeeded = 0;
    while let Some(now) = image.as_ref()
        && !input.is_empty()
    {
        let kind = input.u8() % KINDS;
        let (sector, count) = (usize::from(input.u16()), usize::from(input.u8()));
        let offset = sector % (SIZE / SECTOR) * SECTOR;
        let len = (count + 1) * SECTOR;
        let len = if model.is_some() { len.min(SIZE - offset) } else { len };
        let done = match kind {
            READ => {
                let mut data = vec![0; len];
                let done = now.read(offset as u64, &mut data);
                assert!(model.as_ref().is_none_or(|model| done && data == model[offset..offset + len]));
                done
            }
            WRITE => now.write(offset as u64, &vec![count as u8 | 1; len]),
            ZERO | DISCARD => now.zero(offset as u64, len as u64, kind == DISCARD),
            FLUSH => now.flush(),
            GROW => {
                let size = (SIZE + (count + 1) * GROWTH) as u64;
                now.resize(size) || now.size() >= size
            }
            _ => {
                // The old one writes its cached metadata before the new one reads.
                drop(image.take());
                image = open();
                image.is_some()
            }
        };
        succeeded += usize::from(done);
        if let Some(model) = &mut model {
            assert!(done, "operation {kind} of a sound image succeeds");
            match kind {
                WRITE => model[offset..offset + len].fill(count as u8 | 1),
                ZERO | DISCARD => model[offset..offset + len].fill(0),
                _ => {}
            }
        }
    }
    opened.then_some(succeeded)
}

/// A sound image with these changes.
fn start(changes: &[(usize, &[u8])]) -> Seed {
    let seed = Seed::new().with([0, changes.len() as u8]);
    changes
        .iter()
        .fold(seed, |seed, (at, bytes)| seed.with((*at as u16).to_le_bytes()).with([bytes.len() as u8]).with(bytes))
}

fn operation(seed: Seed, kind: u8, sector: u16, count: u8) -> Seed {
    seed.with([kind]).with(sector.to_le_bytes()).with([count])
}

/// Every kind of operation, over the whole disk.
fn everything(seed: Seed) -> Seed {
    let all = [
        (READ, 0, 255),
        (WRITE, 0, 1),
        (WRITE, 70, 40),
        (READ, 60, 60),
        (ZERO, 71, 20),
        (DISCARD, 0, 80),
        (FLUSH, 0, 0),
        (GROW, 0, 2),
        (WRITE, 3, 3),
        (GROW, 0, 99),
        (REOPEN, 0, 0),
        (READ, 0, 127),
    ];
    all.into_iter().fold(seed, |seed, (kind, sector, count)| operation(seed, kind, sector, count))
}

/// Seeds: sound images, and images with wrong table entries.
pub fn seeds() -> Vec<Vec<u8>> {
    let entry = |cluster: usize| ((cluster * CLUSTER) as u64 | COPIED).to_be_bytes();
    let changed: [&[(usize, &[u8])]; 9] = [
        &[],
        // Two clusters of the disk in one; one in the tables; one beyond the end of the file, and at the largest
        // offset.
        &[(L2 * CLUSTER + 8, &entry(DATA))],
        &[(L2 * CLUSTER + 8, &entry(L2))],
        &[(L2 * CLUSTER + 8, &entry(1 << 20))],
        &[(L2 * CLUSTER + 8, &(u64::MAX >> 8 & !511 | COPIED).to_be_bytes())],
        // Compressed, with invalid data; zero, with a cluster.
        &[(L2 * CLUSTER + 8, &(1u64 << 62 | 0x1234).to_be_bytes())],
        &[(L2 * CLUSTER + 8, &(entry(DATA).map(|byte| byte | 1)))],
        // Reference counts that are all 0, and that are at the tables' offset.
        &[(REFCOUNTS * CLUSTER, &[0; 8])],
        &[(REFCOUNT_TABLE * CLUSTER, &((L1 * CLUSTER) as u64).to_be_bytes())],
    ];
    changed.into_iter().map(|changes| everything(start(changes)).done()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sound_image_does_all_that_it_is_asked() {
        assert_eq!(run_to_end(&everything(start(&[])).done()), Some(12));
    }

    #[test]
    fn seeds_with_changed_tables_open_and_a_changed_header_fails() {
        for seed in seeds() {
            assert!(run_to_end(&seed).is_some_and(|succeeded| succeeded > 0), "{seed:?}");
        }
        assert_eq!(run_to_end(&everything(start(&[(0, b"X")])).done()), None);
        // Without a refcount block for the first clusters, imago would search a place for it forever.
        assert_eq!(run_to_end(&everything(start(&[(REFCOUNT_TABLE * CLUSTER, &[0; 8])])).done()), None);
    }
}
