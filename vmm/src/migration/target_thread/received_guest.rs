//! The received guest: its description, its VM, its state, and the locks of its disks.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_devices::{Cancel, StorageLocks};

use super::message::{TargetMessage, Tasks};
use super::preparer::{PreparedVm, Preparer};
use crate::machine_state::backend_state;
use crate::migration::commands::TargetCommand;
use crate::migration::offer::FinalState;
use crate::migration::transport::Stream;
use crate::snapshot::restorer::Restored;
use crate::threads::ThreadKind;

/// Parts of the guest that have arrived.
pub(super) struct ReceivedGuest {
    /// Creates the VM.
    preparer: Preparer,
    /// Descriptors that came with the request.
    fds: Vec<OwnedFd>,
    offer: Option<Vec<u8>>,
    vm: Option<Box<PreparedVm>>,
    state: Option<FinalState>,
    /// Host storage that the guest writes, from loading the machine until its locks are taken.
    locks: StorageLocks,
    /// Arrival time of Go.
    go: Option<Instant>,
    /// Time until then since the source stopped the guest, if it has sent that.
    stopped: Option<Duration>,
}

impl ReceivedGuest {
    /// Starts without a guest. `fds` came with the client's request.
    pub(super) fn new(preparer: Preparer, fds: Vec<OwnedFd>) -> Self {
        Self {
            preparer,
            fds,
            offer: None,
            vm: None,
            state: None,
            locks: StorageLocks::default(),
            go: None,
            stopped: None,
        }
    }

    /// Keeps the offer.
    pub(super) fn set_offer(&mut self, offer: Vec<u8>) {
        self.offer = Some(offer);
    }

    /// True if the offer has arrived.
    pub(super) const fn has_offer(&self) -> bool {
        self.offer.is_some()
    }

    /// Creates the VM in a thread, with descriptors from `fd_passing`.
    pub(super) fn prepare(&mut self, fd_passing: Option<Arc<Stream>>, cancel: Cancel, tasks: &mut Tasks) {
        let (offer, preparer) = (self.offer.take().unwrap_or_default(), self.preparer.clone());
        let work = move || {
            let prepared = preparer.prepare(&offer, fd_passing.as_deref().and_then(Stream::unix), &cancel);
            prepared.map(Box::new).map_err(|error| error.to_string())
        };
        tasks.spawn_or_fail(ThreadKind::Open, work, TargetMessage::Prepared);
    }

    /// Keeps the created VM.
    pub(super) fn set_vm(&mut self, vm: Box<PreparedVm>) {
        self.vm = Some(vm);
    }

    /// True if there is a VM, which is not being loaded.
    pub(super) const fn has_vm(&self) -> bool {
        self.vm.is_some()
    }

    /// Keeps the state, which follows the last page.
    pub(super) fn set_state(&mut self, state: FinalState) {
        self.state = Some(state);
    }

    /// Number of passes over the memory; `None` until the state has arrived.
    pub(super) fn passes(&self) -> Option<u32> {
        self.state.as_ref().map(|state| state.passes)
    }

    /// Loads the source's backend states into the backends, whose queues have never run. Returns false if there is no
    /// such state.
    pub(super) fn load_backends(&mut self, tasks: &mut Tasks) -> bool {
        let states = self.state.as_mut().map(|state| std::mem::take(&mut state.backends)).unwrap_or_default();
        if states.is_empty() {
            return false;
        }
        let backends = self.vm.as_ref().map(|made| made.vm.devices().memory_users().stateful()).unwrap_or_default();
        let work = move || {
            let loaded = backend_state::load(&backends, &states);
            // The VM and its backends may be dropped as soon as the result is known.
            drop(backends);
            loaded
        };
        tasks.spawn_or_fail(ThreadKind::Open, work, TargetMessage::BackendsLoaded);
        true
    }

    /// Takes VM and state, as the command to load them.
    pub(super) fn take_load(&mut self) -> Option<TargetCommand> {
        let (vm, state) = (self.vm.take()?, self.state.take()?);
        let PreparedVm { planned, vm, links, runs, is_local } = *vm;
        let restored = Box::new(Restored { planned, vm, machine: state.machine, links });
        Some(TargetCommand::LoadState { restored, fds: std::mem::take(&mut self.fds), runs, is_local })
    }

    /// Keeps the host storage that the guest writes.
    pub(super) fn set_storage(&mut self, locks: StorageLocks) {
        self.locks = locks;
    }

    /// Takes all disk locks, or none, in a thread. Afterwards this thread keeps no reference to the storage.
    pub(super) fn take_locks(&mut self, tasks: &mut Tasks) {
        self.go = Some(Instant::now());
        let locks = std::mem::take(&mut self.locks);
        if locks.is_empty() {
            // Starting a thread would add to the downtime.
            return tasks.post(TargetMessage::LocksTaken(Ok(())));
        }
        let work = move || {
            let taken = locks.take().map_err(|error| error.to_string());
            if taken.is_err()
                && let Err(error) = locks.release()
            {
                log::warn!("{error}");
            }
            drop(locks);
            taken
        };
        tasks.spawn_or_fail(ThreadKind::Open, work, TargetMessage::LocksTaken);
    }

    /// Keeps the time since the source stopped the guest, in microseconds.
    pub(super) fn set_stopped(&mut self, micros: Option<u64>) {
        self.stopped = micros.map(Duration::from_micros);
    }

    /// Time since the source stopped the guest, if it has sent that with Go.
    pub(super) fn downtime(&self) -> Option<Duration> {
        Some(self.stopped?.saturating_add(self.since_go()))
    }

    /// Time since Go.
    pub(super) fn since_go(&self) -> Duration {
        self.go.map_or(Duration::ZERO, |go| go.elapsed())
    }

    /// Drops the created VM.
    pub(super) fn discard(&mut self) {
        self.vm = None;
    }
}
