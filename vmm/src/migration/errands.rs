//! Work that a migration's thread has done by others, so that it hears its peer meanwhile.

use std::io;

use virtio_devices::{NewThread, Thread};

use crate::threads::{self, ThreadKind};

/// The stack of a thread, in bytes: it opens all that a VM may have.
const STACK: usize = 2 << 20;

/// The threads that are at work. Dropping this waits for their end.
#[derive(Default)]
pub(super) struct Errands(Vec<Thread>);

impl Errands {
    /// Has a new thread do `work`, which is to report what came of it.
    ///
    /// # Errors
    ///
    /// The host has no thread left.
    pub(super) fn begin(&mut self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.begin_as(ThreadKind::Open, work)
    }

    /// As [`Self::begin`], by a thread that may use the network.
    ///
    /// # Errors
    ///
    /// The host has no thread left.
    pub(super) fn begin_outside(&mut self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.begin_as(ThreadKind::Migration, work)
    }

    fn begin_as(&mut self, kind: ThreadKind, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.0.push(threads::start(kind, NewThread::new(kind.name(), STACK, work))?);
        Ok(())
    }
}

impl Drop for Errands {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            // If it panicked, that has been reported.
            let _ = thread.join();
        }
    }
}
