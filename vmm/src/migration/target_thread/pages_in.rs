//! Threads that receive pages, one per connection.
//!
//! In each pass any connection may carry any page. So no thread starts a pass before all have finished the previous
//! one: an older copy could overwrite a newer one.

use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use virtio_devices::{NewThread, Thread};

use crate::migration::control_channel::STACK;
use crate::migration::incoming::{Incoming, Item, ReadError};
use crate::migration::loader::Loader;
use crate::migration::progress::Progress;
use crate::migration::transport::Stream;
use crate::migration::wire::{Frame, PAGE, Pages, Range, WireError};
use crate::threads::{self, ThreadKind};

/// Limit on passes over the memory. No source makes more.
const MOST_PASSES: u32 = 1 << 20;

/// All connections for pages. Dropping this closes them.
#[derive(Default)]
pub(super) struct PagesIn {
    memory: Option<Arc<Loader>>,
    connections: Vec<(Arc<Stream>, Option<Thread>)>,
    passes: Arc<Passes>,
}

/// Passes that each connection has finished.
#[derive(Default)]
struct Passes {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of passes, by connection.
    had: Vec<u32>,
    is_closed: bool,
}

impl Passes {
    /// Counts a pass of connection `index`. Waits until all connections have finished it; returns false once closed.
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

    /// Ends the waits: no connection accepts pages from here on.
    fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }
}

impl PagesIn {
    /// Sets the memory to receive, and the number of connections.
    pub(super) fn set_memory(&mut self, memory: Arc<Loader>, connections: u8) {
        self.memory = Some(memory);
        self.passes.state.lock().had = vec![0; connections.into()];
    }

    /// Ends the threads: nothing writes to the memory after this, whatever the source sends. The connections stay open,
    /// because the source watches them.
    pub(super) fn end(&mut self) {
        self.memory = None;
        self.passes.close();
        self.connections.iter().for_each(|(stream, _)| stream.stop_reading());
        for (_, thread) in &mut self.connections {
            if let Some(thread) = thread.take() {
                // A panic has already been reported.
                let _ = thread.join();
            }
        }
    }

    /// Starts receiving on connection `index`. Calls `notify` after each pass that all connections have finished, and
    /// with the reason when receiving ends.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn begin(
        &mut self,
        index: u8,
        stream: Stream,
        progress: &Progress,
        notify: impl Fn(Result<(), String>) + Send + 'static,
    ) -> io::Result<()> {
        let Some(loader) = self.memory.clone() else { return Ok(()) };
        let stream = Arc::new(stream);
        let (source, progress) = (Arc::clone(&stream), progress.clone());
        let passes = Arc::clone(&self.passes);
        let run = move || {
            let next = || {
                let goes_on = passes.next(index);
                notify(Ok(()));
                goes_on
            };
            let ended = receive(&source, &loader, &progress, &passes, next);
            notify(Err(match ended {
                Err(error) => format!("connection {index} for pages: {error}"),
                Ok(()) => format!("connection {index} for pages: it is closed"),
            }));
        };
        let name = format!("migration-{index}");
        let thread = threads::start(ThreadKind::Migration, NewThread::new(&name, STACK, run))?;
        self.connections.push((stream, Some(thread)));
        Ok(())
    }

    /// True if each connection has finished `passes` passes.
    pub(super) fn have(&self, passes: u32) -> bool {
        let state = self.passes.state.lock();
        !state.had.is_empty() && state.had.iter().all(|had| *had == passes)
    }

    /// Closes the connections.
    pub(super) fn close(&mut self) {
        self.passes.close();
        self.connections.iter().for_each(|(stream, _)| stream.close());
        for (_, thread) in self.connections.drain(..) {
            if let Some(thread) = thread {
                // A panic has already been reported.
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
    // Shutdown leaves buffered bytes readable, which must not be loaded.
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
