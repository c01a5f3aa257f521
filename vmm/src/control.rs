//! The control loop, in the only thread that creates and changes the VM: handles actions of clients, events of the
//! guest, and signals, one at a time.

mod action_log;
mod active_migration;
mod addition;
mod connect;
mod counter_texts;
mod failure;
mod final_report;
mod info;
pub(crate) mod instance;
mod live_migration;
mod metrics;
mod migration;
mod migration_commands;
mod opened;
mod opening;
pub(crate) mod queue;
mod resize;
mod set_vf;
mod signals;
mod unlogged_links;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use sd_notify::NotifyState;
use serde::Serialize;
use virtio_devices::borrow_eventfd as borrow;

use crate::api::info::{PciDeviceInfo, VmmPingResponse};
use crate::api::{Action, ApiSocket, Claim, Failure, MOST_FILES, NewDevice, Reply, Resize, Server};
use crate::config::{PlannedVm, RestoreConfig, VmConfig};
use crate::control::active_migration::ActiveMigration;
use crate::control::final_report::Followers;
use crate::control::instance::{Added, GuestOutcome, Instance};
use crate::control::metrics::{Process, metrics};
use crate::control::opening::{OpenedResources, PendingOpen};
use crate::control::queue::{ActionQueue, PendingAction};
use crate::control::signals::{Signals, ignore_file_size_signal};
use crate::devices::kind;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::heap;
use crate::landlock::{self, Rule};
use crate::migration::progress::Progress;
use crate::privileges;
use crate::seccomp::{self, Seccomp};
use crate::snapshot::restorer::Restorer;
use crate::telemetry::events::{EventStream, Events};
use crate::telemetry::log_output::LogOutput;
use crate::telemetry::monitor::{EventMonitor, Output};
use crate::threads::ThreadKind;
use crate::vm::Vm;
use crate::vm::host_limits::HostLimits;

/// Interval of repeated interrupts for events that the guest has not read.
const REMINDER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// No wait.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Options of the program.
#[derive(Debug, Default)]
pub struct Options {
    /// VM to start with; without one, a client creates it.
    pub vm: Option<PlannedVm>,
    /// Snapshot to start from instead.
    pub restore: Option<RestoreConfig>,
    /// Socket of the API.
    pub api: Option<ApiSocket>,
    /// Receiver of events.
    pub event_monitor: Option<EventMonitor>,
    /// Keep running for API clients after the guest powers off.
    pub no_shutdown: bool,
    /// Action on a disallowed system call.
    pub seccomp: Seccomp,
    /// Output of the log.
    pub log: Option<Arc<LogOutput>>,
}

/// Failed action if the process has reached its thread limit.
const NO_THREAD: &str = "start a thread (raise the limit: prlimit --nproc, or pids.max of its control group)";

/// Runs until the guest powers off, a client ends the program, or SIGINT, SIGTERM or SIGQUIT arrives. SIGHUP opens the
/// files of the log and of events again. These signals keep their previous action until the VM of `options` has its
/// memory, devices and console.
///
/// # Errors
///
/// Fails if the host lacks a resource, or the guest cannot continue. All resources are released on return.
pub fn run(options: Options) -> Result<(), Error> {
    let began = Instant::now();
    heap::limit();
    // Before the first write to a file.
    ignore_file_size_signal();
    let clients = if options.api.is_some() { MOST_FILES } else { 0 };
    let limits = HostLimits::read(clients);
    let host = |action| move |error| Error::Host { action, error };
    privileges::reduce().map_err(host("give up rights that no VM needs"))?;
    seccomp::begin(options.seccomp).map_err(|error| match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM) => host(NO_THREAD)(error),
        _ => host("filter system calls, without which --seccomp false runs")(error),
    })?;
    // First: the event file of another VMM that has the socket must not get events of two programs.
    let claim = options.api.as_ref().map(ApiSocket::claim).transpose()?;
    let output = options.event_monitor.as_ref().map(EventMonitor::open).transpose()?;
    let for_log = log::log_enabled!(log::Level::Info).then_some(Output::LogAlone);
    let stream = output.or(for_log).map(|output| EventStream::start(output, began)).transpose();
    let (_stream, events) = stream.map_err(host("start the thread that writes events"))?.unzip();
    let events = events.unwrap_or_default();
    events.vmm("starting");
    let ended = serve(options, claim, &events, began, limits);
    events.vmm("shutdown");
    ended
}

fn serve(
    options: Options,
    claim: Option<Claim>,
    events: &Events,
    began: Instant,
    limits: HostLimits,
) -> Result<(), Error> {
    let own_files: Vec<_> = options.api.iter().filter_map(ApiSocket::path).map(Rule::of_api_socket).collect();
    if let Some(planned) = &options.vm {
        landlock::enter(planned.config(), || kind::all_files(&planned.plan().devices), &own_files)?;
    }
    let mut instance = options.vm.map(|planned| Instance::new(planned, events.clone(), limits));
    if let Some(instance) = &mut instance {
        instance.open()?;
    }
    let resumes = options.restore.as_ref().is_some_and(|config| config.resume);
    let restored = options
        .restore
        .map(|config| Restorer { config, events: events.clone(), limits, own_files: own_files.clone() }.restore(None));
    let restored = restored.transpose()?;
    // Opening may take long; until here a signal simply kills the process. From here on a terminal must be restored.
    let host = |action| move |error| Error::Host { action, error };
    let signals = Signals::catch().map_err(host("catch signals"))?;
    let (sender, actions) = queue::pair().map_err(host("make an eventfd"))?;
    let bound = claim.map(Claim::listen).transpose()?;
    let (events, no_shutdown) = (events.clone(), options.no_shutdown);
    let mut vmm = ControlLoop {
        instance,
        actions,
        signals,
        events,
        began,
        no_shutdown,
        limits,
        own_files,
        opening: None,
        ending: None,
        deferred: VecDeque::new(),
        live: None,
        progress: None,
        followers: Followers::default(),
        log: options.log,
    };
    if let Some(instance) = &mut vmm.instance {
        instance.start()?;
    }
    if let Some(restored) = restored {
        vmm.begin_restored(restored, resumes)?;
    }
    let (listener, socket) = bound.unzip();
    let server = listener.map(|listener| Server::start(listener, Arc::new(sender))).transpose();
    let server = server.map_err(host("serve the API"))?;
    // Without a service manager this does nothing.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let ended = vmm.run();
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    // The server must end before its socket is removed.
    drop(server);
    drop(socket);
    ended
}

/// State of the control thread.
struct ControlLoop {
    // Drop order: the terminal is restored before the signals' previous actions.
    instance: Option<Instance>,
    actions: ActionQueue,
    signals: Signals,
    events: Events,
    began: Instant,
    no_shutdown: bool,
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

/// Events that woke the control thread.
#[derive(Debug, Clone, Copy)]
struct Ready {
    signal: bool,
    hangup: bool,
    window: bool,
    guest: bool,
    client: bool,
    opened: bool,
    /// The cancelled snapshot has ended.
    ended: bool,
    /// A VFIO device has signalled an error or a removal request.
    host: bool,
    migration: bool,
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
            if ready.signal {
                log::info!("stopped by a signal");
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

    fn wait(&self) -> Result<Ready, Error> {
        let client = self.actions.event();
        // Missing descriptors are replaced by one that is polled anyway.
        let vm = self.instance.as_ref().and_then(Instance::vm);
        // Guest events from before the pause are handled after the snapshot.
        let guest = vm.filter(|_| !self.leaves_guest()).map_or(client, |vm| vm.event());
        let opened = self.opening.as_ref().map_or(client, PendingOpen::event);
        let migration = self.live.as_ref().map_or(client, ActiveMigration::event);
        let watch = self.instance.as_ref().and_then(Instance::vm).and_then(|vm| vm.devices().vfio().watch());
        let host = watch.as_ref().map_or_else(|| borrow(client), |watch| watch.as_fd());
        let ended = self.ending.as_ref().map_or(client, PendingOpen::event);
        let [client, guest, opened, migration, ended] = [client, guest, opened, migration, ended].map(borrow);
        let [end, window, hangup] = [self.signals.fd(), self.signals.window(), self.signals.hangup()];
        let mut fds = [end, window, client, guest, opened, host, migration, ended, hangup]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let unread = self.instance.as_ref().and_then(Instance::vm).is_some_and(|vm| vm.remind_guest());
        let timeout = match self.opening {
            None if !self.deferred.is_empty() => Some(&AT_ONCE),
            _ => unread.then_some(&REMINDER),
        };
        let announce = self.instance.as_ref().and_then(Instance::vm).and_then(Vm::wait_to_announce);
        let announce = announce.and_then(|wait| Timespec::try_from(wait).ok());
        let reclaim = self.instance.as_ref().and_then(Instance::vm).and_then(Vm::wait_to_reclaim);
        let reclaim = reclaim.and_then(|wait| Timespec::try_from(wait).ok());
        let timeout = [timeout.copied(), announce, reclaim].into_iter().flatten().min();
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::Host { action: "wait for the guest", error: error.into() }),
        }
        let ready = |n: usize| fds.get(n).is_some_and(|fd| !fd.revents().is_empty());
        let is_opening = self.opening.is_some();
        Ok(Ready {
            signal: ready(0),
            window: ready(1),
            client: ready(2),
            guest: ready(3),
            opened: is_opening && ready(4),
            host: watch.is_some() && ready(5),
            migration: self.live.is_some() && ready(6),
            ended: self.ending.is_some() && ready(7),
            hangup: ready(8),
        })
    }

    /// True if events of the guest must wait.
    fn leaves_guest(&self) -> bool {
        self.is_saving() || self.holds_guest()
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
                log::info!("the guest powered off");
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
                let failed = format!("the {} cannot be added", device.noun());
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
        self.instance = Some(Instance::new(planned, self.events.clone(), self.limits));
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
