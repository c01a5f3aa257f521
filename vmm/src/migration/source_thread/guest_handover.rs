//! Handover of the guest: its description, its state, and the locks of its disks.

use virtio_devices::{StorageLockError, StorageLocks};

use super::message::{SourceMessage, Tasks};
use crate::machine_state::MachineState;
use crate::machine_state::backend_state::{self, BackendState, StatefulBackend};
use crate::migration::commands::StoppedGuest;
use crate::migration::offer::FinalState;
use crate::threads::ThreadKind;

/// Parts of the guest that go to the target besides its memory.
pub(super) struct GuestHandover {
    /// Serialized offer.
    offer: Vec<u8>,
    machine: Option<Box<MachineState>>,
    /// State of backends besides their queues.
    backends: Vec<BackendState>,
    /// Host storage that the guest writes.
    locks: StorageLocks,
    /// True if the disks were flushed, or are being flushed, while the guest runs.
    is_flushed: bool,
}

impl GuestHandover {
    /// Prepares the handover of the guest in `offer`.
    pub(super) fn new(offer: Vec<u8>) -> Self {
        Self { offer, machine: None, backends: Vec::new(), locks: StorageLocks::default(), is_flushed: false }
    }

    /// Takes the serialized offer.
    pub(super) fn take_offer(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.offer)
    }

    /// Sets the host storage that the guest writes.
    pub(super) fn set_storage(&mut self, locks: StorageLocks) {
        self.locks = locks;
    }

    /// Keeps the state of the stopped guest. Returns its backends that have state of their own.
    pub(super) fn keep(&mut self, stopped: StoppedGuest) -> Vec<StatefulBackend> {
        (self.machine, self.locks) = (Some(stopped.machine), stopped.locks);
        stopped.stateful
    }

    /// Saves the state of backends besides their queues, which are stopped.
    pub(super) fn save_backends(backends: Vec<StatefulBackend>, tasks: &mut Tasks) {
        tasks.spawn_or_fail(ThreadKind::Open, move || backend_state::save(&backends), SourceMessage::BackendsSaved);
    }

    /// Keeps the state of backends.
    pub(super) fn set_backends(&mut self, backends: Vec<BackendState>) {
        self.backends = backends;
    }

    /// Takes the state to send after `passes` passes over the memory.
    pub(super) fn take_state(&mut self, passes: u32) -> Option<FinalState> {
        let machine = *self.machine.take()?;
        Some(FinalState { passes, machine, backends: std::mem::take(&mut self.backends) })
    }

    /// Starts to flush the guest's disks, once. Returns false if there is nothing to flush.
    pub(super) fn flush_once(&mut self, tasks: &mut Tasks) -> bool {
        if self.is_flushed || self.locks.is_empty() {
            return false;
        }
        self.is_flushed = true;
        self.with_disks(StorageLocks::flush, SourceMessage::DisksFlushed, tasks);
        true
    }

    /// Works on the guest's disks or their locks in a thread, because disks may block, and queues the result.
    pub(super) fn with_disks(
        &self,
        work: impl FnOnce(&StorageLocks) -> Result<(), StorageLockError> + Send + 'static,
        message: fn(Result<(), String>) -> SourceMessage,
        tasks: &mut Tasks,
    ) {
        let locks = self.locks.clone();
        if locks.is_empty() {
            // Starting a thread would add to the downtime.
            return tasks.post(message(Ok(())));
        }
        let work = move || {
            let done = work(&locks).map_err(|error| error.to_string());
            // Dropped before the result is queued, so that the result implies that no reference is left.
            drop(locks);
            done
        };
        tasks.spawn_or_fail(ThreadKind::Open, work, message);
    }
}
