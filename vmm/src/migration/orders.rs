//! Messages between the threads of a migration and the control thread. Neither waits for the other.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::handover::Outcome;
use crate::dirty::DirtySource;
use crate::machine_state::MachineState;
use crate::machine_state::backend_state::StatefulBackend;
use crate::snapshot::restorer::Restored;
use crate::vm::Vm;
use virtio_devices::Holds;

/// Message of the control thread to a conductor, on either side.
pub(crate) trait Note: Send + 'static {
    /// A user ends the migration.
    const CANCEL: Self;
    /// The program ends.
    const QUIT: Self;
}

impl Note for SourceNote {
    const CANCEL: Self = Self::Cancel;
    const QUIT: Self = Self::Quit;
}

impl Note for TargetNote {
    const CANCEL: Self = Self::Cancel;
    const QUIT: Self = Self::Quit;
}

/// Order to the control thread of the source.
#[derive(Debug)]
pub(crate) enum SourceOrder {
    /// Say who writes to the guest's memory, by [`SourceNote::Writers`].
    FindWriters,
    /// Hold the vCPUs for a moment, or not any more.
    Slow(bool),
    /// Stop the guest and save its machine, and say [`SourceNote::Stopped`].
    Stop,
    /// Let the guest go on, if it ran.
    Resume,
    /// Give the guest up, which runs elsewhere, and say [`SourceNote::GivenUp`].
    GiveUp,
    /// Report how it ended, and why. Nothing is left of a guest that was given up.
    Report(Outcome, Option<String>),
    /// A pass over the memory begins, of this number.
    Pass(u32),
}

/// Message of the control thread to the source's conductor.
pub(crate) enum SourceNote {
    /// Writers to the guest's memory, or the reason why their writes are not known. There are none if the guest does
    /// not run. Also the host storage that the guest writes, and the number of functions that its drivers use.
    Writers(Result<Vec<Box<dyn DirtySource>>, String>, Holds, u32),
    /// The guest stands still.
    Stopped(Result<Stopped, String>),
    /// VM of the guest, to be closed.
    GivenUp(Option<Box<Vm>>),
    /// A user ends the migration.
    Cancel,
    /// A user has the guest go on although nobody knows who has it.
    Force,
    /// The guest is off.
    GuestOff,
    /// The VM is not what it was when the migration began.
    Changed(String),
    /// The program ends.
    Quit,
}

/// A guest that stands still.
pub(crate) struct Stopped {
    /// State of its machine.
    pub machine: Box<MachineState>,
    /// Host storage that it writes.
    pub holds: Holds,
    /// The backends that have states of their own, which stand still.
    pub stateful: Vec<StatefulBackend>,
    /// Time that it took to stop it.
    pub stop: Duration,
}

/// Order to the control thread of the target.
pub(crate) enum TargetOrder {
    /// Restore the machine, which is to be held, and say [`TargetNote::Loaded`].
    Load {
        /// The VM with its memory, and its machine.
        restored: Box<Restored>,
        /// Descriptors that clients passed for it.
        fds: Vec<OwnedFd>,
        /// True if it ran at the source.
        runs: bool,
        /// True if its memory is the source's.
        is_local: bool,
    },
    /// Let the guest, whose locks are taken, go on, if it ran, and say [`TargetNote::Started`].
    Start,
    /// Drop what was loaded.
    Discard,
    /// A source has connected.
    Accepted,
    /// Report how it ended, and why.
    Report(Outcome, Option<String>),
}

/// Message of the control thread to the target's conductor.
pub(crate) enum TargetNote {
    /// The machine is held, with what its guest writes, whose locks are not taken; or why not.
    Loaded(Result<Holds, String>),
    /// The guest runs, or why not. It is gone then, with its locks.
    Started(Result<(), String>),
    /// A user ends the migration.
    Cancel,
    /// The program ends: nothing that is ordered is carried out any more.
    Quit,
}

/// The control thread's end: what it is to do.
pub(crate) struct Orders<T> {
    orders: Receiver<T>,
    wake: Arc<EventFd>,
}

/// The conductor's end.
pub(crate) struct ToControl<T> {
    orders: Sender<T>,
    wake: Arc<EventFd>,
}

/// Both ends.
///
/// # Errors
///
/// No file descriptor is left.
pub(crate) fn pair<T>() -> io::Result<(ToControl<T>, Orders<T>)> {
    let (sender, receiver) = channel();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    Ok((ToControl { orders: sender, wake: Arc::clone(&wake) }, Orders { orders: receiver, wake }))
}

impl<T> ToControl<T> {
    /// Sends an order. If the program ends, nobody carries it out.
    pub(crate) fn send(&self, order: T) {
        let _ = self.orders.send(order);
        // If it is full, the control thread is woken already.
        let _ = self.wake.write(1);
    }
}

impl<T> Orders<T> {
    /// Readable when there may be an order.
    pub(crate) fn event(&self) -> &EventFd {
        &self.wake
    }

    /// The next order, if there is one.
    pub(crate) fn take(&self) -> Option<T> {
        let _ = self.wake.read();
        let order = self.orders.try_recv().ok()?;
        // There may be another.
        let _ = self.wake.write(1);
        Some(order)
    }
}
