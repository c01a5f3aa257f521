use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver as Notified, channel};
use std::thread;

use vm_api::migration::MigrationRole;
use vm_memory::FileOffset;

use super::*;
use crate::dirty::DirtySource;
use crate::migration::incoming::{Incoming, Item};
use crate::migration::loader::Loader;

/// Number of pages: more than two chunks, the last one partial.
const PAGES: u64 = 2100;
const TOUCHED: [u64; 7] = [0, 5, 6, 1023, 1024, 1500, PAGES - 1];

/// Private memory, and memory of a file, with some pages touched and no huge pages.
fn memories() -> [(GuestMap, Option<File>); 2] {
    let size = (PAGES * PAGE) as usize;
    let file = File::from(rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size as u64).unwrap();
    let own = file.try_clone().unwrap();
    let shared = GuestMap::from_ranges_with_files([(GuestAddress(0), size, Some(FileOffset::new(file, 0)))]).unwrap();
    let private = GuestMap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
    for memory in [&private, &shared] {
        let region = memory.iter().next().unwrap();
        // SAFETY: a whole mapping, to which there are no references.
        unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxNoHugepage) }
            .unwrap();
        TOUCHED.iter().for_each(|page| memory.write_obj(page + 1, GuestAddress(page * PAGE)).unwrap());
    }
    [(private, None), (shared, Some(own))]
}

/// Returns the existing pages.
fn existing(memory: &GuestMap) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    let seen = present::Pages::new().each(memory.iter().next().unwrap(), &mut |range| {
        found.extend(range.start / PAGE..range.end.div_ceil(PAGE));
        Ok(())
    });
    seen.unwrap();
    found
}

/// Passes over `memory` to other memory, with these dirty-page sources.
struct Sent {
    out: PagesOut,
    to_send: Arc<Mutex<ToSend>>,
    progress: Progress,
    notified: Notified<Result<u64, String>>,
    target: GuestMap,
    reader: Option<thread::JoinHandle<()>>,
}

impl Sent {
    fn new(memory: &GuestMap, writers: Vec<Box<dyn DirtySource>>) -> Self {
        let (here, there) = UnixStream::pair().unwrap();
        let log = Some(DirtyLog::start(writers).unwrap());
        let to_send = Arc::new(Mutex::new(ToSend { pages: PageSet::all(memory), place: (0, 0), log }));
        let progress = Progress::new(MigrationRole::Sender, "copying");
        let (notify, notified) = channel();
        let notify = move |sent| _ = notify.send(sent);
        let out = PagesOut::new(vec![Stream::Unix(here)], memory, &to_send, &progress, notify).unwrap();
        let target = GuestMap::from_ranges(&[(GuestAddress(0), (PAGES * PAGE) as usize)]).unwrap();
        let loader = Loader::new(target.clone());
        let reader = thread::spawn(move || {
            let mut incoming = Incoming::new(there);
            while let Ok(item) = incoming.receive() {
                if let Item::Pages(pages) = item {
                    incoming.load(&pages, &loader).unwrap();
                }
            }
        });
        Self { out, to_send, progress, notified, target, reader: Some(reader) }
    }

    /// Sends a pass.
    fn pass(&self, number: u32) {
        {
            let mut to_send = self.to_send.lock();
            let ToSend { pages, place, log } = &mut *to_send;
            log.as_mut().unwrap().collect(pages).unwrap();
            *place = (0, 0);
        }
        self.out.send(number);
        self.notified.recv().unwrap().unwrap();
    }

    /// Ends the migration, and returns the pages that differ at the target.
    fn differing(mut self, memory: &GuestMap) -> Vec<u64> {
        self.out.close();
        self.reader.take().unwrap().join().unwrap();
        let first = |map: &GuestMap, page: u64| map.read_obj::<u64>(GuestAddress(page * PAGE)).unwrap();
        (0..PAGES).filter(|page| first(memory, *page) != first(&self.target, *page)).collect()
    }
}

#[test]
fn first_pass_allocates_no_source_page_and_sends_existing_ones() {
    for (memory, file) in memories() {
        let blocks = || file.as_ref().map_or(0, |file| file.metadata().unwrap().blocks());
        let before = (existing(&memory), blocks());
        assert_eq!(before.0, BTreeSet::from(TOUCHED));
        let sent = Sent::new(&memory, Vec::new());
        sent.pass(0);
        assert_eq!((existing(&memory), blocks()), before);
        let shown = sent.progress.shown();
        assert_eq!((shown.pages, shown.zero_pages), (TOUCHED.len() as u64, PAGES - TOUCHED.len() as u64));
        assert_eq!(sent.differing(&memory), [] as [u64; 0]);
    }
}

/// Writer to two pages of each chunk around its release, with a log like KVM's: the next copy has a write from before
/// the release, and a later write makes its page dirty.
struct Writer {
    memory: GuestMap,
    /// Page written before the chunk's release, and page written after it.
    pages: [u64; 2],
    dirty: Vec<u64>,
}

impl DirtySource for Writer {
    fn name(&self) -> &'static str {
        "the test writes"
    }

    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.dirty.drain(..).for_each(|page| pages.add(page, 1));
        Ok(())
    }

    fn release(&mut self, chunk: &Chunk) -> io::Result<()> {
        for (page, is_noted) in self.pages.into_iter().zip([false, true]) {
            let has_it = chunk.runs().iter().any(|(start, len)| (*start..start + len).contains(&(page * PAGE)));
            if has_it {
                self.memory.write_obj(page + 7, GuestAddress(page * PAGE)).unwrap();
                self.dirty.extend(is_noted.then_some(page));
            }
        }
        Ok(())
    }

    fn stop(&mut self) {}
}

#[test]
fn page_created_while_its_chunk_is_taken_is_sent_or_logged() {
    for (memory, _) in memories() {
        let writer = Writer { memory: memory.clone(), pages: [700, 1100], dirty: Vec::new() };
        let sent = Sent::new(&memory, vec![Box::new(writer)]);
        sent.pass(0);
        // Both existed at the check for existing pages, which comes after the release.
        assert_eq!(sent.progress.shown().pages, TOUCHED.len() as u64 + 2);
        // A page that is created later is dirty, and sent in the next pass, which does not check for existence.
        memory.write_obj(9_u64, GuestAddress(1300 * PAGE)).unwrap();
        sent.to_send.lock().pages.add(1300, 1);
        sent.pass(1);
        assert_eq!(sent.differing(&memory), [] as [u64; 0]);
    }
}
