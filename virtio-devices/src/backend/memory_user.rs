//! Tells a backend that runs a NIC's queues that the guest's memory has changed, or that what it writes there is to be
//! logged.
//!
//! The backend belongs to the NIC's worker while the driver is up, and to nobody otherwise. So a change waits in a
//! mailbox until the worker takes it, or until the backend is free and the caller applies it.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::eventfd::EventFd;

use super::{BackendKind, QueueRunner, RunnerError, SharedLog};
use crate::GuestMap;

/// How long the worker is waited for before the backend is tried again.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a backend is told.
#[derive(Debug)]
enum Told {
    /// The guest's memory.
    Memory(GuestMap),
    /// Where it logs what it writes there.
    Log(Option<Arc<SharedLog>>),
    /// Nothing: whether it runs queues is asked, after its worker has followed the link.
    Stand,
}

/// A change that waits for whoever has the backend.
#[derive(Debug)]
pub(crate) struct MemoryChange {
    told: Told,
    done: SyncSender<Result<(), RunnerError>>,
}

impl MemoryChange {
    /// Applies it to `backend`, and answers whoever waits for it.
    pub(crate) fn apply(self, backend: &mut dyn QueueRunner) {
        let result = match &self.told {
            Told::Memory(memory) => backend.set_memory(memory),
            Told::Log(log) => backend.set_log(log.as_ref()),
            // No queue runs, but a driver that comes has them run, whatever the link is.
            Told::Stand if !backend.goes_on_after_stop() => Err(cannot_stand()),
            // Nobody has the backend, or its worker runs no queue.
            Told::Stand => Ok(()),
        };
        // Whoever waits does so until it has the answer.
        let _ = self.done.send(result);
    }
}

impl MemoryChange {
    /// Whether it asks for queues that stand still.
    pub(crate) fn asks_to_stand(&self) -> bool {
        matches!(self.told, Told::Stand)
    }

    /// Whether it is other memory.
    pub(crate) fn is_of_memory(&self) -> bool {
        matches!(self.told, Told::Memory(_))
    }

    /// Answers that queues run nevertheless.
    pub(crate) fn refuse(self) {
        let _ = self.done.send(Err(cannot_stand()));
    }
}

/// Why queues do not stand still: what stops them is not continued.
fn cannot_stand() -> RunnerError {
    let what = "stop the queues without a reset by the driver";
    RunnerError::of(what)(std::io::Error::from(std::io::ErrorKind::Unsupported))
}

/// Where a change waits. At most one does: while writes are logged, the guest's memory stays as it is.
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
    /// What it is.
    pub(crate) kind: BackendKind,
    /// Whether [`Self::set_log`] works.
    pub(crate) logs_writes: bool,
    /// Whether it has a state beside its queues.
    pub(crate) has_state: bool,
}

impl fmt::Debug for MemoryUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryUser").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl MemoryUser {
    /// What the backend is.
    pub fn kind(&self) -> BackendKind {
        self.kind
    }

    /// Whether the backend can log what it writes to guest memory.
    pub fn logs_writes(&self) -> bool {
        self.logs_writes
    }

    /// Makes the backend reach `memory` and nothing else, and waits until it does: as long as the backend's own time
    /// limits allow, for a vhost-user peer 30 s and 2 s per GiB. Not for vCPU threads, and not with a device's lock
    /// held.
    ///
    /// A lost backend is given `memory` once it is back.
    ///
    /// # Errors
    ///
    /// When it refuses or fails: it then reaches what it reached before, or is lost until it can reach that again.
    pub fn set(&self, memory: &GuestMap) -> Result<(), RunnerError> {
        self.tell(Told::Memory(memory.clone()))
    }

    /// Has the backend log in `log` what it writes to guest memory from now on, or nothing more, and waits until it
    /// does, as [`Self::set`].
    ///
    /// # Errors
    ///
    /// When it has no dirty log, refuses or fails: it then logs nothing, or is lost.
    pub fn set_log(&self, log: Option<&Arc<SharedLog>>) -> Result<(), RunnerError> {
        self.tell(Told::Log(log.cloned()))
    }

    /// Waits until the backend's queues stand still, as they do while their link is down, and no longer than its own
    /// time limits allow. From then on it writes nothing to guest memory, until the link is up again.
    ///
    /// # Errors
    ///
    /// When it cannot go on after a stop, and so is not stopped, or would not stand still once a driver comes.
    pub fn stand(&self) -> Result<(), RunnerError> {
        self.tell(Told::Stand)
    }

    /// Whether the backend of a paused device may still write to guest memory, because it did not stop when it was told
    /// to. A worker that is just ending is waited for, until `until`.
    pub fn may_still_write(&self, until: Instant) -> bool {
        self.backend.try_lock_until(until).is_none_or(|backend| backend.may_still_write())
    }

    /// Whether the backend has a state of its own beside its queues, such as connections that it holds for the guest.
    pub fn has_state(&self) -> bool {
        self.has_state
    }

    /// Takes that state from the backend of a paused device, until `until`; `None` if it is lost with a lost backend.
    /// Not for vCPU threads, and not with a device's lock held.
    ///
    /// # Errors
    ///
    /// It cannot be had, or the device is not paused. The backend can go on, or is lost.
    pub fn save_state(&self, until: Instant) -> Result<Option<Vec<u8>>, RunnerError> {
        self.idle(until)?.save_state(until)
    }

    /// Has the backend confirm that [`Self::save_state`] has returned all of its state. It may end itself then.
    ///
    /// # Errors
    ///
    /// It was not all, or the backend does not answer until `until`.
    pub fn confirm_state(&self, until: Instant) -> Result<(), RunnerError> {
        self.idle(until)?.confirm_state(until)
    }

    /// Gives the backend of a device that has not run the state of another backend, until `until`.
    ///
    /// # Errors
    ///
    /// It does not take it. Nobody knows which state it has then.
    pub fn load_state(&self, state: &[u8], until: Instant) -> Result<(), RunnerError> {
        self.idle(until)?.load_state(state, until)
    }

    /// The backend of a device that is paused. A worker that was told to stop may still be ending.
    fn idle(&self, until: Instant) -> Result<MutexGuard<'_, Box<dyn QueueRunner>>, RunnerError> {
        let busy = || std::io::Error::new(std::io::ErrorKind::ResourceBusy, "its queues run");
        let what = "reach the backend's own state";
        self.backend.try_lock_until(until).ok_or_else(|| RunnerError::of(what)(busy()))
    }

    fn tell(&self, told: Told) -> Result<(), RunnerError> {
        let (done, answer) = sync_channel(1);
        *self.mailbox.0.lock() = Some(MemoryChange { told, done });
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
