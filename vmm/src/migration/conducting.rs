//! Handle of the control thread to a migration thread.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use virtio_devices::{Cancel, NewThread, Thread};

use super::link::STACK;
use super::orders::Note;
use crate::threads::{self, ThreadKind};

/// Handle to a running migration thread, with messages of type `N`. Dropping it ends the migration.
pub(crate) struct Conducting<N: Note> {
    tell: Box<dyn Fn(N) + Send>,
    thread: Option<Thread>,
}

impl<N: Note> Conducting<N> {
    /// Starts a thread that calls `run` with a canceller of its waits and both ends of its queue. `hear` converts the
    /// control thread's messages for the queue.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn new<I: Send + 'static>(
        hear: fn(N) -> I,
        run: impl FnOnce(Cancel, Sender<I>, Receiver<I>) + Send + 'static,
    ) -> io::Result<Self> {
        let (inbox, heard) = channel();
        let (own, cancel) = (inbox.clone(), Cancel::new()?);
        let kind = ThreadKind::Migration;
        let thread = threads::start(kind, NewThread::new(kind.name(), STACK, move || run(cancel, own, heard)))?;
        // An error means that the thread has exited.
        Ok(Self { tell: Box::new(move |note| _ = inbox.send(hear(note))), thread: Some(thread) })
    }

    /// Sends a message to the migration thread; dropped if the thread has exited.
    pub(crate) fn tell(&self, note: N) {
        (self.tell)(note);
    }
}

impl<N: Note> Drop for Conducting<N> {
    fn drop(&mut self) {
        self.tell(N::CANCEL);
        self.tell(N::QUIT);
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}
