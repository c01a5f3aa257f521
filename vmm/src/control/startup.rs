//! The program's start and end: what it needs before the control thread serves, and releases after that.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use sd_notify::NotifyState;

use crate::api::ApiSocket;
use crate::config::{PlannedVm, RestoreConfig};
use crate::control::final_report::Followers;
use crate::control::instance::Instance;
use crate::control::signals::{Signals, ignore_file_size_signal};
use crate::control::sockets::{self, Claims};
use crate::control::{ControlLoop, queue};
use crate::devices::kind;
use crate::error::Error;
use crate::heap;
use crate::landlock;
use crate::privileges;
use crate::seccomp::{self, Seccomp};
use crate::snapshot::restorer::Restorer;
use crate::telemetry::events::{EventStream, Events};
use crate::telemetry::log_output::LogOutput;
use crate::telemetry::monitor::{EventMonitor, Output};
use crate::vm::host_limits::HostLimits;

/// Options of the program.
#[derive(Debug, Default)]
pub struct Options {
    /// VM to start with; without one, a client creates it.
    pub vm: Option<PlannedVm>,
    /// Snapshot to start from instead.
    pub restore: Option<RestoreConfig>,
    /// Socket of the API.
    pub api: Option<ApiSocket>,
    /// Socket of the API for readers.
    pub readers: Option<ApiSocket>,
    /// Receiver of events.
    pub event_monitor: Option<EventMonitor>,
    /// Keep running for API clients after the guest powers off.
    pub no_shutdown: bool,
    /// Accept `vm.inject-fault`.
    pub fault_injection: bool,
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
    let limits = HostLimits::read(sockets::most_files(&options.api, &options.readers));
    let host = |action| move |error| Error::Host { action, error };
    privileges::reduce().map_err(host("give up rights that no VM needs"))?;
    seccomp::begin(options.seccomp).map_err(|error| match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM) => host(NO_THREAD)(error),
        _ => host("filter system calls, without which --seccomp false runs")(error),
    })?;
    // First: the event file of another VMM that has the socket must not get events of two programs.
    let claims = sockets::claim(&options.api, &options.readers)?;
    let output = options.event_monitor.as_ref().map(EventMonitor::open).transpose()?;
    let for_log = log::log_enabled!(log::Level::Info).then_some(Output::LogAlone);
    let stream = output.or(for_log).map(|output| EventStream::start(output, began)).transpose();
    let (_stream, events) = stream.map_err(host("start the thread that writes events"))?.unzip();
    let events = events.unwrap_or_default();
    events.vmm("starting");
    let ended = serve(options, claims, &events, began, limits);
    events.vmm("shutdown");
    ended
}

fn serve(options: Options, claims: Claims, events: &Events, began: Instant, limits: HostLimits) -> Result<(), Error> {
    let own_files = sockets::own_files(&options.api, &options.readers);
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
    let listening = claims.listen()?;
    let (events, no_shutdown, fault_injection) = (events.clone(), options.no_shutdown, options.fault_injection);
    let mut vmm = ControlLoop {
        instance,
        actions,
        signals,
        events,
        began,
        no_shutdown,
        fault_injection,
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
    let servers = listening.serve(&Arc::new(sender)).map_err(host("serve the API"))?;
    // Without a service manager this does nothing.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let ended = vmm.run();
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    drop(servers);
    ended
}
