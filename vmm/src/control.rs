//! The control loop: the one thread that creates and changes the VM. It waits for clients' actions, for the guest and
//! for signals, and handles one at a time.

mod failure;
mod info;
pub(crate) mod instance;
mod metrics;
mod opening;
pub(crate) mod queue;
mod resize;
mod set_vf;
mod signals;

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use sd_notify::NotifyState;
use serde::Serialize;
use vmm_sys_util::eventfd::EventFd;

use crate::api::info::{PciDeviceInfo, VmmPingResponse};
use crate::api::{Action, ApiSocket, Claim, Failure, MOST_FILES, Reply, Resize, Server};
use crate::config::{PlannedVm, VmConfig};
use crate::control::instance::{Added, Instance, Turn};
use crate::control::metrics::{Process, metrics};
use crate::control::opening::Opening;
use crate::control::queue::{ActionQueue, PendingAction};
use crate::control::signals::Signals;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::heap;
use crate::landlock::{self, Rule};
use crate::privileges;
use crate::seccomp::{self, Seccomp};
use crate::telemetry::events::{EventStream, Events};
use crate::telemetry::monitor::EventMonitor;
use crate::vm::Vm;
use crate::vm::host_limits::HostLimits;

/// How often a guest that has not read its pending events is interrupted again.
const REMINDER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// No wait.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What the program does.
#[derive(Debug, Default)]
pub struct Options {
    /// The virtual machine that runs from the start; without one, a client makes it.
    pub vm: Option<PlannedVm>,
    /// Where clients find the API.
    pub api: Option<ApiSocket>,
    /// Where events are written.
    pub event_monitor: Option<EventMonitor>,
    /// Keep running after the guest powers off, for clients of the API.
    pub no_shutdown: bool,
    /// What happens at a system call that a thread may not make.
    pub seccomp: Seccomp,
}

/// Runs until the guest powers off, a client ends the program, or SIGINT, SIGTERM, SIGHUP or SIGQUIT arrives. These
/// signals keep their previous action until the VM of `options` has its memory, devices and console.
///
/// # Errors
///
/// The host lacks something, or the guest cannot continue. Everything that was opened or created is released when this
/// returns.
pub fn run(options: Options) -> Result<(), Error> {
    let began = Instant::now();
    heap::limit();
    let clients = if options.api.is_some() { MOST_FILES } else { 0 };
    let limits = HostLimits::read(clients);
    let host = |action| move |error| Error::Host { action, error };
    privileges::reduce().map_err(host("give up rights that no VM needs"))?;
    seccomp::begin(options.seccomp).map_err(host("filter system calls, without which --seccomp false runs"))?;
    // First: if another VMM has the socket, its event file must not be truncated.
    let claim = options.api.as_ref().map(ApiSocket::claim).transpose()?;
    let output = options.event_monitor.as_ref().map(EventMonitor::open).transpose()?;
    let stream = output.map(|output| EventStream::start(output, began)).transpose();
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
        landlock::enter(planned, &own_files)?;
    }
    let mut instance = options.vm.map(|planned| Instance::new(planned, events.clone(), limits));
    if let Some(instance) = &mut instance {
        instance.open()?;
    }
    // Opening may take long; until here a signal simply ends the process. From here on there is a terminal to restore.
    let host = |action| move |error| Error::Host { action, error };
    let signals = Signals::catch().map_err(host("catch signals"))?;
    let (sender, actions) = queue::pair().map_err(host("make an eventfd"))?;
    let bound = claim.map(Claim::listen).transpose()?;
    let (events, no_shutdown) = (events.clone(), options.no_shutdown);
    let (opening, deferred) = (None, VecDeque::new());
    let mut vmm =
        ControlLoop { instance, actions, signals, events, began, no_shutdown, limits, own_files, opening, deferred };
    if let Some(instance) = &mut vmm.instance {
        instance.start()?;
    }
    let (listener, socket) = bound.unzip();
    let server = listener.map(|listener| Server::start(listener, Arc::new(sender))).transpose();
    let server = server.map_err(host("serve the API"))?;
    // There may be no service manager.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let ended = vmm.run();
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    // The server ends before its socket is removed.
    drop(server);
    drop(socket);
    ended
}

/// Whether the program continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    On,
    End,
}

/// The state of the control thread.
struct ControlLoop {
    // Drop order: the terminal is restored before signals get their previous action back.
    instance: Option<Instance>,
    actions: ActionQueue,
    signals: Signals,
    events: Events,
    began: Instant,
    no_shutdown: bool,
    /// Files that this process has or may have open besides those of a VM.
    limits: HostLimits,
    /// The action for which something is being acquired.
    opening: Option<Opening>,
    /// Actions that wait until it has been applied, in their order.
    deferred: VecDeque<PendingAction>,
    /// The files that this program needs whatever its VM is.
    own_files: Vec<Rule>,
}

/// What woke the control thread.
#[derive(Debug, Clone, Copy)]
struct Ready {
    signal: bool,
    window: bool,
    guest: bool,
    client: bool,
    opened: bool,
}

impl ControlLoop {
    /// Serves the guest and clients until the program ends; then shuts the VM down.
    fn run(mut self) -> Result<(), Error> {
        let ended = self.serve();
        if let Some(instance) = &mut self.instance {
            instance.shutdown();
        }
        ended
    }

    fn serve(&mut self) -> Result<(), Error> {
        // The size may have changed before SIGWINCH was caught.
        self.follow_terminal();
        loop {
            let ready = self.wait()?;
            if ready.signal {
                log::info!("stopped by a signal");
                return Ok(());
            }
            if ready.window {
                self.signals.take_window();
                self.follow_terminal();
            }
            if ready.guest && self.guest()? == Next::End {
                return Ok(());
            }
            if ready.opened {
                self.opened();
            }
            // One action at a time: busy clients must not starve signals and the guest.
            let deferred = if self.opening.is_none() { self.deferred.pop_front() } else { None };
            let pending = deferred.or_else(|| if ready.client { self.actions.take() } else { None });
            if let Some(pending) = pending
                && self.handle(pending) == Next::End
            {
                return Ok(());
            }
        }
    }

    /// Applies a client's action, or begins to acquire what it needs. While that is done for another, the action waits,
    /// unless it changes no device; one that ends the VM ends it, too.
    fn handle(&mut self, pending: PendingAction) -> Next {
        if self.opening.is_some() {
            match pending.action() {
                Action::Shutdown | Action::Delete | Action::ShutdownVmm => self.abandon(),
                Action::Ping | Action::Info | Action::Counters | Action::Metrics => {}
                Action::Pause | Action::Resume | Action::PowerButton | Action::Nmi => {}
                _ => {
                    self.deferred.push_back(pending);
                    return Next::On;
                }
            }
        }
        let acquirer = self.instance.as_ref().and_then(|instance| instance.acquirer(pending.action()));
        let Some(acquirer) = acquirer else { return self.perform(pending) };
        match Opening::begin(pending, acquirer) {
            Ok(opening) => self.opening = Some(opening),
            Err(refused) => {
                let (pending, error) = *refused;
                let what = format!("the host has no thread for the wait for vhost-user backends: {error}");
                pending.serve(|_| Err(Failure::new(ErrorKind::Host, what)));
            }
        }
        Next::On
    }

    /// Applies a client's action.
    fn perform(&mut self, pending: PendingAction) -> Next {
        let mut next = Next::On;
        pending.serve(|action| {
            next = if matches!(action, Action::ShutdownVmm) { Next::End } else { Next::On };
            self.apply(action)
        });
        if let Some(instance) = &mut self.instance {
            instance.forget_acquired();
        }
        next
    }

    /// Applies the action for which everything has been acquired.
    fn opened(&mut self) {
        let Some((pending, acquired)) = self.opening.take().and_then(Opening::finish) else { return };
        let is_of_use = self.instance.as_mut().is_none_or(|instance| instance.keep(acquired));
        if is_of_use {
            self.perform(pending);
        } else {
            // The guest's memory has changed meanwhile: once more.
            self.handle(pending);
        }
    }

    /// Ends the action for which something is being acquired.
    fn abandon(&mut self) {
        if let Some(pending) = self.opening.take().and_then(Opening::abandon) {
            let what = "the VM was ended before a vhost-user backend was ready";
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
        // One that is always polled stands in for one that is not there.
        let guest = self.instance.as_ref().and_then(Instance::vm).map_or(client, |vm| vm.event());
        let opened = self.opening.as_ref().map_or(client, Opening::event);
        let mut fds = [self.signals.fd(), self.signals.window(), borrow(client), borrow(guest), borrow(opened)]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let unread = self.instance.as_ref().and_then(Instance::vm).is_some_and(|vm| vm.remind_guest());
        let timeout = match self.opening {
            None if !self.deferred.is_empty() => Some(&AT_ONCE),
            _ => unread.then_some(&REMINDER),
        };
        match rustix::event::poll(&mut fds, timeout) {
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
        })
    }

    /// Handles what the guest did.
    fn guest(&mut self) -> Result<Next, Error> {
        let Some(instance) = &mut self.instance else { return Ok(Next::On) };
        match instance.turn()? {
            Turn::Off if self.no_shutdown => log::info!("the guest powered off"),
            Turn::Off => return Ok(Next::End),
            Turn::On => {}
        }
        Ok(Next::On)
    }

    /// Applies a client's action.
    fn apply(&mut self, action: Action) -> Result<Reply, Failure> {
        match action {
            Action::Ping => Ok(ping()),
            Action::ShutdownVmm => {
                // A client with the answer may reuse the guest's taps and files.
                if let Some(instance) = &mut self.instance {
                    instance.shutdown();
                }
                Ok(Reply::Ok)
            }
            Action::Create(config) => self.create(*config),
            Action::Boot => self.boot(),
            Action::Delete => {
                if let Some(mut instance) = self.instance.take() {
                    instance.shutdown();
                    self.events.vm("deleted");
                }
                heap::give_back();
                Ok(Reply::Done)
            }
            Action::Shutdown => self.running().map(Instance::shutdown).map(|()| Reply::Done),
            Action::Reboot => {
                self.running()?
                    .reset()
                    .map_err(|error| Failure::from(error).in_context("the VM cannot be rebooted"))?;
                Ok(Reply::Done)
            }
            Action::Pause => self.pause(),
            Action::Resume => self.resume(),
            Action::PowerButton => self.guest_mut().map(|vm| vm.press_power_button()).map(|()| Reply::Done),
            Action::Nmi => self.guest_mut().map(|vm| vm.nmi()).map(|()| Reply::Done),
            Action::AddNet(net, fds) => {
                let added = self.created()?.add_net(*net, fds);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the NIC cannot be added"))
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
            Action::SetVf(change) => self.created()?.set_vf(&change).map(|()| Reply::Done),
            Action::AddDisk(disk) => {
                let added = self.created()?.add_disk(*disk);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the disk cannot be added"))
            }
            Action::AddFs(fs) => {
                let added = self.created()?.add_fs(*fs);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the file system cannot be added"))
            }
            Action::AddGenericVhostUser(device) => {
                let added = self.created()?.add_generic_vhost_user(*device);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the device cannot be added"))
            }
            Action::AddPmem(pmem) => {
                let added = self.created()?.add_pmem(*pmem);
                added
                    .map(reply)
                    .map_err(|error| Failure::from(error).in_context("the persistent memory cannot be added"))
            }
            Action::AddVdpa(vdpa) => {
                let added = self.created()?.add_vdpa(*vdpa);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the vDPA device cannot be added"))
            }
            Action::AddVsock(vsock) => {
                let added = self.created()?.add_vsock(*vsock);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the vsock device cannot be added"))
            }
            Action::Metrics => {
                let process = Process::this(self.began.elapsed(), self.events.dropped());
                Ok(Reply::Metrics(metrics(&process, self.instance.as_ref())))
            }
        }
    }

    fn create(&mut self, config: VmConfig) -> Result<Reply, Failure> {
        if self.instance.is_some() {
            let what = "there is already a VM; delete it first (vm.delete)";
            return Err(Failure::new(ErrorKind::Conflict, what));
        }
        let planned = PlannedVm::new(config).map_err(|error| {
            heap::give_back();
            Failure::from(error).in_context("the VM cannot be created")
        })?;
        landlock::enter(&planned, &self.own_files)
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
                vm.pause();
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

    /// The booted VM's host side.
    fn guest_mut(&mut self) -> Result<&mut Vm, Failure> {
        let nothing = || Failure::new(ErrorKind::Conflict, "the VM is not booted; boot it first (vm.boot)");
        self.created()?.vm_mut().ok_or_else(nothing)
    }
}

/// The answer to `vmm.ping`.
fn ping() -> Reply {
    json(&VmmPingResponse {
        build_version: concat!("v53.0.0-sriov-", env!("CARGO_PKG_VERSION")).to_string(),
        version: "53.0.0".to_string(),
        pid: std::process::id(),
        features: ["io_uring", "kvm"].map(str::to_string).into(),
    })
}

/// The answer to `vm.add-*`: the device's address, if the VM is booted.
fn reply(added: Option<Added>) -> Reply {
    added.map_or(Reply::Done, |Added { id, address }| json(&PciDeviceInfo { id, bdf: address.to_string() }))
}

/// A JSON answer. Serialization cannot fail: all map keys are strings.
fn json(document: &impl Serialize) -> Reply {
    Reply::Json(serde_json::to_string(document).unwrap_or_default())
}

fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd stays open while it is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
