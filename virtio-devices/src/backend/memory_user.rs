//! Passes changes of the guest's memory and of its dirty log to a backend that runs a NIC's queues.
//!
//! The NIC's worker owns the backend while the driver is up; otherwise the backend is free. So a change waits in a
//! mailbox until the worker takes it, or until the backend is free and the caller applies it.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::eventfd::EventFd;

use super::{BackendKind, QueueRunner, RunnerError, SharedLog};
use crate::GuestMap;

/// The time to wait for the worker before the backend is tried again.
const PATIENCE: Duration = Duration::from_millis(20);

/// A message to a backend.
#[derive(Debug)]
enum BackendCommand {
    /// The guest's memory.
    Memory(GuestMap),
    /// The dirty log for the backend's writes to the guest's memory.
    Log(Option<Arc<SharedLog>>),
    /// No change: checks that no queue runs, once the worker has followed the link.
    Stand,
}

/// A change that waits for the owner of the backend.
#[derive(Debug)]
pub(crate) struct MemoryChange {
    told: BackendCommand,
    done: SyncSender<Result<(), RunnerError>>,
}

impl MemoryChange {
    /// Applies the change to `backend`, and replies to the caller that waits for it.
    pub(crate) fn apply(self, backend: &mut dyn QueueRunner) {
        let result = match &self.told {
            BackendCommand::Memory(memory) => backend.set_memory(memory),
            BackendCommand::Log(log) => backend.set_log(log.as_ref()),
            // No queue runs, but a driver that starts would start them, even with the link down.
            BackendCommand::Stand if !backend.goes_on_after_stop() => Err(cannot_stand()),
            // The backend is free, or its worker runs no queue.
            BackendCommand::Stand => Ok(()),
        };
        // The caller waits until it has the reply.
        let _ = self.done.send(result);
    }
}

impl MemoryChange {
    /// True if the change requires stopped queues.
    pub(crate) fn asks_to_stand(&self) -> bool {
        matches!(self.told, BackendCommand::Stand)
    }

    /// True if the change is a new memory map.
    pub(crate) fn is_of_memory(&self) -> bool {
        matches!(self.told, BackendCommand::Memory(_))
    }

    /// Replies that the queues keep running.
    pub(crate) fn refuse(self) {
        let _ = self.done.send(Err(cannot_stand()));
    }
}

/// The error for queues that cannot be stopped, because the backend could not continue them.
fn cannot_stand() -> RunnerError {
    let what = "stop the queues without a reset by the driver";
    RunnerError::of(what)(std::io::Error::from(std::io::ErrorKind::Unsupported))
}

/// A mailbox for one change. More are not needed: while writes are logged, the guest's memory does not change.
#[derive(Debug, Default)]
pub(crate) struct MemoryMailbox(Mutex<Option<MemoryChange>>);

impl MemoryMailbox {
    /// Takes the pending change, which the caller applies.
    pub(crate) fn take(&self) -> Option<MemoryChange> {
        self.0.lock().take()
    }
}

/// A backend that accesses the guest's memory by itself, and must follow its changes.
#[derive(Clone)]
pub struct MemoryUser {
    /// The backend.
    pub(crate) backend: Arc<Mutex<Box<dyn QueueRunner>>>,
    /// The mailbox that its worker reads.
    pub(crate) mailbox: Arc<MemoryMailbox>,
    /// The event that wakes its worker, if there is one.
    pub(crate) wake: Option<Arc<EventFd>>,
    /// The kind of the backend.
    pub(crate) kind: BackendKind,
    /// True if [`Self::set_log`] works.
    pub(crate) logs_writes: bool,
    /// True if the backend has state besides its queues.
    pub(crate) has_state: bool,
}

impl fmt::Debug for MemoryUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryUser").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl MemoryUser {
    /// The kind of the backend.
    pub fn kind(&self) -> BackendKind {
        self.kind
    }

    /// True if the backend can log its writes to guest memory.
    pub fn logs_writes(&self) -> bool {
        self.logs_writes
    }

    /// Gives the backend access to `memory` and nothing else, and waits for that within the backend's own time limits:
    /// 30 s and 2 s per GiB for a vhost-user peer. Must not be called on a vCPU thread, or with a device's lock held.
    ///
    /// A lost backend gets `memory` once it is back.
    ///
    /// # Errors
    ///
    /// Fails if the backend refuses or fails. It then keeps its old memory, or is lost until it can access that again.
    pub fn set(&self, memory: &GuestMap) -> Result<(), RunnerError> {
        self.tell(BackendCommand::Memory(memory.clone()))
    }

    /// Makes the backend log its further writes to guest memory in `log`, or stops the logging. Waits as [`Self::set`]
    /// does.
    ///
    /// # Errors
    ///
    /// Fails if the backend has no dirty log, refuses or fails. It then logs nothing, or is lost.
    pub fn set_log(&self, log: Option<&Arc<SharedLog>>) -> Result<(), RunnerError> {
        self.tell(BackendCommand::Log(log.cloned()))
    }

    /// Waits, within the backend's own time limits, until its queues have stopped because the link is down. The backend
    /// does not write to guest memory from then on, until the link is up again.
    ///
    /// # Errors
    ///
    /// Fails if the backend cannot continue after a stop: it is not stopped then, or a driver that starts would start
    /// its queues.
    pub fn stand(&self) -> Result<(), RunnerError> {
        self.tell(BackendCommand::Stand)
    }

    /// True if the backend of a paused device may still write to guest memory, because it did not stop on request.
    /// Waits for a worker that is about to exit, but not beyond `until`.
    pub fn may_still_write(&self, until: Instant) -> bool {
        self.backend.try_lock_until(until).is_none_or(|backend| backend.may_still_write())
    }

    /// True if the backend has state besides its queues, such as connections that it holds for the guest.
    pub fn has_state(&self) -> bool {
        self.has_state
    }

    /// Takes that state from the backend of a paused device, before `until`; `None` if it is lost with a lost backend.
    /// Must not be called on a vCPU thread, or with a device's lock held.
    ///
    /// # Errors
    ///
    /// Fails if the state is not available or the device is not paused. The backend can continue, or is lost.
    pub fn save_state(&self, until: Instant) -> Result<Option<Vec<u8>>, RunnerError> {
        self.idle(until)?.save_state(until)
    }

    /// Requests confirmation that [`Self::save_state`] has returned all of the state. The backend may exit after that.
    ///
    /// # Errors
    ///
    /// Fails if the state was incomplete, or the backend does not reply before `until`.
    pub fn confirm_state(&self, until: Instant) -> Result<(), RunnerError> {
        self.idle(until)?.confirm_state(until)
    }

    /// Loads the state of another backend into the backend of a device that has not run yet, before `until`.
    ///
    /// # Errors
    ///
    /// Fails if the backend does not accept the state. Its own state is undefined then.
    pub fn load_state(&self, state: &[u8], until: Instant) -> Result<(), RunnerError> {
        self.idle(until)?.load_state(state, until)
    }

    /// The backend of a paused device. Its worker may still be exiting.
    fn idle(&self, until: Instant) -> Result<MutexGuard<'_, Box<dyn QueueRunner>>, RunnerError> {
        let busy = || std::io::Error::new(std::io::ErrorKind::ResourceBusy, "its queues run");
        let what = "reach the backend's own state";
        self.backend.try_lock_until(until).ok_or_else(|| RunnerError::of(what)(busy()))
    }

    fn tell(&self, told: BackendCommand) -> Result<(), RunnerError> {
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
                    return Err(RunnerError::of("send the guest's memory to the backend")(std::io::Error::other(
                        "its worker has ended",
                    )));
                }
            }
            // There is no worker, or it has just exited. Otherwise the worker has the lock.
            if let Some(mut backend) = self.backend.try_lock()
                && let Some(change) = self.mailbox.take()
            {
                change.apply(&mut **backend);
            }
        }
    }
}
