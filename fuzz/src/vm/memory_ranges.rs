//! The file of a saved guest's memory, which is untrusted, and its description in `state.json`.
//!
//! A memory of any regions is written, read as plain bytes, changed, checked and read back. An accepted file is loaded
//! with its present contents, a truncated one is refused, and no number in it sizes an allocation. A modified state is
//! refused in one line or has the memory's layout, which follows from addresses alone.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use virtio_devices::GuestMap;
use vm_memory::{Bytes, GuestAddress};
use vmm::testing::{ImageSteps, StateSteps};

use crate::functions::saved_state::{change, place_of};
use crate::input::{Input, Seed};

const PAGE: u64 = 4096;
/// Alignment of a region's offset.
const ALIGNMENT: u64 = 2 << 20;
/// First bytes of the file's last page.
const MAGIC: &[u8] = b"guest memory v1\n";

// The subject of an input.
const STATE: u8 = 1;
const ADDRESSES: u8 = 2;

// The kinds of change of a file.
const CUT: u8 = 0;
const GROW: u8 = 1;
const PUT: u8 = 2;
const PUNCH: u8 = 3;
const KINDS: u8 = 4;

/// Result of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// The file or the state was read.
    Read,
    /// The file was refused.
    Refused,
    /// A file cannot be so long, or the addresses are invalid.
    NoLayout,
}

/// Runs an input.
pub fn run(input: &[u8]) {
    follow(input);
}

fn follow(input: &[u8]) -> Seen {
    let mut input = Input::new(input);
    match input.u8() {
        STATE => read_state(&mut input),
        ADDRESSES => lay_out(&mut input),
        _ => read_file(&mut input),
    }
}

/// Some regions of a few pages each.
fn regions(input: &mut Input<'_>) -> Vec<(u64, u64)> {
    let mut next = 0;
    (0..input.u8() % 3 + 1)
        .map(|_| {
            let start = next + u64::from(input.u8()) * PAGE;
            let len = u64::from(input.u8() % 16 + 1) * PAGE;
            next = start + len;
            (start, len)
        })
        .collect()
}

/// Offsets of regions in the file, and its length, by the rules: in numbers that do not overflow.
fn places(regions: &[(u64, u64)]) -> Option<(Vec<u64>, u64)> {
    let (mut last, mut end, mut offsets) = (0u128, 0u128, Vec::new());
    for &(start, len) in regions {
        if len == 0 || u128::from(start) < last || u64::MAX - start < len {
            return None;
        }
        last = u128::from(start + len);
        let offset = end.div_ceil(ALIGNMENT.into()) * u128::from(ALIGNMENT);
        end = offset + u128::from(len);
        offsets.push(u64::try_from(offset).ok()?);
    }
    let size = end.div_ceil(PAGE.into()) * u128::from(PAGE) + u128::from(PAGE);
    (size <= i64::MAX as u128).then_some((offsets, size as u64))
}

/// Lays out regions at any addresses.
fn lay_out(input: &mut Input<'_>) -> Seen {
    let mut regions = Vec::new();
    while !input.is_empty() && regions.len() < 100 {
        // Near each other, or anywhere.
        let last = regions.last().map_or(0, |(start, len): &(u64, u64)| start.saturating_add(*len));
        let start = if input.u8().is_multiple_of(2) { last.saturating_add(input.u16().into()) } else { input.u64() };
        let len = if input.u8().is_multiple_of(2) { input.u16().into() } else { input.u64() };
        regions.push((start, len));
    }
    let found = ImageSteps::of(&regions).map(|image| (image.offsets(), image.size()));
    assert_eq!(found, places(&regions), "{regions:x?}");
    if found.is_some() { Seen::Read } else { Seen::NoLayout }
}

/// The file as plain bytes.
struct Model {
    bytes: Vec<u8>,
    offsets: Vec<u64>,
    size: u64,
    id: [u8; 16],
}

impl Model {
    fn trailer(&self) -> [u8; PAGE as usize] {
        let mut trailer = [0; PAGE as usize];
        trailer[..MAGIC.len()].copy_from_slice(MAGIC);
        trailer[MAGIC.len()..MAGIC.len() + 16].copy_from_slice(&self.id);
        trailer
    }

    /// True if the file is complete, and has the memory of this snapshot.
    fn is_whole(&self) -> bool {
        self.bytes.len() as u64 == self.size && self.bytes.ends_with(&self.trailer())
    }

    fn region(&self, n: usize, len: u64) -> &[u8] {
        &self.bytes[self.offsets[n] as usize..][..len as usize]
    }
}

fn read_file(input: &mut Input<'_>) -> Seen {
    let regions = regions(input);
    let ranges: Vec<_> = regions.iter().map(|(start, len)| (GuestAddress(*start), *len as usize)).collect();
    let empty = || GuestMap::from_ranges(&ranges).expect("memory for a guest");
    let image = ImageSteps::of(&regions).expect("they ascend");
    let (offsets, size) = places(&regions).expect("it is small");
    assert_eq!((image.offsets(), image.size()), (offsets.clone(), size));
    let id = input.array();
    let mut model = Model { bytes: vec![0; size as usize], offsets, size, id };

    let memory = empty();
    for _ in 0..input.u8() % 32 {
        let n = usize::from(input.u8()) % regions.len();
        let (start, len) = regions[n];
        // Also with zeros, which make zero pages.
        let (at, value) = (u64::from(input.u16()) % len, input.u8());
        let bytes = vec![value; (u64::from(input.u16()) % (2 * PAGE) + 1).min(len - at) as usize];
        memory.write_slice(&bytes, GuestAddress(start + at)).expect("it is in the region");
        let at = (model.offsets[n] + at) as usize;
        model.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    let trailer = model.trailer();
    let is_used = |page: &&[u8]| page.iter().any(|byte| *byte != 0);
    let used = model.bytes.chunks(PAGE as usize).filter(is_used).count() as u64;
    let end = model.bytes.len() - trailer.len();
    model.bytes[end..].copy_from_slice(&trailer);

    let file = File::from(memfd_create("image", MemfdFlags::CLOEXEC).expect("the host makes files in memory"));
    assert_eq!(image.save(&memory, &file, &model.id).expect("the file is written"), used * PAGE);
    let found = file.metadata().expect("it is open");
    assert_eq!((found.len(), found.blocks() * 512), (size, (used + 1) * PAGE), "zeros take no room");

    while !input.is_empty() {
        change_file(&file, &mut model, input);
    }
    let checked = image.check(&file, &model.id);
    assert_eq!(checked.is_ok(), model.is_whole(), "{checked:?}");
    if let Err(line) = &checked {
        assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
    }
    assert!(image.check(&file, &[!model.id[0]; 16]).is_err(), "another snapshot's");

    // The file may be changed after the check.
    let loaded = empty();
    let read = image.load(&file, &loaded);
    assert_eq!(read.is_ok(), model.bytes.len() as u64 >= size, "{read:?} of {} bytes", model.bytes.len());
    let Ok(read) = read else { return Seen::Refused };
    assert!(read <= size);
    for (n, (start, len)) in regions.iter().enumerate() {
        let mut bytes = vec![0; *len as usize];
        loaded.read_slice(&mut bytes, GuestAddress(*start)).expect("it is the region");
        assert!(bytes == model.region(n, *len), "region {n}");
    }
    if checked.is_ok() { Seen::Read } else { Seen::Refused }
}

/// Changes the file, and the model in the same way.
fn change_file(file: &File, model: &mut Model, input: &mut Input<'_>) {
    let (kind, place) = (input.u8() % KINDS, input.u32());
    // Anywhere, or around a region's beginning or end, or the trailer.
    let base = match place % 4 {
        0 => 0,
        1 => model.size - PAGE,
        _ => model.offsets[place as usize / 4 % model.offsets.len()],
    };
    let at = (base + u64::from(input.u16())) as usize;
    let len = usize::from(input.u16());
    match kind {
        CUT => model.bytes.truncate(at),
        GROW => model.bytes.resize(model.bytes.len() + len, 0),
        PUT => {
            let value = [input.u8()].repeat(len);
            file.write_all_at(&value, at as u64).expect("the file is written");
            if len > 0 && model.bytes.len() < at + len {
                model.bytes.resize(at + len, 0);
            }
            if len > 0 {
                model.bytes[at..at + len].copy_from_slice(&value);
            }
            return;
        }
        _ => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, at as u64, len as u64 + 1).expect("a file in memory has holes");
            let end = (at + len + 1).min(model.bytes.len());
            model.bytes.get_mut(at..end).unwrap_or_default().fill(0);
            return;
        }
    }
    file.set_len(model.bytes.len() as u64).expect("the file's length is set");
}

/// The regions of the state's machine.
const OF_STATE: [(u64, u64); 2] = [(0, 512 << 20), (4 << 30, 128 << 20)];

fn read_state(input: &mut Input<'_>) -> Seen {
    let image = ImageSteps::of(&OF_STATE).expect("they ascend");
    let cut = usize::from(input.u16());
    let mut state = image.state(input.array());
    while !input.is_empty() {
        change(&mut state, input);
    }
    // An attacker may update the checksum, too.
    let mut bytes = StateSteps::file(state.clone());
    if cut > 0 {
        bytes.truncate(cut.min(bytes.len() - 1));
    }
    match StateSteps::read(&bytes) {
        Err(line) => {
            assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
            Seen::Refused
        }
        Ok(read) => {
            assert_eq!(cut, 0, "a part of a state is none");
            assert_eq!(read.write(), StateSteps::read(&read.write()).expect("its own bytes").write());
            let says = state["memory"].clone();
            let (offsets, size) = places(&OF_STATE).expect("it is small");
            let is_so = says["file_size"] == size
                && says["regions"].as_array().is_some_and(|all| all.len() == offsets.len())
                && OF_STATE.iter().zip(offsets).enumerate().all(|(n, ((start, len), offset))| {
                    let region = &says["regions"][n];
                    region["address"] == *start && region["size"] == *len && region["offset"] == offset
                });
            assert_eq!(read.is_of(&image), is_so, "{says}");
            if is_so { Seen::Read } else { Seen::NoLayout }
        }
    }
}

/// Seeds: unchanged and truncated files, with holes and other bytes; states; addresses at the limits of all numbers.
pub fn seeds() -> Vec<Vec<u8>> {
    // Two regions of 3 and 16 pages with an id; bytes at the beginning of each, zeros, and the last byte.
    let filled = || {
        let write = |seed: Seed, n: u8, at: u16, value: u8, len: u16| {
            seed.with([n]).with(at.to_le_bytes()).with([value]).with(len.to_le_bytes())
        };
        let seed = Seed::new().with([0, 1, 0, 2, 9, 15]).with([7; 16]).with([4]);
        let seed = write(seed, 0, 0, 1, 0);
        let seed = write(seed, 1, 4000, 2, 200);
        let seed = write(seed, 1, 20_000, 0, 8000);
        write(seed, 1, u16::MAX, 3, 0)
    };
    let change = |kind: u8, place: u32, at: u16, len: u16| {
        let seed = filled().with([kind]).with(place.to_le_bytes()).with(at.to_le_bytes());
        seed.with(len.to_le_bytes()).with([5]).done()
    };
    let state = |changes: &[u8]| Seed::new().with([STATE, 0, 0]).with([9; 16]).with(changes).done();
    let value = ImageSteps::of(&OF_STATE).expect("they ascend").state([9; 16]);
    let set = |at: &str, value: u32, state_value: &serde_json::Value| {
        Seed::new()
            .with([0])
            .with(place_of(state_value, at).to_le_bytes())
            .with([0, 0])
            .with(value.to_le_bytes())
            .done()
    };
    let anywhere = |ranges: &[(u64, u64)]| {
        let seed = Seed::new().with([ADDRESSES]);
        let add = |seed: Seed, (start, len): &(u64, u64)| {
            seed.with([1]).with(start.to_le_bytes()).with([1]).with(len.to_le_bytes())
        };
        ranges.iter().fold(seed, add).done()
    };
    vec![
        filled().done(),
        change(CUT, 1, 0, 0),
        change(CUT, 0, 8000, 0),
        change(GROW, 0, 0, 1),
        change(PUT, 1, 16, 1),
        change(PUT, 0, 4095, 2),
        change(PUNCH, 2, 0, 4095),
        change(PUNCH, 1, 0, 4095),
        state(&[]),
        Seed::new().with([STATE, 77, 0]).with([9; 16]).done(),
        state(&set("/memory/file_size", 4096, &value)),
        state(&set("/memory/regions/1/offset", 0, &value)),
        state(&set("/id", 0, &value)),
        anywhere(&[(0, 3 << 20), (4 << 30, 5)]),
        anywhere(&[(0, 10), (9, 10)]),
        anywhere(&[(0, u64::MAX)]),
        anywhere(&[(u64::MAX - 1, 2)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_read_and_refused() {
        let seen: Vec<_> = seeds().iter().map(|seed| follow(seed)).collect();
        let (read, refused, none) = (Seen::Read, Seen::Refused, Seen::NoLayout);
        let files = [read, refused, refused, refused, refused, read, read, refused];
        let states = [read, refused, none, none, refused];
        assert_eq!(seen, [&files[..], &states, &[read, none, none, none]].concat());
    }
}
