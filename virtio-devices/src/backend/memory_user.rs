//! Tells a backend that runs a NIC's queues that the guest's memory has changed.
//!
//! The backend belongs to the NIC's worker while the driver is up, and to nobody otherwise. So a change waits in a
//! mailbox until the worker takes it, or until the backend is free and the caller applies it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::{QueueRunner, RunnerError};

/// How long the worker is waited for before the backend is tried again.
const PATIENCE: Duration = Duration::from_millis(20);

/// A change that waits for whoever has the backend.
#[derive(Debug)]
pub(crate) struct MemoryChange {
    memory: GuestMemoryMmap,
    done: SyncSender<Result<(), RunnerError>>,
}

impl MemoryChange {
    /// Applies it to `backend`, and answers whoever waits for it.
    pub(crate) fn apply(self, backend: &mut dyn QueueRunner) {
        // Whoever waits does so until it has the answer.
        let _ = self.done.send(backend.set_memory(&self.memory));
    }
}

/// Where a change waits. At most one does, because one thread at a time changes the guest's memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryMailbox(Mutex<Option<MemoryChange>>);

impl MemoryMailbox {
    /// The change that waits, which the caller applies.
    pub(crate) fn take(&self) -> Option<MemoryChange> {
        self.0.lock().take()
    }
}

/// A backend that reaches the guest's memory by itself, and has to be told when that changes.
#[derive(Clone)]
pub struct MemoryUser {
    /// The backend.
    pub(crate) backend: Arc<Mutex<Box<dyn QueueRunner>>>,
    /// Where its worker looks for changes.
    pub(crate) mailbox: Arc<MemoryMailbox>,
    /// What wakes its worker, if there is one.
    pub(crate) wake: Option<Arc<EventFd>>,
}

impl MemoryUser {
    /// Makes the backend reach `memory` and nothing else, and waits until it does: as long as the backend's own time
    /// limits allow, for a vhost-user peer 30 s and 2 s per GiB. Not for vCPU threads, and not with a device's lock
    /// held.
    ///
    /// A lost backend is given `memory` once it is back.
    ///
    /// # Errors
    ///
    /// When it refuses or fails: it then reaches what it reached before, or is lost until it can reach that again.
    pub fn set(&self, memory: &GuestMemoryMmap) -> Result<(), RunnerError> {
        let (done, answer) = sync_channel(1);
        *self.mailbox.0.lock() = Some(MemoryChange { memory: memory.clone(), done });
        if let Some(wake) = &self.wake {
            // A full counter has woken the worker already.
            let _ = wake.write(1);
        }
        loop {
            match answer.recv_timeout(PATIENCE) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(RunnerError::of("tell the backend of the guest's memory")(std::io::Error::other(
                        "its worker has ended",
                    )));
                }
            }
            // Without a worker, or when it has just ended. Otherwise the worker has the lock.
            if let Some(mut backend) = self.backend.try_lock()
                && let Some(change) = self.mailbox.take()
            {
                change.apply(&mut **backend);
            }
        }
    }
}
