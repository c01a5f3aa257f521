//! Persistent memory with its driver.

use std::fs::File;
use std::path::PathBuf;

use pci::Rid;

use super::*;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually, memory};
use crate::testing::{Driver, Hosted};
use crate::{ErrorKind, Memory, VirtioFunction};

const UNIT: u64 = PmemSpec::UNIT;
/// Address of replies.
const ANSWER: u64 = BUFFERS + 0x100;

fn spec(file: &Path) -> PmemSpec {
    PmemSpec { id: "_pmem0".into(), file: file.into(), size: None, discard_writes: false }
}

/// A file of `len` bytes in its own folder.
fn file(len: u64) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pmem");
    File::create(&path).unwrap().set_len(len).unwrap();
    (folder, path)
}

type Guest = crate::testing::guest::Guest<Pmem>;

impl Guest {
    /// Sends a chain, and returns its used length and the status word.
    fn ask(&mut self, chain: &[(u64, u32, u16)]) -> (u32, u32) {
        self.queues[0].memory_write(ANSWER, &[0xee; 4]);
        let len = self.send(chain);
        (len, u32::from_le_bytes(self.queues[0].bytes(ANSWER, 4).try_into().unwrap()))
    }

    /// A request of this type.
    fn request(&mut self, kind: u32) -> (u32, u32) {
        self.queues[0].memory_write(BUFFERS, &kind.to_le_bytes());
        self.ask(&[(BUFFERS, 4, 0), (ANSWER, 4, WRITE)])
    }

    fn counts(&self) -> Vec<(PmemCounter, u64)> {
        let counters = self.device.counters();
        let all = PmemCounter::ALL.iter().map(|counter| (*counter, counters.get(*counter)));
        all.filter(|(counter, count)| *count != 0 && !matches!(counter, PmemCounter::Kicks | PmemCounter::Interrupts))
            .collect()
    }

    fn has_counts(&self, expected: &[(PmemCounter, u64)]) {
        eventually("counts", || self.counts() == expected);
    }
}

#[test]
fn a_flush_is_answered_when_it_is_done() {
    let (_folder, path) = file(UNIT);
    let mut guest = Guest::new(Pmem::open(spec(&path)).unwrap());
    assert_eq!(guest.workers[0].thread.name(), "_pmem0_q0");
    assert_eq!(guest.request(0), (4, 0));
    guest.await_interrupt(0);
    // In pieces, and with more room than the status needs.
    guest.queues[0].memory_write(BUFFERS, &[0; 4]);
    assert_eq!(guest.ask(&[(BUFFERS, 1, 0), (BUFFERS + 1, 3, 0), (ANSWER, 1, WRITE), (ANSWER + 1, 9, WRITE)]), (4, 0));
    guest.has_counts(&[(PmemCounter::Flushes, 2)]);
}

#[test]
fn a_flush_that_fails_is_an_error_of_the_driver() {
    let (_folder, path) = file(UNIT);
    let mut pmem = Pmem::open(spec(&path)).unwrap();
    // Flushing fails there.
    pmem.file = Some(Arc::new(File::open("/dev/null").unwrap().into()));
    let mut guest = Guest::new(pmem);
    assert_eq!(guest.request(0), (4, 1));
    guest.has_counts(&[(PmemCounter::BackendErrors, 1)]);
}

#[test]
fn a_chain_that_is_no_request_is_given_back_and_counted() {
    let (_folder, path) = file(UNIT);
    let mut guest = Guest::new(Pmem::open(spec(&path)).unwrap());
    assert_eq!(guest.request(1), (4, 1));
    let untouched = u32::from_le_bytes([0xee; 4]);
    for chain in [
        &[(BUFFERS, 4, 0)][..],
        &[(ANSWER, 4, WRITE)],
        &[(BUFFERS, 3, 0), (ANSWER, 4, WRITE)],
        &[(BUFFERS, 4, 0), (ANSWER, 3, WRITE)],
        &[(ANSWER, 4, WRITE), (BUFFERS, 4, 0)],
        &[(MEMORY, 4, 0), (ANSWER, 4, WRITE)],
        &[(BUFFERS, 4, 0), (u64::MAX - 1, 4, WRITE)],
    ] {
        assert_eq!(guest.ask(chain), (0, untouched), "{chain:?}");
    }
    assert_eq!(guest.request(0), (4, 0));
    guest.has_counts(&[(PmemCounter::Flushes, 1), (PmemCounter::BadRequests, 1), (PmemCounter::BadChains, 7)]);
    guest.break_ring(0);
}

#[test]
fn without_a_file_to_write_to_a_flush_is_done_at_once() {
    let (_folder, path) = file(UNIT);
    let mut guest = Guest::new(Pmem::open(PmemSpec { discard_writes: true, ..spec(&path) }).unwrap());
    assert!(guest.device.file.is_none());
    assert_eq!(guest.request(0), (4, 0));
}

#[test]
fn pmem_config_reports_the_bar_address_and_the_memory_size() {
    let (_folder, path) = file(3 * UNIT);
    let rid = Rid::from_bits(3 << 3);
    let pmem = VirtioFunction::plain(Pmem::open(spec(&path)).unwrap(), rid, Memory::new(memory())).unwrap();
    let mut function = Hosted::new(pmem);
    let mut driver = Driver::new(&mut function, rid);
    // Sizing: the next power of two, prefetchable, at 64 bits.
    let _ = driver.config_write(0x10, 4, u32::MAX);
    assert_eq!(driver.config_read(0x10, 4), 0xff80_000c);
    let _ = driver.config_write(0x10, 4, 0x4080_0000);
    let _ = driver.config_write(0x14, 4, 0x12);
    let word = |driver: &mut Driver<'_, _>, at: u64| driver.bar_read(2, 0x200 + at, 4);
    assert_eq!([0, 4, 8, 12].map(|at| word(&mut driver, at)), [0, 0, 0x60_0000, 0], "it is nowhere yet");
    let _ = driver.config_write(0x04, 2, 0b10);
    assert_eq!([0, 4, 8, 12, 16].map(|at| word(&mut driver, at)), [0x4080_0000, 0x12, 0x60_0000, 0, 0]);
    let _ = driver.config_write(0x14, 4, 0x13);
    assert_eq!(word(&mut driver, 4), 0x13);
    // Reads beyond the end of the file return ones.
    assert_eq!(driver.bar_read(0, 3 * UNIT, 4), u32::MAX);
}

#[test]
fn file_keeps_its_size_or_a_part_and_a_folder_gets_a_temp_file() {
    let (folder, path) = file(3 * UNIT);
    let size = |size, file: &Path| Pmem::open(PmemSpec { size, ..spec(file) }).unwrap().memory.len();
    assert_eq!(size(None, &path), 3 * UNIT);
    assert_eq!(size(Some(UNIT), &path), UNIT);
    assert_eq!(size(Some(5 * UNIT), folder.path()), 5 * UNIT);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "it has no name");
    let pmem = Pmem::open(PmemSpec { size: Some(UNIT), discard_writes: true, ..spec(folder.path()) }).unwrap();
    assert_eq!(pmem.memory.len(), UNIT);
}

#[test]
fn a_file_unfit_as_memory_is_refused_in_one_line() {
    let (folder, path) = file(UNIT + 1);
    let said = |size, file: &Path| {
        let error = Pmem::open(PmemSpec { size, ..spec(file) }).err().unwrap();
        let text = error.to_string();
        assert!(!text.contains('\n'));
        (error.kind(), text.replace(&folder.path().display().to_string(), "F"))
    };
    let (kind, text) = said(None, &path);
    assert_eq!(kind, ErrorKind::Unsuitable);
    assert!(text.starts_with("file=F/pmem: its size, 2097153 bytes, is not a multiple of 2M"), "{text}");
    let (_, text) = said(Some(2 * UNIT), &path);
    assert!(text.starts_with("file=F/pmem,size=4194304: the file has 2097153 bytes"), "{text}");
    let (_, text) = said(None, folder.path());
    assert!(text.starts_with("file=F: is a folder; add size="), "{text}");
    let (kind, text) = said(None, &folder.path().join("none"));
    assert_eq!(kind, ErrorKind::Missing);
    assert!(text.starts_with("file=F/none: cannot be opened: "), "{text}");
    assert!(
        matches!(said(None, Path::new("/dev/null")), (ErrorKind::Unsuitable, text) if text.contains("is not a file"))
    );
    let (_, text) = said(Some(1 << 46), folder.path());
    assert!(text.contains("cannot be used") || text.contains("is not a multiple"), "{text}");
}
