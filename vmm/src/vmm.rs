//! The program's one thread of control: it makes a virtual machine, does what clients ask for, one thing at a time, and waits
//! for the guest's end or for a signal.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use sd_notify::NotifyState;
use serde::Serialize;
use vmm_sys_util::eventfd::EventFd;

use crate::api::info::{PciDeviceInfo, VmmPingResponse};
use crate::api::{Action, ApiSocket, Claim, Failure, FailureKind, Reply, Resize, Server};
use crate::config::VmConfig;
use crate::control::{self, Requests};
use crate::error::Error;
use crate::event_monitor::EventMonitor;
use crate::events::{EventStream, Events};
use crate::instance::{Added, Instance, Turn};
use crate::metrics::{Process, metrics};
use crate::signals::Signals;
use crate::vm::Vm;
use crate::vm_info;

/// How often a guest that does not read what it was told is interrupted again.
const REMINDER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// What the program does.
#[derive(Debug, Default)]
pub struct Options {
    /// The virtual machine that runs from the start; without one, a client makes it.
    pub vm: Option<VmConfig>,
    /// Where clients find the API.
    pub api: Option<ApiSocket>,
    /// Where events are told.
    pub event_monitor: Option<EventMonitor>,
    /// Goes on after the guest has switched itself off, for clients of the API.
    pub no_shutdown: bool,
}

/// Runs until the guest switches itself off, a client ends it, or SIGINT, SIGTERM, SIGHUP or SIGQUIT does. Before the virtual
/// machine of `options` has its memory, devices and console these signals do what they did before.
///
/// # Errors
///
/// When the host lacks something, or the guest cannot go on. Whatever was opened or created is closed and gone when this
/// returns.
pub fn run(options: Options) -> Result<(), Error> {
    let began = Instant::now();
    let host = |action| move |error| Error::Host { action, error };
    // First, so that a program that cannot run leaves the events of the one that does alone.
    let claim = options.api.as_ref().map(ApiSocket::claim).transpose()?;
    let output = options.event_monitor.as_ref().map(EventMonitor::open).transpose()?;
    let stream = output.map(|output| EventStream::start(output, began)).transpose();
    let (_stream, events) = stream.map_err(host("start the thread that tells events"))?.unzip();
    let events = events.unwrap_or_default();
    events.vmm("starting");
    let ended = serve(options, claim, &events, began);
    events.vmm("shutdown");
    ended
}

fn serve(options: Options, claim: Option<Claim>, events: &Events, began: Instant) -> Result<(), Error> {
    let mut instance = options.vm.map(|config| Instance::new(config, events.clone())).transpose()?;
    if let Some(instance) = &mut instance {
        instance.open()?;
    }
    // Until here, which may take long, a signal ends the process, and what was opened goes with it. From here on there is a
    // terminal to restore.
    let host = |action| move |error| Error::Host { action, error };
    let signals = Signals::catch().map_err(host("catch signals"))?;
    let (control, requests) = control::pair().map_err(host("make an eventfd"))?;
    let bound = claim.map(Claim::listen).transpose()?;
    let (events, no_shutdown) = (events.clone(), options.no_shutdown);
    let mut vmm = Vmm { instance, requests, signals, events, began, no_shutdown };
    if let Some(instance) = &mut vmm.instance {
        instance.start()?;
    }
    let (listener, socket) = bound.unzip();
    let server = listener.map(|listener| Server::start(listener, Arc::new(control))).transpose();
    let server = server.map_err(host("serve the API"))?;
    // Nobody may be there to be told.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let ended = vmm.run();
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    // Nobody asks any more when the socket goes.
    drop(server);
    drop(socket);
    ended
}

/// Whether the program goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    On,
    End,
}

/// The thread of control.
struct Vmm {
    // Dropped in this order: the terminal is restored before the signals are let through again.
    instance: Option<Instance>,
    requests: Requests,
    signals: Signals,
    events: Events,
    began: Instant,
    no_shutdown: bool,
}

/// What the thread of control was woken by.
#[derive(Debug, Clone, Copy)]
struct Woken {
    signal: bool,
    window: bool,
    guest: bool,
    client: bool,
}

impl Vmm {
    /// Serves the guest and clients until the end, which it is for the guest, too.
    fn run(mut self) -> Result<(), Error> {
        let ended = self.serve();
        if let Some(instance) = &mut self.instance {
            instance.shutdown();
        }
        ended
    }

    fn serve(&mut self) -> Result<(), Error> {
        // It may have changed before that was watched.
        self.follow_terminal();
        loop {
            let woken = self.wait()?;
            if woken.signal {
                log::info!("stopped by a signal");
                return Ok(());
            }
            if woken.window {
                self.signals.take_window();
                self.follow_terminal();
            }
            if woken.guest && self.guest()? == Next::End {
                return Ok(());
            }
            // One at a time: clients that never let up must not keep signals and the guest waiting.
            if woken.client
                && let Some(request) = self.requests.take()
            {
                let mut next = Next::On;
                request.serve(|action| {
                    next = if matches!(action, Action::ShutdownVmm) { Next::End } else { Next::On };
                    self.apply(action)
                });
                if next == Next::End {
                    return Ok(());
                }
            }
        }
    }

    fn follow_terminal(&self) {
        if let Some(vm) = self.instance.as_ref().and_then(Instance::vm) {
            vm.follow_terminal();
        }
    }

    fn wait(&self) -> Result<Woken, Error> {
        let guest = self.instance.as_ref().and_then(Instance::vm).map(|vm| vm.event());
        let mut fds: Vec<_> = [self.signals.fd(), self.signals.window(), borrow(self.requests.event())]
            .into_iter()
            .chain(guest.map(borrow))
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let unread = self.instance.as_ref().and_then(Instance::vm).is_some_and(|vm| vm.remind_guest());
        match rustix::event::poll(&mut fds, unread.then_some(&REMINDER)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::Host { action: "wait for the guest", error: error.into() }),
        }
        let ready = |n: usize| fds.get(n).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Woken { signal: ready(0), window: ready(1), client: ready(2), guest: ready(3) })
    }

    /// Looks at what the guest did.
    fn guest(&mut self) -> Result<Next, Error> {
        let Some(instance) = &mut self.instance else { return Ok(Next::On) };
        match instance.turn()? {
            Turn::Off if self.no_shutdown => log::info!("the guest is off"),
            Turn::Off => return Ok(Next::End),
            Turn::Again => log::info!("the guest starts again"),
            Turn::On => {}
        }
        Ok(Next::On)
    }

    /// Does what a client asks for.
    fn apply(&mut self, action: Action) -> Result<Reply, Failure> {
        match action {
            Action::Ping => Ok(ping()),
            Action::ShutdownVmm => {
                // Who has the answer may use what the guest had.
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
                Ok(Reply::Done)
            }
            Action::Shutdown => self.running().map(Instance::shutdown).map(|()| Reply::Done),
            Action::Reboot => {
                self.running()?
                    .reset()
                    .map_err(|error| Failure::from(error).in_context("the VM cannot be started again"))?;
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
            Action::Info => Ok(json(&vm_info::info(self.created()?))),
            Action::Counters => Ok(json(&vm_info::counters(self.running()?))),
            Action::SetVf(change) => self.created()?.set_vf(&change).map(|()| Reply::Done),
            Action::AddDisk(disk) => {
                let added = self.created()?.add_disk(*disk);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the disk cannot be added"))
            }
            Action::AddVdpa(vdpa) => {
                let added = self.created()?.add_vdpa(*vdpa);
                added.map(reply).map_err(|error| Failure::from(error).in_context("the vDPA device cannot be added"))
            }
            Action::Metrics => {
                let process = Process::this(self.began.elapsed(), self.events.dropped());
                Ok(Reply::Metrics(metrics(&process, self.instance.as_ref())))
            }
        }
    }

    fn create(&mut self, config: VmConfig) -> Result<Reply, Failure> {
        if self.instance.is_some() {
            let what = "there is a VM already; delete it first (vm.delete)";
            return Err(Failure::new(FailureKind::Conflict, what));
        }
        self.instance = Some(
            Instance::new(config, self.events.clone())
                .map_err(|error| Failure::from(error).in_context("the VM cannot be created"))?,
        );
        Ok(Reply::Done)
    }

    fn boot(&mut self) -> Result<Reply, Failure> {
        let instance = self.created()?;
        if instance.vm().is_some() {
            return Err(Failure::new(FailureKind::Conflict, "the VM is booted already"));
        }
        let booted = instance.open().and_then(|()| instance.start());
        booted.map_err(|error| Failure::from(error).in_context("the VM cannot be booted"))?;
        Ok(Reply::Done)
    }

    fn pause(&mut self) -> Result<Reply, Failure> {
        let events = self.events.clone();
        match self.guest_mut()? {
            vm if vm.is_paused() => {
                Err(Failure::new(FailureKind::Conflict, "the VM is paused already; vm.resume lets it go on"))
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
                vm.resume();
                events.vm("resumed");
                Ok(Reply::Done)
            }
            _ => Err(Failure::new(FailureKind::Conflict, "the VM is not paused")),
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

    /// The virtual machine, whether it runs or not.
    fn created(&mut self) -> Result<&mut Instance, Failure> {
        self.instance
            .as_mut()
            .ok_or_else(|| Failure::new(FailureKind::NotFound, "there is no VM; create one first (vm.create)"))
    }

    /// The virtual machine, if it is booted.
    fn running(&mut self) -> Result<&mut Instance, Failure> {
        let instance = self.created()?;
        match instance.vm() {
            Some(_) => Ok(instance),
            None => Err(Failure::new(FailureKind::Conflict, "the VM is not booted; boot it first (vm.boot)")),
        }
    }

    /// The guest of a virtual machine that is booted.
    fn guest_mut(&mut self) -> Result<&mut Vm, Failure> {
        let nothing = || Failure::new(FailureKind::Conflict, "the VM is not booted; boot it first (vm.boot)");
        self.created()?.vm_mut().ok_or_else(nothing)
    }
}

/// What `vmm.ping` answers.
fn ping() -> Reply {
    json(&VmmPingResponse {
        build_version: concat!("v53.0.0-sriov-", env!("CARGO_PKG_VERSION")).to_string(),
        version: "53.0.0".to_string(),
        pid: std::process::id(),
        features: Vec::new(),
    })
}

/// What a client is told of a device that it added: where it is, if a guest runs.
fn reply(added: Option<Added>) -> Reply {
    added.map_or(Reply::Done, |Added { id, rid }| json(&PciDeviceInfo { id, bdf: vm_info::bdf(rid) }))
}

/// A document that can always be written: its maps have texts for keys.
fn json(document: &impl Serialize) -> Reply {
    Reply::Json(serde_json::to_string(document).unwrap_or_default())
}

fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
