//! Background threads of a migration thread, which stays responsive to its peer.

use std::io;
use std::sync::mpsc::Sender;

use virtio_devices::{NewThread, Thread};

use crate::threads::{self, ThreadKind, no_thread};

/// Stack of a thread, in bytes: it opens all backends of a VM.
const STACK: usize = 2 << 20;

/// Background threads, whose results arrive as messages of type `M`. Dropping this waits for their end.
pub(super) struct BackgroundTasks<M> {
    messages: Sender<M>,
    threads: Vec<Thread>,
}

impl<M: Send + 'static> BackgroundTasks<M> {
    /// Creates the tasks of the migration thread that receives `messages`.
    pub(super) const fn new(messages: Sender<M>) -> Self {
        Self { messages, threads: Vec::new() }
    }

    /// Returns the queue of the migration thread, for threads that are not tasks.
    pub(super) fn messages(&self) -> Sender<M> {
        self.messages.clone()
    }

    /// Queues a result that needs no thread.
    pub(super) fn post(&self, message: M) {
        // The receiver is the calling thread.
        let _ = self.messages.send(message);
    }

    /// Runs `work` in a thread of kind `kind`, and queues its result as a message. Without a thread, queues that error.
    pub(super) fn spawn_or_fail<T: 'static>(
        &mut self,
        kind: ThreadKind,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
        message: fn(Result<T, String>) -> M,
    ) {
        let messages = self.messages();
        if let Err(error) = self.spawn(kind, move || _ = messages.send(message(work()))) {
            self.post(message(Err(no_thread(&error))));
        }
    }

    /// Drops `value`, which takes long, in a thread of kind `kind`; without a thread, here.
    pub(super) fn drop_later(&mut self, kind: ThreadKind, value: impl Send + 'static) {
        let _ = self.spawn(kind, move || drop(value));
    }

    /// Waits for the end of all threads.
    pub(super) fn wait(&mut self) {
        join(&mut self.threads);
    }

    fn spawn(&mut self, kind: ThreadKind, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(threads::start(kind, NewThread::new(kind.name(), STACK, work))?);
        Ok(())
    }
}

impl<M> Drop for BackgroundTasks<M> {
    fn drop(&mut self) {
        join(&mut self.threads);
    }
}

fn join(threads: &mut Vec<Thread>) {
    for thread in threads.drain(..) {
        // A panic has already been reported.
        let _ = thread.join();
    }
}
