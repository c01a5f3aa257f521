//! The control loop, in the only thread that creates and changes the VM: handles actions of clients, events of the
//! guest, and signals, one at a time.

mod action_log;
mod active_migration;
mod addition;
mod connect;
mod connection;
mod counter_texts;
mod failure;
mod followers;
mod guest_reports;
mod guest_vfs;
mod in_force;
mod info;
pub(crate) mod instance;
mod live_migration;
mod metrics;
mod migration;
mod migration_commands;
mod opening;
pub(crate) mod queue;
mod ready;
mod resize;
mod set_vf;
mod signals;
mod sockets;
pub(crate) mod startup;
mod unlogged_links;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::api::info::{PciDeviceInfo, VmmPingResponse};
use crate::api::{Action, Failure, NewDevice, Reply, Resize};
use crate::config::{PlannedVm, VmConfig};
use crate::control::active_migration::ActiveMigration;
use crate::control::followers::Followers;
use crate::control::instance::{Added, GuestOutcome, Instance};
use crate::control::metrics::{Process, metrics};
use crate::control::opening::{OpenedResources, PendingOpen};
use crate::control::queue::{ActionQueue, PendingAction};
use crate::control::ready::{Ready, Sources};
use crate::control::signals::Signals;
use crate::devices::kind;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::heap;
use crate::landlock::{self, Rule};
use crate::migration::progress::Progress;
use crate::telemetry::events::Events;
use crate::telemetry::log_output::LogOutput;
use crate::threads::ThreadKind;
use crate::vm::Vm;
use crate::vm::host_limits::HostLimits;

/// Interval of repeated interrupts for events that the guest has not read.
const REMINDER: Duration = Duration::from_secs(1);
/// No wait.
const AT_ONCE: Duration = Duration::ZERO;

/// State of the control thread.
struct ControlLoop {
    // Drop order: the terminal is restored before the signals' previous actions.
    instance: Option<Instance>,
    actions: ActionQueue,
    signals: Signals,
    events: Events,
    began: Instant,
    no_shutdown: bool,
    /// True if clients may ask for faults.
    fault_injection: bool,
    /// Limits of open files and other resources.
    limits: HostLimits,
    /// Action whose resources are being opened.
    opening: Option<PendingOpen>,
    /// Cancelled snapshot, whose thread may still wait for the disk.
    ending: Option<PendingOpen>,
    /// Actions to handle after the one that is opening, in order.
    deferred: VecDeque<PendingAction>,
    /// Files that the program needs with any VM.
    own_files: Vec<Rule>,
    /// Migration in progress, or with an unknown outcome.
    live: Option<ActiveMigration>,
    /// Progress of the current or last migration.
    progress: Option<Progress>,
    /// Clients that follow it.
    followers: Followers,
    /// Output of the log.
    log: Option<Arc<LogOutput>>,
}

impl ControlLoop {
    /// Serves the guest and clients until the program ends; then shuts the VM down.
    fn run(mut self) -> Result<(), Error> {
        let ended = self.serve();
        if let Some(instance) = &mut self.instance {
            instance.shutdown();
            self.events.vm("deleted");
        }
        if self.is_saving() {
            self.abandon();
        }
        // The snapshot's files are removed before the program exits.
        self.snapshot_ended();
        self.report_end();
        ended
    }

    fn serve(&mut self) -> Result<(), Error> {
        // The size may have changed before SIGWINCH was caught.
        self.follow_terminal();
        loop {
            let ready = self.wait()?;
            if let Some(vm) = self.instance.as_mut().and_then(Instance::vm_mut) {
                vm.announce();
                vm.reclaim();
            }
            let leaves_guest = self.leaves_guest();
            if let Some(instance) = self.instance.as_mut().filter(|_| !leaves_guest) {
                instance.report_late(Instant::now());
            }
            if ready.signal {
                log::info!("vmm: stopped by a signal");
                return Ok(());
            }
            if ready.hangup && self.hang_up() == ControlFlow::Break(()) {
                return Ok(());
            }
            if ready.window {
                self.signals.take_window();
                self.follow_terminal();
            }
            if ready.migration && self.run_migration_commands()? == ControlFlow::Break(()) {
                return Ok(());
            }
            if ready.guest && !self.leaves_guest() && self.guest()? == ControlFlow::Break(()) {
                return Ok(());
            }
            if ready.channel {
                self.answer_guest();
            }
            if ready.opened {
                self.opened();
            }
            if ready.ended {
                self.snapshot_ended();
            }
            if ready.host
                && let Some(instance) = &mut self.instance
            {
                instance.heed_host();
            }
            // One action at a time: busy clients must not starve signals and the guest.
            let deferred = if self.opening.is_none() { self.deferred.pop_front() } else { None };
            let pending = deferred.or_else(|| if ready.client { self.actions.take() } else { None });
            if let Some(pending) = pending
                && self.handle(pending) == ControlFlow::Break(())
            {
                return Ok(());
            }
        }
    }

    /// Handles SIGHUP: opens the files of the log and of events again, which logrotate may have renamed. Ends the
    /// program if the user's terminal was closed.
    fn hang_up(&self) -> ControlFlow<()> {
        if self.signals.take_hangup() {
            log::info!("stopped because its terminal was closed");
            return ControlFlow::Break(());
        }
        let log = self.log.as_ref().map_or(Ok(()), |log| log.reopen());
        let files = [("--log-file", log), ("--event-monitor path=", self.events.reopen())];
        for (option, reopened) in files {
            if let Err(error) = reopened {
                log::warn!("{option} {error}");
            }
        }
        ControlFlow::Continue(())
    }

    /// Applies a client's action, or starts opening its resources. While another action does that, this one is queued
    /// unless it changes no device; one that ends the VM also cancels the other.
    fn handle(&mut self, pending: PendingAction) -> ControlFlow<()> {
        if let Some(failure) = self.refuse_in_migration(pending.action()) {
            pending.serve(|_| Err(failure));
            return ControlFlow::Continue(());
        }
        if self.opening.is_some() {
            match pending.action() {
                Action::Shutdown | Action::Delete | Action::ShutdownVmm => self.abandon(),
                Action::Ping | Action::Info | Action::Counters | Action::Metrics | Action::MigrationProgress => {}
                _ if self.is_saving() => {
                    let what = "a snapshot of the VM is being written; try again when it is complete";
                    pending.serve(|_| Err(Failure::new(ErrorKind::Conflict, what)));
                    return ControlFlow::Continue(());
                }
                Action::Pause | Action::Resume(_) | Action::PowerButton | Action::Nmi => {}
                _ => {
                    self.deferred.push_back(pending);
                    return ControlFlow::Continue(());
                }
            }
        }
        match pending.action() {
            Action::Snapshot(_) => return self.begin_snapshot(pending),
            Action::Restore(..) => return self.begin_restore(pending),
            Action::ReceiveMigration(..) => return self.begin_receive(pending),
            _ => {}
        }
        let acquirer = self.instance.as_mut().and_then(|instance| instance.acquirer(pending.action()));
        let Some(acquirer) = acquirer else { return self.perform(pending) };
        match PendingOpen::begin(ThreadKind::Open, pending, acquirer) {
            Ok(opening) => self.opening = Some(opening),
            Err(refused) => {
                let (pending, error) = *refused;
                self.end_pinning();
                let what = format!("the host has no thread to open what the device needs: {error}");
                pending.serve(|_| Err(Failure::new(ErrorKind::Host, what)));
            }
        }
        ControlFlow::Continue(())
    }

    /// Applies an action now.
    fn perform(&mut self, pending: PendingAction) -> ControlFlow<()> {
        let mut next = ControlFlow::Continue(());
        pending.serve(|action| {
            next =
                if matches!(action, Action::ShutdownVmm) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            self.apply(action)
        });
        if let Some(instance) = &mut self.instance {
            instance.forget_acquired();
        }
        next
    }

    /// Applies the action whose resources are open.
    fn opened(&mut self) {
        let Some((pending, acquired)) = self.opening.take().and_then(PendingOpen::finish) else { return };
        let acquired = match acquired {
            OpenedResources::Saved(saved) => return self.saved(pending, saved),
            OpenedResources::Restored(restored) => return self.restored(pending, *restored),
            acquired => acquired,
        };
        let is_of_use = self.instance.as_mut().is_none_or(|instance| instance.keep(acquired));
        // An action that opens resources does not end the loop.
        let _ = if is_of_use {
            let next = self.perform(pending);
            self.end_pinning();
            next
        } else {
            // The guest's memory has changed since then: retry.
            self.end_pinning();
            self.handle(pending)
        };
    }

    /// Ends the pinning of devices that were opened: they are plugged in or closed by now.
    fn end_pinning(&mut self) {
        if let Some(instance) = &mut self.instance {
            instance.end_pinning();
        }
    }

    /// Cancels the action whose resources are being opened.
    fn abandon(&mut self) {
        if self.is_saving() {
            self.abandon_snapshot();
        } else if let Some(pending) = self.opening.take().and_then(PendingOpen::abandon) {
            let what = match pending.action() {
                Action::Restore(..) => "the VM was ended before it was restored",
                Action::Add(NewDevice::Host(..)) => "the VM was ended before the device of the host was open",
                _ => "the VM was ended before a vhost-user backend was ready",
            };
            pending.serve(|_| Err(Failure::new(ErrorKind::Conflict, what)));
        }
    }

    fn follow_terminal(&self) {
        if let Some(vm) = self.instance.as_ref().and_then(Instance::vm) {
            vm.follow_terminal();
        }
    }

    /// Waits for an event, or until something is due.
    fn wait(&self) -> Result<Ready, Error> {
        let vm = self.instance.as_ref().and_then(Instance::vm);
        let watch = vm.and_then(|vm| vm.devices().vfio().watch());
        let sources = Sources {
            signals: &self.signals,
            client: self.actions.event(),
            // Guest events from before the pause are handled after the snapshot.
            guest: vm.filter(|_| !self.leaves_guest()).map(Vm::event),
            channel: vm.filter(|vm| self.serves_guest(vm)).and_then(Vm::channel).map(|channel| channel.event()),
            opened: self.opening.as_ref().map(PendingOpen::event),
            ended: self.ending.as_ref().map(PendingOpen::event),
            migration: self.live.as_ref().map(ActiveMigration::event),
            host: watch.as_deref().map(AsFd::as_fd),
        };
        let unread = vm.is_some_and(Vm::remind_guest);
        let timeout = match self.opening {
            None if !self.deferred.is_empty() => Some(AT_ONCE),
            _ => unread.then_some(REMINDER),
        };
        let instance = self.instance.as_ref().filter(|_| !self.leaves_guest());
        let report = instance.and_then(|instance| instance.wait_to_report(Instant::now()));
        let waits = [timeout, report, vm.and_then(Vm::wait_to_announce), vm.and_then(Vm::wait_to_reclaim)];
        sources.wait(waits.into_iter().flatten().min())
    }

    /// True if events of the guest must wait.
    fn leaves_guest(&self) -> bool {
        self.is_saving() || self.holds_guest()
    }

    /// True if requests of the guest are carried out now. They wait while the guest does not run, and for their turn
    /// after an action that is opening resources, as changes by clients do.
    fn serves_guest(&self, vm: &Vm) -> bool {
        !self.leaves_guest() && self.opening.is_none() && !vm.is_paused()
    }

    /// Carries out one request of the guest.
    fn answer_guest(&mut self) {
        let is_sent = self.live.is_some();
        // An event that was handled before may have paused the VM.
        if self.instance.as_ref().and_then(Instance::vm).is_some_and(|vm| self.serves_guest(vm))
            && let Some(instance) = &mut self.instance
        {
            instance.answer_guest(is_sent);
        }
    }

    /// True while a snapshot is being written.
    fn is_saving(&self) -> bool {
        self.opening.as_ref().and_then(PendingOpen::action).is_some_and(|action| matches!(action, Action::Snapshot(_)))
    }

    /// Handles events of the guest.
    fn guest(&mut self) -> Result<ControlFlow<()>, Error> {
        let Some(instance) = &mut self.instance else { return Ok(ControlFlow::Continue(())) };
        let devices = |instance: &Instance| instance.vm().map_or(0, |vm| vm.devices().iter().count());
        let before = devices(instance);
        let turn = instance.turn()?;
        let is_other = devices(instance) != before;
        match turn {
            GuestOutcome::Off => {
                self.end_sending();
                if !self.no_shutdown {
                    return Ok(ControlFlow::Break(()));
                }
            }
            GuestOutcome::On if is_other => self.changed_while_sending("the guest released a device"),
            GuestOutcome::On => {}
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Applies a client's action.
    fn apply(&mut self, action: Action) -> Result<Reply, Failure> {
        match action {
            Action::Ping => Ok(ping()),
            Action::ShutdownVmm => {
                // After the reply, a client may reuse the guest's taps and files.
                if let Some(instance) = &mut self.instance {
                    instance.shutdown();
                }
                Ok(Reply::Ok)
            }
            Action::Create(config) => self.create(*config),
            Action::Boot => self.boot(),
            Action::Delete => {
                self.end_sending();
                if let Some(mut instance) = self.instance.take() {
                    instance.shutdown();
                    self.events.vm("deleted");
                }
                heap::give_back();
                Ok(Reply::Done)
            }
            Action::Shutdown => {
                self.end_sending();
                self.running().map(Instance::shutdown).map(|()| Reply::Done)
            }
            Action::Reboot => {
                self.running()?
                    .reset()
                    .map_err(|error| Failure::from(error).in_context("the VM cannot be rebooted"))?;
                Ok(Reply::Done)
            }
            Action::Pause => self.pause(),
            Action::Resume(_) => self.force_resume().map_or_else(|| self.resume(), Ok),
            Action::SendMigration(config) => self.send_migration(*config),
            Action::CancelMigration => self.cancel_migration(),
            Action::MigrationProgress => self.migration_progress(),
            Action::PowerButton => self.guest_mut().map(|vm| vm.press_power_button()).map(|()| Reply::Done),
            Action::Nmi => self.guest_mut().map(|vm| vm.nmi()).map(|()| Reply::Done),
            Action::Add(device) => {
                let failed = format!("the {} cannot be added", device.texts().noun);
                let added = self.created()?.add(device);
                added.map(reply).map_err(|error| Failure::from(error).in_context(failed))
            }
            Action::RemoveDevice(device) => self.created()?.remove_device(&device.id).map(|()| Reply::Done),
            Action::Resize(resize) => self.resize(&resize),
            Action::ResizeZone(resize) => {
                let resized = self.created()?.resize_zone(&resize);
                resized.map_err(|failure| failure.in_context("the memory zone cannot be resized"))?;
                Ok(Reply::Done)
            }
            Action::ResizeDisk(resize) => {
                let resized = self.created()?.resize_disk(&resize);
                resized.map_err(|failure| failure.in_context("the disk cannot be resized"))?;
                Ok(Reply::Done)
            }
            Action::Info => Ok(json(&info::info(self.created()?))),
            Action::Counters => Ok(json(&info::counters(self.running()?))),
            Action::SetVf(change, fds) => self.created()?.set_vf(&change, fds).map(|()| Reply::Done),
            Action::InjectFault(_) if !self.fault_injection => {
                let what = "faults on demand are off; start the program with --fault-injection";
                Err(Failure::new(ErrorKind::Conflict, what))
            }
            Action::InjectFault(fault) => self.created()?.inject_fault(&fault).map(|()| Reply::Done),
            // Usually handled in other threads.
            Action::Snapshot(_) | Action::Restore(..) | Action::ReceiveMigration(..) => {
                Err(Failure::new(ErrorKind::Conflict, "another action is in progress; try again"))
            }
            Action::Metrics => {
                let process = Process {
                    log_lines_lost: self.log.as_ref().map_or(0, |log| log.lost()),
                    ..Process::this(self.began.elapsed(), self.events.dropped())
                };
                let migration = self.progress.as_ref().map(Progress::shown);
                Ok(Reply::Metrics(metrics(&process, self.instance.as_ref(), migration.as_ref())))
            }
        }
    }

    fn create(&mut self, config: VmConfig) -> Result<Reply, Failure> {
        if self.instance.is_some() {
            let what = "there is already a VM; delete it first (vm.delete)";
            return Err(Failure::new(ErrorKind::Conflict, what));
        }
        let planned = PlannedVm::of_document(config).map_err(|error| {
            heap::give_back();
            Failure::from(error).in_context("the VM cannot be created")
        })?;
        landlock::enter(planned.config(), || kind::all_files(&planned.plan().devices), &self.own_files)
            .map_err(|error| Failure::from(Error::from(error)).in_context("the VM cannot be created"))?;
        self.set_instance(Instance::new(planned, self.events.clone(), self.limits));
        Ok(Reply::Done)
    }

    fn boot(&mut self) -> Result<Reply, Failure> {
        let instance = self.created()?;
        if instance.vm().is_some() {
            return Err(Failure::new(ErrorKind::Conflict, "the VM is already booted"));
        }
        let booted = instance.open().and_then(|()| instance.start());
        booted.map_err(|error| Failure::from(error).in_context("the VM cannot be booted"))?;
        Ok(Reply::Done)
    }

    fn pause(&mut self) -> Result<Reply, Failure> {
        let events = self.events.clone();
        match self.guest_mut()? {
            vm if vm.is_paused() => {
                Err(Failure::new(ErrorKind::Conflict, "the VM is already paused; resume it with vm.resume"))
            }
            vm => {
                events.vm("pausing");
                vm.pause_in_time().map_err(Error::from)?;
                events.vm("paused");
                Ok(Reply::Done)
            }
        }
    }

    fn resume(&mut self) -> Result<Reply, Failure> {
        let events = self.events.clone();
        match self.guest_mut()? {
            vm if vm.is_paused() => {
                events.vm("resuming");
                vm.resume()
                    .map_err(|error| Failure::from(Error::from(error)).in_context("the VM cannot be resumed"))?;
                events.vm("resumed");
                Ok(Reply::Done)
            }
            _ => Err(Failure::new(ErrorKind::Conflict, "the VM is not paused")),
        }
    }

    fn resize(&mut self, resize: &Resize) -> Result<Reply, Failure> {
        let events = self.events.clone();
        let instance = self.created()?;
        events.vm("resizing");
        instance.resize(resize)?;
        events.vm("resized");
        Ok(Reply::Done)
    }

    /// The VM, booted or not.
    fn created(&mut self) -> Result<&mut Instance, Failure> {
        self.instance
            .as_mut()
            .ok_or_else(|| Failure::new(ErrorKind::NotFound, "there is no VM; create one first (vm.create)"))
    }

    /// The VM, if it is booted.
    fn running(&mut self) -> Result<&mut Instance, Failure> {
        let instance = self.created()?;
        match instance.vm() {
            Some(_) => Ok(instance),
            None => Err(Failure::new(ErrorKind::Conflict, "the VM is not booted; boot it first (vm.boot)")),
        }
    }

    /// The booted VM, mutable.
    fn guest_mut(&mut self) -> Result<&mut Vm, Failure> {
        let nothing = || Failure::new(ErrorKind::Conflict, "the VM is not booted; boot it first (vm.boot)");
        self.created()?.vm_mut().ok_or_else(nothing)
    }
}

/// Reply to `vmm.ping`.
fn ping() -> Reply {
    json(&VmmPingResponse {
        build_version: concat!("v53.0.0-sriov-", env!("CARGO_PKG_VERSION")).to_string(),
        version: "53.0.0".to_string(),
        pid: std::process::id(),
        features: ["io_uring", "kvm"].map(str::to_string).into(),
    })
}

/// Reply to `vm.add-*`: the address of the device, if the VM is booted.
fn reply(added: Option<Added>) -> Reply {
    added.map_or(Reply::Done, |Added { id, address }| json(&PciDeviceInfo { id, bdf: address.to_string() }))
}

/// JSON reply. Serialization cannot fail: all map keys are strings.
fn json(document: &impl Serialize) -> Reply {
    Reply::Json(serde_json::to_string(document).unwrap_or_default())
}
