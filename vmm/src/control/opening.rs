//! Resources for a client's action, opened on a thread of its own.
//!
//! A vhost-user backend may take minutes to map the guest's memory, or never answer, and a disk as long as it likes.
//! The host takes seconds to pin all of a large guest's memory for a device of its own. Meanwhile the control thread
//! goes on: it answers clients, follows the guest and hears signals. What was acquired is used on the control thread,
//! as part of the action.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use virtio_devices::{Cancel, GuestMap, NewThread, Thread};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::api::Action;
use crate::control::opened::Opened;
use crate::control::queue::PendingAction;
use crate::devices::peers::{PeerError, Peers};
use crate::error::Error;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::restorer::Restored;
use crate::snapshot::saver::Written;
use crate::threads::{self, ThreadKind};
use crate::vfio::{OpenDevice, VfioError};
use crate::vm::{Vm, VmError};

/// The stack of its thread, in bytes: it opens all that a VM may have.
const STACK: usize = 2 << 20;

/// Resources that were opened for an action.
pub(crate) enum Acquired {
    /// The host's resources of a VM, for `vm.boot`.
    Vm(Result<Box<Vm>, VmError>),
    /// The backends of a device, for `vm.add-*`.
    Peers(Result<Peers, PeerError>),
    /// A device of the host, for `vm.add-device`, and the guest's memory for which it was opened.
    HostDevice(Box<Result<OpenDevice, VfioError>>, Arc<GuestMap>),
    /// The backend of a function that had none, for `vm.set-vf`.
    Backend(Result<Box<Opened>, Error>),
    /// A complete snapshot, for `vm.snapshot`.
    Saved(Result<Written, SnapshotError>),
    /// A VM with its memory, for `vm.restore`.
    Restored(Box<Result<Restored, SnapshotError>>),
}

/// Function that opens resources on any thread, until it is cancelled.
pub(crate) type Acquire = Box<dyn FnOnce(&Cancel) -> Acquired + Send>;

/// An action that waits for what is being acquired for it. Dropping this ends that.
pub(crate) struct Opening {
    action: Option<PendingAction>,
    cancel: Cancel,
    thread: Option<Thread>,
    acquired: Receiver<Acquired>,
    done: Arc<EventFd>,
}

impl Opening {
    /// Begins to `acquire` what `action` needs, on a thread of this kind.
    ///
    /// # Errors
    ///
    /// The host has no descriptor or thread left. The action can be applied without.
    pub(crate) fn begin(
        kind: ThreadKind,
        action: PendingAction,
        acquire: impl FnOnce(&Cancel) -> Acquired + Send + 'static,
    ) -> Result<Self, Box<(PendingAction, io::Error)>> {
        let start = || {
            let (cancel, done) = (Cancel::new()?, Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?));
            let (ends, tells) = (cancel.clone(), Arc::clone(&done));
            let (send, acquired) = mpsc::channel();
            let run = move || {
                // If nobody waits for it any more, it is dropped here.
                let _ = send.send(acquire(&ends));
                // If it is full, it is readable.
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

    /// The action.
    pub(crate) fn action(&self) -> Option<&Action> {
        self.action.as_ref().map(PendingAction::action)
    }

    /// Readable when all has been acquired, or cannot be.
    pub(crate) fn event(&self) -> &EventFd {
        &self.done
    }

    /// The action, and what was acquired for it, after [`Self::event`] became readable. `None` if the thread panicked.
    pub(crate) fn finish(mut self) -> Option<(PendingAction, Acquired)> {
        self.thread.take()?.join().ok()?;
        Some((self.action.take()?, self.acquired.try_recv().ok()?))
    }

    /// Tells its thread that nobody wants what it acquires, and does not wait for it.
    pub(crate) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Ends it. The action is to fail.
    pub(crate) fn abandon(mut self) -> Option<PendingAction> {
        self.action.take()
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            // If it panicked, there is nothing left to do.
            let _ = thread.join();
        }
    }
}
