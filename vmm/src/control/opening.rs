//! Resources for a client's action, opened in a thread.
//!
//! A vhost-user backend can take minutes to map guest memory, or never answer; opening a disk can block for any time;
//! and pinning a large guest's memory for a host device takes seconds. The control thread serves clients, the guest and
//! signals in the meantime, and later uses the resources as part of the action.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use virtio_devices::{Cancel, NewThread, Thread};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::api::Action;
use crate::control::addition::Addition;
use crate::control::connection::Connection;
use crate::control::queue::PendingAction;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::restorer::Restored;
use crate::snapshot::saver::Written;
use crate::threads::{self, ThreadKind};
use crate::vm::{Vm, VmError};

/// Stack of the thread, in bytes: it opens all resources of a VM.
const STACK: usize = 2 << 20;

/// Resources that were opened for an action.
pub(crate) enum OpenedResources {
    /// Host resources of a VM, for `vm.boot`.
    Vm(Result<Box<Vm>, VmError>),
    /// A planned device with its backends, for `vm.add-*`.
    Device(Box<Addition>),
    /// A planned connection of a function without a backend, with its backend, for `vm.set-vf`.
    Backend(Box<Connection>),
    /// A complete snapshot, for `vm.snapshot`.
    Saved(Result<Written, SnapshotError>),
    /// A VM with its memory, for `vm.restore`.
    Restored(Box<Result<Restored, SnapshotError>>),
}

/// Opener of resources on any thread, with cancellation.
pub(crate) type Acquire = Box<dyn FnOnce(&Cancel) -> OpenedResources + Send>;

/// An action whose resources are being opened. Dropping this cancels it and waits for the thread.
pub(crate) struct PendingOpen {
    action: Option<PendingAction>,
    cancel: Cancel,
    thread: Option<Thread>,
    acquired: Receiver<OpenedResources>,
    done: Arc<EventFd>,
}

impl PendingOpen {
    /// Starts opening the resources of `action` in a thread of this kind.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor or thread left. The action can be applied without.
    pub(crate) fn begin(
        kind: ThreadKind,
        action: PendingAction,
        acquire: impl FnOnce(&Cancel) -> OpenedResources + Send + 'static,
    ) -> Result<Self, Box<(PendingAction, io::Error)>> {
        let start = || {
            let (cancel, done) = (Cancel::new()?, Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?));
            let (ends, tells) = (cancel.clone(), Arc::clone(&done));
            let (send, acquired) = mpsc::channel();
            let run = move || {
                // Dropped here if the action was cancelled.
                let _ = send.send(acquire(&ends));
                // A full eventfd is readable already.
                let _ = tells.write(1);
            };
            let thread = threads::start(kind, NewThread::new(kind.name(), STACK, run))?;
            Ok((cancel, done, thread, acquired))
        };
        match start() {
            Ok((cancel, done, thread, acquired)) => {
                Ok(Self { action: Some(action), cancel, thread: Some(thread), acquired, done })
            }
            Err(error) => Err(Box::new((action, error))),
        }
    }

    pub(crate) fn action(&self) -> Option<&Action> {
        self.action.as_ref().map(PendingAction::action)
    }

    /// Returns an eventfd that is readable once opening has ended.
    pub(crate) fn event(&self) -> &EventFd {
        &self.done
    }

    /// Returns the action and its resources, once [`Self::event`] is readable. `None` if the thread panicked.
    pub(crate) fn finish(mut self) -> Option<(PendingAction, OpenedResources)> {
        self.thread.take()?.join().ok()?;
        Some((self.action.take()?, self.acquired.try_recv().ok()?))
    }

    /// Cancels opening without waiting for the thread.
    pub(crate) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Cancels opening. Returns the action, which must fail.
    pub(crate) fn abandon(mut self) -> Option<PendingAction> {
        self.action.take()
    }
}

impl Drop for PendingOpen {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            // After a panic there is nothing left to do.
            let _ = thread.join();
        }
    }
}
