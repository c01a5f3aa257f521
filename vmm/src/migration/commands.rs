//! Commands of migration threads to the control thread, and its replies. Neither blocks on the other.

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
use virtio_devices::StorageLocks;

/// Reply or request of the control thread to a migration thread, on either side.
pub(crate) trait ControlReply: Send + 'static {
    /// A user cancels the migration.
    const CANCEL: Self;
    /// The program exits.
    const QUIT: Self;
}

impl ControlReply for SourceReply {
    const CANCEL: Self = Self::Cancel;
    const QUIT: Self = Self::Quit;
}

impl ControlReply for TargetReply {
    const CANCEL: Self = Self::Cancel;
    const QUIT: Self = Self::Quit;
}

/// Command to the control thread of the source.
#[derive(Debug)]
pub(crate) enum SourceCommand {
    /// Find all writers to guest memory. Reply: [`SourceReply::Writers`].
    FindWriters,
    /// Hold the vCPUs for throttling, or release them.
    Throttle(bool),
    /// Stop the guest and save its machine. Reply: [`SourceReply::Stopped`].
    StopGuest,
    /// Resume the guest if it was running.
    ResumeGuest,
    /// Release the guest, which the target runs. Reply: [`SourceReply::GuestReleased`].
    ReleaseGuest,
    /// Report the outcome, and the reason of a failure. A released guest is already closed.
    Report(Outcome, Option<String>),
    /// A pass over the memory starts, with its number.
    PassStarted(u32),
}

/// Reply or request of the control thread to the source's thread.
pub(crate) enum SourceReply {
    /// Dirty-page sources, or the reason why writes cannot be tracked; none if the guest is paused. Also the host
    /// storage that the guest writes, and the number of functions that its drivers use.
    Writers(Result<Vec<Box<dyn DirtySource>>, String>, StorageLocks, u32),
    /// The guest is stopped, or could not be.
    Stopped(Result<StoppedGuest, String>),
    /// VM of the guest, to be closed by the migration thread.
    GuestReleased(Option<Box<Vm>>),
    /// A user cancels the migration.
    Cancel,
    /// A user forces a resume although the target's state is unknown.
    Force,
    /// The guest has powered off.
    GuestOff,
    /// The VM has changed since the migration started.
    Changed(String),
    /// The program exits.
    Quit,
}

/// State of a stopped guest.
pub(crate) struct StoppedGuest {
    /// State of the machine.
    pub machine: Box<MachineState>,
    /// Host storage that the guest writes.
    pub locks: StorageLocks,
    /// Stopped backends that have state of their own.
    pub stateful: Vec<StatefulBackend>,
    /// Time that stopping took.
    pub stop: Duration,
}

/// Command to the control thread of the target.
pub(crate) enum TargetCommand {
    /// Restore the machine without starting it. Reply: [`TargetReply::Loaded`].
    LoadState {
        /// VM with its memory, and the machine state.
        restored: Box<Restored>,
        /// Descriptors that clients passed for the VM.
        fds: Vec<OwnedFd>,
        /// True if the guest ran at the source.
        runs: bool,
        /// True if the memory is the source's.
        is_local: bool,
    },
    /// Start the guest, if it ran at the source. Its locks are taken. Reply: [`TargetReply::Started`].
    StartGuest,
    /// Drop the restored VM.
    DiscardGuest,
    /// A source has connected.
    Accepted,
    /// Report the outcome, and the reason of a failure.
    Report(Outcome, Option<String>),
}

/// Reply or request of the control thread to the target's thread.
pub(crate) enum TargetReply {
    /// The machine is restored: host storage that the guest writes, without locks; or the reason of a failure.
    Loaded(Result<StorageLocks, String>),
    /// The guest runs; or the reason of a failure, after which the guest and its locks are gone.
    Started(Result<(), String>),
    /// A user cancels the migration.
    Cancel,
    /// The program exits, and performs no further command.
    Quit,
}

/// Receiving end, at the control thread.
pub(crate) struct CommandReceiver<T> {
    commands: Receiver<T>,
    wake: Arc<EventFd>,
}

/// Sending end, at a migration thread.
pub(crate) struct CommandSender<T> {
    commands: Sender<T>,
    wake: Arc<EventFd>,
}

/// Creates both ends.
///
/// # Errors
///
/// Fails if no file descriptor is left.
pub(crate) fn queue<T>() -> io::Result<(CommandSender<T>, CommandReceiver<T>)> {
    let (sender, receiver) = channel();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    Ok((CommandSender { commands: sender, wake: Arc::clone(&wake) }, CommandReceiver { commands: receiver, wake }))
}

impl<T> CommandSender<T> {
    /// Queues a command; dropped if the program exits.
    pub(crate) fn send(&self, command: T) {
        let _ = self.commands.send(command);
        // A full eventfd has woken the control thread already.
        let _ = self.wake.write(1);
    }
}

impl<T> CommandReceiver<T> {
    /// Returns an eventfd that is readable when commands may be queued.
    pub(crate) fn event(&self) -> &EventFd {
        &self.wake
    }

    /// Returns the next command, if any.
    pub(crate) fn take(&self) -> Option<T> {
        let _ = self.wake.read();
        let command = self.commands.try_recv().ok()?;
        // Keep the eventfd readable: more may be queued.
        let _ = self.wake.write(1);
        Some(command)
    }
}
