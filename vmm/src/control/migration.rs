//! Saving and restoring a VM: the control thread's part, before and after a background thread works.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;

use virtio_devices::Cancel;
use vm_api::body::SnapshotConfig;

use crate::api::{Action, Failure, Reply};
use crate::config::RestoreConfig;
use crate::control::ControlLoop;
use crate::control::instance::Instance;
use crate::control::opening::{OpenedResources, PendingOpen};
use crate::control::queue::PendingAction;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::folder;
use crate::snapshot::restorer::{Restored, Restorer};
use crate::snapshot::saver::{Saver, Written};
use crate::threads::{ThreadKind, no_thread};

/// Error prefix of a failed snapshot.
const NOT_SAVED: &str = "the VM cannot be saved";
/// Error prefix of a failed restore.
const NOT_RESTORED: &str = "the VM cannot be restored";

impl ControlLoop {
    /// Starts writing a snapshot.
    pub(super) fn begin_snapshot(&mut self, pending: PendingAction) -> ControlFlow<()> {
        let Action::Snapshot(config) = pending.action() else { return ControlFlow::Continue(()) };
        let saver = match self.saver(config) {
            Ok(saver) => saver,
            Err(failure) => {
                pending.serve(|_| Err(failure.in_context(NOT_SAVED)));
                return ControlFlow::Continue(());
            }
        };
        self.events.vm("snapshotting");
        let work = move |cancel: &Cancel| OpenedResources::Saved(save(saver, cancel));
        self.begin(ThreadKind::Snapshot, pending, work)
    }

    /// Prepares a snapshot of the paused VM.
    fn saver(&mut self, config: &SnapshotConfig) -> Result<Saver, Failure> {
        if self.ending.is_some() {
            let what = "an earlier snapshot was cancelled, and still waits for its disk; try again later";
            return Err(Failure::new(ErrorKind::Conflict, what));
        }
        let folder = folder::path_of("destination_url", &config.destination_url).map_err(Error::from)?;
        landlock::check_destination(&folder).map_err(Error::from)?;
        let instance = self.running()?;
        if instance.vm().is_none_or(|vm| !vm.is_paused()) {
            let what = "the VM is not paused; pause it first (vm.pause)";
            return Err(Failure::new(ErrorKind::Conflict, what));
        }
        instance.saver(folder)
    }

    /// Starts restoring a VM.
    pub(super) fn begin_restore(&mut self, pending: PendingAction) -> ControlFlow<()> {
        let Action::Restore(config, _) = pending.action() else { return ControlFlow::Continue(()) };
        if self.instance.is_some() {
            let what = "there is already a VM; delete it first (vm.delete)";
            pending.serve(|_| Err(Failure::new(ErrorKind::Conflict, what).in_context(NOT_RESTORED)));
            return ControlFlow::Continue(());
        }
        let restorer = self.restorer(RestoreConfig::clone(config));
        let work = move |cancel: &Cancel| OpenedResources::Restored(Box::new(restorer.restore(Some(cancel))));
        self.begin(ThreadKind::Open, pending, work)
    }

    fn restorer(&self, config: RestoreConfig) -> Restorer {
        Restorer { config, events: self.events.clone(), limits: self.limits, own_files: self.own_files.clone() }
    }

    fn begin(
        &mut self,
        kind: ThreadKind,
        pending: PendingAction,
        work: impl FnOnce(&Cancel) -> OpenedResources + Send + 'static,
    ) -> ControlFlow<()> {
        match PendingOpen::begin(kind, pending, work) {
            Ok(opening) => self.opening = Some(opening),
            Err(refused) => {
                let (pending, error) = *refused;
                pending.serve(|_| Err(Failure::new(ErrorKind::Host, no_thread(&error))));
            }
        }
        ControlFlow::Continue(())
    }

    /// Replies to the client of a completed or failed snapshot.
    pub(super) fn saved(&mut self, pending: PendingAction, saved: Result<Written, SnapshotError>) {
        match saved {
            Ok(Written { memory, state }) => {
                log::info!("the snapshot has {memory} bytes of memory and {state} bytes of state");
                self.events.vm("snapshotted");
                pending.serve(|_| Ok(Reply::Done));
            }
            Err(error) => pending.serve(|_| Err(Failure::from(Error::from(error)).in_context(NOT_SAVED))),
        }
    }

    /// Cancels the snapshot in progress without waiting for its thread, which may be blocked on a disk. The thread
    /// keeps the guest's memory and the client's request until it ends.
    pub(super) fn abandon_snapshot(&mut self) {
        if let Some(opening) = self.opening.take() {
            opening.cancel();
            self.ending = Some(opening);
        }
    }

    /// Waits for the thread of a cancelled snapshot, if any, and replies to its client. The snapshot is complete if it
    /// was already on the disk.
    pub(super) fn snapshot_ended(&mut self) {
        if let Some((pending, OpenedResources::Saved(saved))) = self.ending.take().and_then(PendingOpen::finish) {
            self.saved(pending, saved);
        }
    }

    /// Takes over a restored VM, and replies to the client.
    pub(super) fn restored(&mut self, pending: PendingAction, restored: Result<Restored, SnapshotError>) {
        pending.serve(|action| {
            let (config, fds) = match action {
                Action::Restore(config, fds) => (config, fds),
                _ => Default::default(),
            };
            // The thread may have confined itself, even if it failed.
            let followed = landlock::follow().map_err(Error::from);
            let taken =
                followed.and(restored.map_err(Error::from)).and_then(|restored| self.take_restored(restored, fds));
            taken.map_err(|error| Failure::from(error).in_context(NOT_RESTORED))?;
            if config.resume { self.resume() } else { Ok(Reply::Done) }
        });
    }

    /// Takes over a restored VM, paused.
    fn take_restored(&mut self, restored: Restored, fds: Vec<OwnedFd>) -> Result<(), Error> {
        let instance = Instance::restored(restored, fds, self.events.clone(), self.limits)?;
        self.set_instance(instance);
        // As in Cloud Hypervisor, where devices are active first.
        self.events.look_first();
        self.events.vm("restoring");
        self.events.vm("restored");
        Ok(())
    }

    /// Takes over a VM that was restored before the API started.
    ///
    /// # Errors
    ///
    /// Fails if the VM cannot be restored or resumed.
    pub(super) fn begin_restored(&mut self, restored: Restored, resumes: bool) -> Result<(), Error> {
        self.take_restored(restored, Vec::new())?;
        if let Some(vm) = self.instance.as_mut().and_then(Instance::vm_mut)
            && resumes
        {
            self.events.vm("resuming");
            vm.resume()?;
            self.events.vm("resumed");
        }
        Ok(())
    }
}

/// Writes a snapshot until it is complete or cancelled.
fn save(saver: Saver, cancel: &Cancel) -> Result<Written, SnapshotError> {
    saver.save(&|| cancel.is_cancelled())
}
