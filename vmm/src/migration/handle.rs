//! Handle of the control thread to a migration thread.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use virtio_devices::{Cancel, NewThread, Thread};

use super::commands::ControlReply;
use super::control_channel::STACK;
use crate::threads::{self, ThreadKind};

/// Handle to a running migration thread, which receives replies of type `R`. Dropping it ends the migration.
pub(crate) struct MigrationHandle<R: ControlReply> {
    queue: Box<dyn Fn(R) + Send>,
    thread: Option<Thread>,
}

impl<R: ControlReply> MigrationHandle<R> {
    /// Starts a thread that calls `run` with a canceller of its waits and both ends of its queue. `message` converts
    /// the control thread's replies for the queue.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn spawn<M: Send + 'static>(
        message: fn(R) -> M,
        run: impl FnOnce(Cancel, Sender<M>, Receiver<M>) + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, messages) = channel();
        let (own, cancel) = (queue.clone(), Cancel::new()?);
        let kind = ThreadKind::Migration;
        let thread = threads::start(kind, NewThread::new(kind.name(), STACK, move || run(cancel, own, messages)))?;
        // An error means that the thread has exited.
        Ok(Self { queue: Box::new(move |reply| _ = queue.send(message(reply))), thread: Some(thread) })
    }

    /// Sends a reply to the migration thread; dropped if the thread has exited.
    pub(crate) fn send(&self, reply: R) {
        (self.queue)(reply);
    }
}

impl<R: ControlReply> Drop for MigrationHandle<R> {
    fn drop(&mut self) {
        self.send(R::CANCEL);
        self.send(R::QUIT);
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}
