//! Threads that send pages, one per connection. Each takes the next unsent chunk of a pass.
//!
//! The first pass has all pages, and many guests never use most of their memory. Pages that do not exist are sent as
//! zero without reading them: a read would allocate holes of shared memory.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;
use virtio_devices::{GuestMap, NewThread, Thread};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _};

use crate::dirty::{Chunk, DirtyLog, PageSet};
use crate::lazy_memory::present;
use crate::migration::control_channel::STACK;
use crate::migration::progress::Progress;
use crate::migration::transport::Stream;
use crate::migration::wire::{Frame, MAX_DATA, PAGE, Pages, Range};
use crate::threads::{self, ThreadKind};

/// Bytes read at a time.
const PIECE: usize = 256 << 10;

/// Pages to send, and the log of dirty pages.
pub(super) struct ToSend {
    /// The pages.
    pub pages: PageSet,
    /// Search position of the next chunk.
    pub place: (usize, usize),
    /// Log of dirty pages; `None` without writers.
    pub log: Option<DirtyLog>,
}

impl ToSend {
    /// Takes the next chunk. Later writes to it are logged again.
    fn take(&mut self) -> io::Result<Option<Chunk>> {
        let Some(chunk) = self.pages.take(&mut self.place) else { return Ok(None) };
        self.log.as_mut().map_or(Ok(()), |log| log.release(&chunk))?;
        Ok(Some(chunk))
    }
}

/// State of a thread.
struct PageSender {
    memory: GuestMap,
    present: present::Pages,
    to_send: Arc<Mutex<ToSend>>,
    stream: Arc<Stream>,
    progress: Progress,
    /// Page bytes of the frame that is being filled.
    data: Box<[u8]>,
    pages: Pages,
    sent: u64,
}

/// All connections for pages. Dropping this closes them.
pub(super) struct PagesOut {
    senders: Vec<(Arc<Stream>, Sender<u32>, Option<Thread>)>,
}

impl PagesOut {
    /// Starts a thread for each of `streams`. Calls `notify` once per pass and connection with the number of bytes
    /// sent, or with the reason of a failure.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn new(
        streams: Vec<Stream>,
        memory: &GuestMap,
        to_send: &Arc<Mutex<ToSend>>,
        progress: &Progress,
        notify: impl Fn(Result<u64, String>) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let mut all = Self { senders: Vec::new() };
        for (index, stream) in (0..).zip(streams) {
            let stream = Arc::new(stream);
            let (passes, todo) = channel();
            let sender = PageSender {
                memory: memory.clone(),
                present: present::Pages::new(),
                to_send: Arc::clone(to_send),
                stream: Arc::clone(&stream),
                progress: progress.clone(),
                data: vec![0; MAX_DATA].into(),
                pages: Pages::default(),
                sent: 0,
            };
            let notify = notify.clone();
            let name = format!("migration-{index}");
            let run = move || sender.run(&todo, notify);
            let thread = threads::start(ThreadKind::Migration, NewThread::new(&name, STACK, run))?;
            all.senders.push((stream, passes, Some(thread)));
        }
        Ok(all)
    }

    /// Number of connections.
    pub(super) fn count(&self) -> usize {
        self.senders.len()
    }

    /// Starts pass number `pass`.
    pub(super) fn send(&self, pass: u32) {
        for (_, passes, _) in &self.senders {
            // A thread that has failed has reported the reason.
            let _ = passes.send(pass);
        }
    }

    /// Closes the connections, whatever is being sent.
    pub(super) fn close(&mut self) {
        self.senders.iter().for_each(|(stream, ..)| stream.close());
        for (_, passes, thread) in self.senders.drain(..) {
            drop(passes);
            if let Some(thread) = thread {
                // A panic has already been reported.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for PagesOut {
    fn drop(&mut self) {
        self.close();
    }
}

impl PageSender {
    fn run(mut self, todo: &Receiver<u32>, notify: impl Fn(Result<u64, String>)) {
        for pass in todo {
            let sent = self.pass(pass);
            let failed = sent.is_err();
            notify(sent.map_err(|error| format!("memory cannot be sent: {error}")));
            if failed {
                return;
            }
        }
    }

    fn pass(&mut self, pass: u32) -> io::Result<u64> {
        self.sent = 0;
        loop {
            let taken = self.to_send.lock().take()?;
            let Some(chunk) = taken else { break };
            for (start, len, exists) in self.runs(chunk, pass) {
                if !exists {
                    self.zeros(start, len)?;
                    continue;
                }
                for at in (start..start + len).step_by(PIECE) {
                    self.piece(at, PIECE.min((start + len - at) as usize))?;
                }
            }
            // Sent with the chunk: its pages may be written again.
            self.flush()?;
        }
        (&*self.stream).write_all(&Frame::Flush(pass).bytes())?;
        Ok(self.sent)
    }

    /// Returns the runs of a chunk by address, each with true if its pages exist. The check comes after the log was
    /// cleared, so that the next pass has pages that are created later.
    fn runs(&self, chunk: Chunk, pass: u32) -> Vec<(u64, u64, bool)> {
        // Later passes have only written pages.
        let region = self.memory.iter().nth(chunk.region).filter(|_| pass == 0);
        let mut parts = Vec::new();
        let seen = region.map(|region| {
            let place = chunk.place();
            self.present.each_within(region, &(place.start..place.end.min(region.len())), &mut |part| {
                parts.push(part);
                Ok(())
            })
        });
        let (existing, absent) = match seen {
            Some(Ok(())) => chunk.split(&parts),
            // Pages of unknown state are read.
            Some(Err(_)) | None => (chunk.clone(), Chunk { words: Vec::new(), ..chunk }),
        };
        let existing = existing.runs().into_iter().map(|(start, len)| (start, len, true));
        let absent = absent.runs().into_iter().map(|(start, len)| (start, len, false));
        let mut runs: Vec<_> = existing.chain(absent).collect();
        runs.sort_unstable_by_key(|(start, ..)| *start);
        runs
    }

    /// Sends `len` bytes from `start`, at most a chunk, as zero.
    fn zeros(&mut self, start: u64, len: u64) -> io::Result<()> {
        let len = u32::try_from(len).map_err(io::Error::other)?;
        let run = Range { start, len, is_zero: true };
        if !self.pages.push(run) {
            self.flush()?;
            self.pages.push(run);
        }
        Ok(())
    }

    /// Sends `len` bytes from `start`, at most [`PIECE`].
    fn piece(&mut self, start: u64, len: usize) -> io::Result<()> {
        const { assert!(PIECE <= MAX_DATA) };
        if self.pages.data() + len > MAX_DATA {
            self.flush()?;
        }
        let mut filled = self.pages.data();
        // A copy, so that the zero check holds for the bytes that are sent.
        let place = self.data.get_mut(filled..filled + len).ok_or(io::ErrorKind::InvalidInput)?;
        self.memory.read_slice(place, GuestAddress(start)).map_err(io::Error::other)?;
        let from = filled;
        for page in (0..len).step_by(PAGE as usize) {
            let (at, size) = (from + page, PAGE as usize);
            let is_zero = self.data.get(at..at + size).is_some_and(is_zero);
            let run = Range { start: start + page as u64, len: PAGE as u32, is_zero };
            if !self.pages.push(run) {
                // The table is full.
                self.flush()?;
                self.pages.push(run);
                filled = 0;
            }
            if !is_zero {
                self.data.copy_within(at..at + size, filled);
                filled += size;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.pages.is_empty() {
            return Ok(());
        }
        let (table, data) = (self.pages.bytes(), self.pages.data());
        let mut writer = &*self.stream;
        writer.write_all(&table)?;
        writer.write_all(self.data.get(..data).unwrap_or_default())?;
        let zero =
            self.pages.ranges().iter().filter(|range| range.is_zero).map(|range| u64::from(range.len)).sum::<u64>();
        self.progress.count((table.len() + data) as u64, data as u64 / PAGE, zero / PAGE);
        self.sent += data as u64;
        self.pages.clear();
        Ok(())
    }
}

fn is_zero(page: &[u8]) -> bool {
    let (words, rest) = page.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests;
