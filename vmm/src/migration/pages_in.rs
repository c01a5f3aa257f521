//! Threads that receive pages: one for each connection.
//!
//! In each pass any connection may carry any page. So none takes a page of a pass before all have had those of the pass
//! before: a newer copy would be overwritten by an older one.

use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use virtio_devices::{NewThread, Thread};

use super::incoming::{Incoming, Item, ReadError};
use super::link::STACK;
use super::loader::Loader;
use super::progress::Progress;
use super::transport::Stream;
use super::wire::{Frame, PAGE, Pages, Range, WireError};
use crate::threads::{self, ThreadKind};

/// The most passes over the memory. A source that reports more is none.
const MOST_PASSES: u32 = 1 << 20;

/// All connections that carry pages. Dropping this ends them.
#[derive(Default)]
pub(super) struct PagesIn {
    memory: Option<Arc<Loader>>,
    lanes: Vec<(Arc<Stream>, Option<Thread>)>,
    passes: Arc<Passes>,
}

/// The passes that each connection has had.
#[derive(Default)]
struct Passes {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By the connection's number.
    had: Vec<u32>,
    is_closed: bool,
}

impl Passes {
    /// Connection `index` has had another pass. Returns once all have, or false when it is over.
    fn next(&self, index: u8) -> bool {
        let mut state = self.state.lock();
        let Some(own) = state.had.get_mut(usize::from(index)) else { return false };
        *own += 1;
        let own = *own;
        self.changed.notify_all();
        while !state.is_closed && state.had.iter().any(|other| *other < own) {
            self.changed.wait(&mut state);
        }
        !state.is_closed
    }

    /// No connection takes anything from here on.
    fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }
}

impl PagesIn {
    /// Pages are for this memory, and come on so many connections.
    pub(super) fn set_memory(&mut self, memory: Arc<Loader>, connections: u8) {
        self.memory = Some(memory);
        self.passes.state.lock().had = vec![0; connections.into()];
    }

    /// Ends the threads: when this returns, none of them writes to the memory, whatever the source sends. The
    /// connections stay, for a source that looks at them.
    pub(super) fn end(&mut self) {
        self.memory = None;
        self.passes.close();
        self.lanes.iter().for_each(|(stream, _)| stream.stop_reading());
        for (_, thread) in &mut self.lanes {
            if let Some(thread) = thread.take() {
                // If it panicked, that has been reported.
                let _ = thread.join();
            }
        }
    }

    /// Receives on connection `index`. `tell` is called after each pass that all have had, and with why there is no
    /// more.
    ///
    /// # Errors
    ///
    /// The host has no thread left.
    pub(super) fn begin(
        &mut self,
        index: u8,
        stream: Stream,
        progress: &Progress,
        tell: impl Fn(Result<(), String>) + Send + 'static,
    ) -> io::Result<()> {
        let Some(loader) = self.memory.clone() else { return Ok(()) };
        let stream = Arc::new(stream);
        let (source, progress) = (Arc::clone(&stream), progress.clone());
        let passes = Arc::clone(&self.passes);
        let run = move || {
            let next = || {
                let goes_on = passes.next(index);
                tell(Ok(()));
                goes_on
            };
            let ended = receive(&source, &loader, &progress, &passes, next);
            tell(Err(match ended {
                Err(error) => format!("connection {index} for pages: {error}"),
                Ok(()) => format!("connection {index} for pages: it is over"),
            }));
        };
        let name = format!("migration-{index}");
        let thread = threads::start(ThreadKind::Migration, NewThread::new(&name, STACK, run))?;
        self.lanes.push((stream, Some(thread)));
        Ok(())
    }

    /// True if all connections have had this many passes.
    pub(super) fn have(&self, passes: u32) -> bool {
        let state = self.passes.state.lock();
        !state.had.is_empty() && state.had.iter().all(|had| *had == passes)
    }

    /// Ends the connections.
    pub(super) fn close(&mut self) {
        self.passes.close();
        self.lanes.iter().for_each(|(stream, _)| stream.close());
        for (_, thread) in self.lanes.drain(..) {
            if let Some(thread) = thread {
                // If it panicked, that has been reported.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for PagesIn {
    fn drop(&mut self) {
        self.close();
    }
}

fn receive(
    stream: &Stream,
    loader: &Loader,
    progress: &Progress,
    all: &Passes,
    mut next: impl FnMut() -> bool,
) -> Result<(), ReadError> {
    let (mut incoming, mut passes) = (Incoming::new(stream), 0);
    // A connection that is no longer read still gives what has come: that is not taken, either.
    while passes < MOST_PASSES && !all.is_closed() {
        match incoming.receive()? {
            Item::Pages(pages) => {
                incoming.load(&pages, loader)?;
                count(&pages, progress);
            }
            Item::Frame(Frame::Flush(pass)) if pass == passes => {
                passes += 1;
                if !next() {
                    return Ok(());
                }
            }
            Item::Frame(_) => return Err(WireError::Field("connection").into()),
        }
    }
    Ok(())
}

fn count(pages: &Pages, progress: &Progress) {
    let of = |is_zero| {
        let ranges = pages.ranges().iter().filter(move |range: &&Range| range.is_zero == is_zero);
        ranges.map(|range| u64::from(range.len) / PAGE).sum::<u64>()
    };
    progress.count(pages.bytes().len() as u64 + pages.data() as u64, of(false), of(true));
}
