//! A guest's memory that its VMM shares with backends, as a file.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::vmm::Vmm;

const PAGE: u64 = 4096;
/// Bytes that are compared at once.
const PIECE: u64 = 1 << 20;

/// A page in which two memories differ, and the differing bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The number of the page in the memory file.
    pub page: u64,
    /// From the first differing byte to the one after the last.
    pub bytes: Range<usize>,
}

/// The pages in which the memories of the guests of two VMMs differ.
pub(crate) fn differing_pages(one: &Vmm, other: &Vmm) -> Vec<Difference> {
    let [one, other] = [one, other].map(memory_of);
    let length = one.metadata().expect("a memory has a length").len();
    assert_eq!(length, other.metadata().expect("a memory has a length").len(), "the lengths of both memories");
    let [mut bytes, mut others] = [(); 2].map(|()| vec![0; PIECE as usize]);
    let mut pages = Vec::new();
    for at in (0..length).step_by(PIECE as usize) {
        if [&one, &other].iter().all(|file| is_hole(file, at)) {
            continue;
        }
        one.read_exact_at(&mut bytes, at).expect("the memory can be read");
        other.read_exact_at(&mut others, at).expect("the memory can be read");
        let both = bytes.chunks(PAGE as usize).zip(others.chunks(PAGE as usize));
        // The guest is paused and its target waits, so whole pages are compared at once.
        let differing = (at / PAGE..).zip(both).filter(|(_, (one, other))| one != other);
        pages.extend(differing.filter_map(|(page, (one, other))| {
            let mut unequal = (0..).zip(one.iter().zip(other)).filter(|(_, (a, b))| a != b).map(|(at, _)| at);
            let first = unequal.next()?;
            Some(Difference { page, bytes: first..unequal.last().unwrap_or(first) + 1 })
        }));
    }
    pages
}

fn memory_of(vmm: &Vmm) -> File {
    let folder = format!("/proc/{}/fd", vmm.id());
    let mut files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}")).flatten();
    let is_memory = |path: &std::path::Path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:guest-memory"))
    };
    let found = files.find(|file| is_memory(&file.path())).expect("the VMM shares its guest's memory");
    File::open(found.path()).unwrap_or_else(|error| panic!("{}: {error}", found.path().display()))
}

/// True if the piece at `at` is a hole.
fn is_hole(file: &File, at: u64) -> bool {
    // SAFETY: lseek has no memory effects.
    let next = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, libc::SEEK_DATA) };
    // There is no data after it.
    next < 0 || next as u64 >= at + PIECE
}
