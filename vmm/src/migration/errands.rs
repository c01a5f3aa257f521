//! Background threads of a migration thread, which stays responsive to its peer.

use std::io;

use virtio_devices::{NewThread, Thread};

use crate::threads::{self, ThreadKind};

/// Stack of a thread, in bytes: it opens all backends of a VM.
const STACK: usize = 2 << 20;

/// Background threads. Dropping this waits for their end.
#[derive(Default)]
pub(super) struct Errands(Vec<Thread>);

impl Errands {
    /// Does `work`, which reports its own result, in a new thread.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn begin(&mut self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.begin_as(ThreadKind::Open, work)
    }

    /// As [`Self::begin`], in a thread that may use the network.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
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
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}
