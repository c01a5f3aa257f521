//! The thread that conducts a side of a migration, as the control thread keeps it.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use virtio_devices::{Cancel, NewThread, Thread};

use super::link::STACK;
use super::orders::Note;
use crate::threads::{self, ThreadKind};

/// A migration that is under way, whose thread is told `N`. Dropping this ends it.
pub(crate) struct Conducting<N: Note> {
    tell: Box<dyn Fn(N) + Send>,
    thread: Option<Thread>,
}

impl<N: Note> Conducting<N> {
    /// Begins to conduct by `run`, which is given what ends its waits, and both ends of what it hears. Of that `hear`
    /// makes what the control thread tells.
    ///
    /// # Errors
    ///
    /// The host has no thread left.
    pub(super) fn new<I: Send + 'static>(
        hear: fn(N) -> I,
        run: impl FnOnce(Cancel, Sender<I>, Receiver<I>) + Send + 'static,
    ) -> io::Result<Self> {
        let (inbox, heard) = channel();
        let (own, cancel) = (inbox.clone(), Cancel::new()?);
        let kind = ThreadKind::Migration;
        let thread = threads::start(kind, NewThread::new(kind.name(), STACK, move || run(cancel, own, heard)))?;
        // If it has ended, nobody hears it.
        Ok(Self { tell: Box::new(move |note| _ = inbox.send(hear(note))), thread: Some(thread) })
    }

    /// Tells the conductor. If it has ended, nobody hears it.
    pub(crate) fn tell(&self, note: N) {
        (self.tell)(note);
    }
}

impl<N: Note> Drop for Conducting<N> {
    fn drop(&mut self) {
        self.tell(N::CANCEL);
        self.tell(N::QUIT);
        if let Some(thread) = self.thread.take() {
            // If it panicked, that has been reported.
            let _ = thread.join();
        }
    }
}
