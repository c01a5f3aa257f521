//! Guest memory that is loaded from a snapshot on demand, and block by block in the background.
//!
//! A separate thread resolves faults of vCPUs, of the host's kernel, and of this process, and ends when all memory is
//! loaded.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec};
use virtio_devices::{GuestMap, NewThread, Thread};
use vm_memory::GuestMemoryRegion;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::image_layout::ImageLayout;
use super::memory_image::placed;
use super::present::{PAGE, data};
use super::userfault::{DEVICE, Message, Userfault};
use crate::threads::{self, ThreadKind};

/// Bytes per read.
const BLOCK: u64 = 256 << 10;
/// Stack of the thread, in bytes.
const STACK: usize = 128 << 10;
/// Pause before retrying a failed read.
const RETRY: Duration = Duration::from_millis(200);

/// Checks that pages can be read on demand here.
///
/// # Errors
///
/// Fails with the reason.
pub(crate) fn check() -> Result<(), String> {
    Userfault::new().map(drop).map_err(|error| format!("{DEVICE}: {error}"))
}

/// A region of the guest's memory.
struct Region {
    /// Addresses in this process.
    host: Range<u64>,
    /// Offset in the file, in bytes.
    offset: u64,
    /// Bitmap of pages that were filled or removed, and are never read from the file again.
    settled: Vec<u64>,
    /// Blocks with data in the file that are not read yet, by offset in the region.
    ahead: Vec<Range<u64>>,
}

/// Background loader of a guest's memory. Dropping it ends loading; missing pages read as zero.
#[derive(Debug)]
pub(crate) struct PageFaults {
    progress: Arc<Progress>,
    /// True if a read error may end loading, because the guest is shutting down.
    is_dispensable: Arc<AtomicBool>,
    end: Arc<EventFd>,
    thread: Option<Thread>,
}

/// Progress of loading.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    is_done: Mutex<bool>,
    changed: Condvar,
    /// True while loading fails, and once the thread has ended.
    failed: AtomicBool,
}

impl Progress {
    /// Waits until all memory is loaded, loading fails, or `stop` returns true. Returns true if all is loaded.
    pub(crate) fn wait(&self, stop: &dyn Fn() -> bool) -> bool {
        let mut is_done = self.is_done.lock();
        while !*is_done && !stop() && !self.failed.load(Ordering::Acquire) {
            self.changed.wait_for(&mut is_done, RETRY);
        }
        *is_done
    }

    /// True once all memory is loaded.
    pub(crate) fn is_done(&self) -> bool {
        *self.is_done.lock()
    }

    fn finish(&self) {
        *self.is_done.lock() = true;
        self.changed.notify_all();
    }
}

impl PageFaults {
    /// Starts loading `memory`, which is private and has no pages, from `file`.
    ///
    /// # Errors
    ///
    /// Fails if the host refuses.
    pub(crate) fn begin(memory: &GuestMap, layout: &ImageLayout, file: &Arc<File>) -> io::Result<Self> {
        let fault = Userfault::new()?;
        let mut regions = Vec::new();
        for (region, offset) in placed(memory, layout) {
            let start = region.as_ptr() as u64;
            let host = start..start + region.len();
            fault.register(&host)?;
            let words = usize::try_from(region.len().div_ceil(PAGE * 64)).map_err(io::Error::other)?;
            let mut ahead = Vec::new();
            data(file, &(offset..offset + region.len()), &mut |range| {
                ahead.push(range.start - offset..range.end - offset);
                Ok(())
            })?;
            ahead.reverse();
            regions.push(Region { host, offset, settled: vec![0; words], ahead });
        }
        let (progress, is_dispensable) = (Arc::<Progress>::default(), Arc::<AtomicBool>::default());
        let end = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
        let filler = Filler {
            fault,
            file: Arc::clone(file),
            regions,
            waiting: Vec::new(),
            buffer: vec![0; BLOCK as usize],
            progress: Arc::clone(&progress),
            is_dispensable: Arc::clone(&is_dispensable),
            end: Arc::clone(&end),
            is_told: false,
            unread: None,
        };
        let kind = ThreadKind::PageFaults;
        let thread = threads::start(kind, NewThread::new(kind.name(), STACK, move || filler.run()))?;
        Ok(Self { progress, is_dispensable, end, thread: Some(thread) })
    }

    /// Prepares for the guest's end. Pages are still read, so that I/O in flight completes, but the first read error
    /// ends loading and unblocks waiters with zero pages; otherwise stopping the devices would hang.
    pub(crate) fn give_up_on_failure(&self) {
        self.is_dispensable.store(true, Ordering::Release);
    }

    /// Progress of loading.
    pub(crate) const fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }
}

impl Drop for PageFaults {
    fn drop(&mut self) {
        let _ = self.end.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// State of the thread.
struct Filler {
    fault: Userfault,
    file: Arc<File>,
    regions: Vec<Region>,
    /// Faulting addresses, in this process.
    waiting: Vec<u64>,
    buffer: Vec<u8>,
    progress: Arc<Progress>,
    is_dispensable: Arc<AtomicBool>,
    end: Arc<EventFd>,
    /// True if the current read failure is logged.
    is_told: bool,
    /// Offset of the failed read. Other parts of the file may be readable.
    unread: Option<u64>,
}

impl Filler {
    fn run(mut self) {
        loop {
            match self.turn() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    if !self.is_told {
                        log::error!("the guest waits: its memory cannot be read from the snapshot: {error}");
                        self.is_told = true;
                    }
                    self.progress.failed.store(true, Ordering::Release);
                    if self.is_dispensable.load(Ordering::Acquire) {
                        break;
                    }
                    std::thread::sleep(RETRY);
                }
            }
        }
        // Closing the userfaultfd unblocks all waiters with zero pages.
        self.progress.failed.store(true, Ordering::Release);
    }

    /// Resolves a fault, or reads the next block ahead. Returns false when loading has ended.
    fn turn(&mut self) -> io::Result<bool> {
        let is_idle = self.waiting.is_empty() && self.regions.iter().all(|region| region.ahead.is_empty());
        if is_idle {
            return self.finish().map(|()| false);
        }
        if self.is_ended()? {
            return Ok(false);
        }
        self.read_messages()?;
        if let Some(address) = self.waiting.last().copied() {
            if self.resolve(address)? {
                self.waiting.pop();
            }
            return Ok(true);
        }
        self.read_ahead()?;
        Ok(true)
    }

    fn is_ended(&self) -> io::Result<bool> {
        let mut fds = [PollFd::from_borrowed_fd(borrow(&self.end), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(rustix::event::poll(&mut fds, Some(&now))? > 0)
    }

    /// Ends loading: the kernel fills missing pages with zeros.
    fn finish(&mut self) -> io::Result<()> {
        for region in &self.regions {
            self.fault.unregister(&region.host)?;
            // Faults from before that.
            self.fault.wake(&region.host).or_else(|error| match error.raw_os_error() {
                Some(libc::EINVAL | libc::ENOENT) => Ok(()),
                _ => Err(error),
            })?;
        }
        self.progress.finish();
        Ok(())
    }

    fn read_messages(&mut self) -> io::Result<()> {
        while let Some(message) = self.fault.message()? {
            match message {
                Message::Fault(address) => self.waiting.push(address / PAGE * PAGE),
                Message::Removed(range) => self.settle(&range),
            }
        }
        Ok(())
    }

    /// Marks pages as never to be read from the file again.
    fn settle(&mut self, range: &Range<u64>) {
        for region in &mut self.regions {
            let start = range.start.max(region.host.start);
            let end = range.end.min(region.host.end);
            if start < end {
                region.settle(&(start - region.host.start..end - region.host.start));
            }
        }
    }

    /// Fills the block of the page at `address`. Returns false if a message must be read first.
    fn resolve(&mut self, address: u64) -> io::Result<bool> {
        let Some(n) = self.regions.iter().position(|region| region.host.contains(&address)) else { return Ok(true) };
        let Some(region) = self.regions.get(n) else { return Ok(true) };
        let at = address - region.host.start;
        if region.is_settled(at) {
            // The page was removed after the fault, or its block is filled.
            let page = address..address + PAGE;
            let (_, result) = self.fault.zero(&page);
            return match result.map_err(|error| (error.raw_os_error(), error)) {
                Ok(()) => Ok(true),
                Err((Some(libc::EEXIST), _)) => self.fault.wake(&page).map(|()| true),
                Err((Some(libc::EAGAIN), _)) => Ok(false),
                Err((_, error)) => Err(error),
            };
        }
        let start = at / BLOCK * BLOCK;
        let end = (start + BLOCK).min(region.host.end - region.host.start);
        self.fill(n, &(start..end))
    }

    fn read_ahead(&mut self) -> io::Result<()> {
        let Some(n) = self.regions.iter().position(|region| !region.ahead.is_empty()) else { return Ok(()) };
        let Some(range) = self.regions.get(n).and_then(|region| region.ahead.last().cloned()) else { return Ok(()) };
        let block = range.start..range.end.min(range.start / BLOCK * BLOCK + BLOCK);
        if !self.fill(n, &block)? {
            return Ok(());
        }
        if let Some(region) = self.regions.get_mut(n) {
            region.ahead.pop();
            if block.end < range.end {
                region.ahead.push(block.end..range.end);
            }
        }
        Ok(())
    }

    /// Fills the unsettled pages of a block, by offsets in region `n`. Returns false if a message must be read first:
    /// removed pages must not be filled.
    fn fill(&mut self, n: usize, block: &Range<u64>) -> io::Result<bool> {
        let Some(region) = self.regions.get_mut(n) else { return Ok(true) };
        let len = usize::try_from(block.end - block.start).map_err(io::Error::other)?;
        let Some(bytes) = self.buffer.get_mut(..len) else { return Ok(true) };
        let at = region.offset + block.start;
        self.file.read_exact_at(bytes, at).inspect_err(|_| self.unread = Some(at))?;
        let mut next = block.start;
        while next < block.end {
            if region.is_settled(next) {
                next += PAGE;
                continue;
            }
            let mut end = next + PAGE;
            while end < block.end && !region.is_settled(end) {
                end += PAGE;
            }
            let part = (next - block.start) as usize..(end.min(block.end) - block.start) as usize;
            let (taken, result) = self.fault.copy(region.host.start + next, bytes.get(part).unwrap_or_default());
            region.settle(&(next..next + taken));
            next += taken;
            match result.map_err(|error| (error.raw_os_error(), error)) {
                Ok(()) => {}
                // An existing page is newer than the file.
                Err((Some(libc::EEXIST), _)) => {
                    let page = region.host.start + next..region.host.start + next + PAGE;
                    region.settle(&(next..next + PAGE));
                    self.fault.wake(&page)?;
                    next += PAGE;
                }
                Err((Some(libc::EAGAIN), _)) => return Ok(false),
                Err((_, error)) => return Err(error),
            }
        }
        self.recovered(at);
        Ok(true)
    }

    /// Clears the failure at `at` after a successful read there.
    fn recovered(&mut self, at: u64) {
        if self.unread.is_some_and(|unread| unread != at) {
            return;
        }
        self.unread = None;
        if self.is_told {
            log::info!("the guest's memory can be read from the snapshot again");
            self.is_told = false;
        }
        self.progress.failed.store(false, Ordering::Release);
    }
}

impl Region {
    fn is_settled(&self, offset: u64) -> bool {
        let page = offset / PAGE;
        let word = usize::try_from(page / 64).ok().and_then(|word| self.settled.get(word));
        word.is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    fn settle(&mut self, range: &Range<u64>) {
        for page in range.start / PAGE..range.end.div_ceil(PAGE) {
            if let Some(word) = usize::try_from(page / 64).ok().and_then(|word| self.settled.get_mut(word)) {
                *word |= 1 << (page % 64);
            }
        }
    }
}

fn borrow(event: &EventFd) -> std::os::fd::BorrowedFd<'_> {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the eventfd stays open while it is borrowed.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use rustix::mm::Advice;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _, MemoryRegionAddress};

    use super::*;
    use crate::lazy_memory::memory_image;

    const MIB: u64 = 1 << 20;

    fn memory() -> GuestMap {
        let ranges = [(GuestAddress(0), 9 * MIB as usize), (GuestAddress(1 << 32), 3 * MIB as usize)];
        GuestMap::from_ranges(&ranges).unwrap()
    }

    /// An image with data in every other 100 KiB: each page begins with its address.
    fn image() -> (Arc<File>, ImageLayout) {
        let (file, memory) = (Arc::new(tempfile::tempfile().unwrap()), memory());
        for page in pages().filter(|page| (page.0 / (100 << 10)).is_multiple_of(2)) {
            memory.write_obj(page.0 | 1, page).unwrap();
        }
        let layout = ImageLayout::of_memory(&memory).unwrap();
        memory_image::save(&memory, &layout, &file, &[0; 16], &|| false).unwrap();
        (file, layout)
    }

    fn pages() -> impl Iterator<Item = GuestAddress> {
        (0..9 * MIB).chain(1 << 32..(1 << 32) + 3 * MIB).step_by(4096).map(GuestAddress)
    }

    fn expected(page: GuestAddress) -> u64 {
        if (page.0 / (100 << 10)).is_multiple_of(2) { page.0 | 1 } else { 0 }
    }

    #[test]
    fn each_page_is_as_it_was_saved_at_any_threads_first_access() {
        let (file, layout) = image();
        for _ in 0..3 {
            let memory = memory();
            let faults = PageFaults::begin(&memory, &layout, &file).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..4u64 {
                    let memory = &memory;
                    scope.spawn(move || {
                        let all: Vec<_> = pages().collect();
                        for n in 0..all.len() {
                            let page = all[(n * 7919 + thread as usize * 31) % all.len()];
                            assert_eq!(memory.read_obj::<u64>(page).unwrap(), expected(page));
                        }
                    });
                }
            });
            assert!(faults.progress().wait(&|| false));
            drop(faults);
            assert!(pages().all(|page| memory.read_obj::<u64>(page).unwrap() == expected(page)));
        }
    }

    #[test]
    fn the_kernels_own_accesses_are_resolved_too() {
        let (file, layout) = image();
        let memory = memory();
        let _faults = PageFaults::begin(&memory, &layout, &file).unwrap();
        let region = memory.iter().last().unwrap();
        let (mut reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let at = MemoryRegionAddress(2 * MIB);
        region.write_all_volatile_to(at, &mut writer, 8).unwrap();
        let mut bytes = [0; 8];
        io::Read::read_exact(&mut reader, &mut bytes).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), expected(GuestAddress((1 << 32) + 2 * MIB)));
    }

    #[test]
    fn pages_that_are_given_back_stay_zero() {
        let (file, layout) = image();
        for _ in 0..20 {
            let memory = memory();
            let faults = PageFaults::begin(&memory, &layout, &file).unwrap();
            let region = memory.iter().next().unwrap();
            // A whole MiB, and a part of a block.
            for range in [MIB..2 * MIB, 4 * MIB + 4096..4 * MIB + 3 * 4096] {
                let start = region.as_ptr().wrapping_add(range.start as usize);
                // SAFETY: the range is in a mapping to which there are no references.
                unsafe { rustix::mm::madvise(start.cast(), (range.end - range.start) as usize, Advice::LinuxDontNeed) }
                    .unwrap();
            }
            let is_back = |page: GuestAddress| {
                (MIB..2 * MIB).contains(&page.0) || (4 * MIB + 4096..4 * MIB + 3 * 4096).contains(&page.0)
            };
            for page in pages() {
                let expected = if is_back(page) { 0 } else { expected(page) };
                assert_eq!(memory.read_obj::<u64>(page).unwrap(), expected, "{page:?}");
            }
            assert!(faults.progress().wait(&|| false));
        }
    }

    /// An image file that cannot be read, although it reports its holes.
    fn unreadable() -> (Arc<File>, ImageLayout, File) {
        let (file, layout) = image();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&*file));
        let unreadable = File::options().write(true).open(path).unwrap();
        (Arc::new(unreadable), layout, Arc::into_inner(file).unwrap())
    }

    #[test]
    fn waiter_on_an_unreadable_page_resumes_when_the_guest_ends() {
        let (file, layout, _readable) = unreadable();
        let memory = memory();
        let faults = PageFaults::begin(&memory, &layout, &file).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| memory.read_obj::<u64>(GuestAddress(0)).unwrap());
            std::thread::sleep(3 * RETRY);
            assert!(!waiting.is_finished());
            faults.give_up_on_failure();
            assert_eq!(waiting.join().unwrap(), 0);
        });
        assert!(!faults.progress().wait(&|| false));
    }

    #[test]
    fn a_file_that_can_be_read_again_ends_the_failure() {
        let (file, layout, readable) = unreadable();
        let memory = memory();
        let faults = PageFaults::begin(&memory, &layout, &file).unwrap();
        assert!(!faults.progress().wait(&|| false), "it fails");
        let [from, to] = [&readable, &*file].map(std::os::fd::AsRawFd::as_raw_fd);
        // SAFETY: both descriptors are open, and the second one stays that of a file.
        assert_eq!(unsafe { libc::dup2(from, to) }, to);
        let began = std::time::Instant::now();
        while !faults.progress().wait(&|| false) {
            assert!(began.elapsed() < Duration::from_secs(20), "it fails for ever");
            std::thread::sleep(RETRY);
        }
        assert!(pages().all(|page| memory.read_obj::<u64>(page).unwrap() == expected(page)));
    }

    #[test]
    fn readable_pages_are_still_filled_when_the_guest_ends() {
        let (file, layout) = image();
        let memory = memory();
        let faults = PageFaults::begin(&memory, &layout, &file).unwrap();
        faults.give_up_on_failure();
        assert!(pages().all(|page| memory.read_obj::<u64>(page).unwrap() == expected(page)));
        assert!(faults.progress().wait(&|| false));
    }

    #[test]
    fn page_faults_dropped_early_end_at_once() {
        let (file, layout) = image();
        for _ in 0..50 {
            let memory = memory();
            drop(PageFaults::begin(&memory, &layout, &file).unwrap());
        }
    }
}
