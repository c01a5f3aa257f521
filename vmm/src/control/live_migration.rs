//! Requests of clients for a migration: starts it, cancels it, and refuses what conflicts with it.

use crate::api::{Action, Failure, Reply};
use crate::config::{OnMissingBackend, RestoreConfig};
use crate::control::active_migration::{
    ActiveMigration, IncomingMigration, NOT_RECEIVED, NOT_SENT, OutgoingMigration, check_modes, check_send, conflict,
    host, invalid, tls,
};
use crate::control::followers::{LINGERS, LINGERS_ON};
use crate::control::instance::Instance;
use crate::control::queue::PendingAction;
use crate::control::{ControlLoop, json};
use crate::error_kind::ErrorKind;
use crate::migration;
use crate::migration::commands::{self, SourceReply, TargetReply};
use crate::migration::passed_memory::of_vm;
use crate::migration::progress::Progress;
use crate::migration::source_thread::{SourceHandle, SourceParams};
use crate::migration::target_thread::listening;
use crate::migration::target_thread::preparer::Preparer;
use crate::migration::target_thread::{TargetHandle, TargetParams};
use crate::migration::transport::Address;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_devices::{borrow_eventfd as borrow, why_no_socket};
use vm_api::migration::{MigrationRole, ReceiveMigration, SendMigration};
use vm_memory::GuestAddressSpace as _;

impl ControlLoop {
    /// Refuses actions that would change a VM being sent, or conflict with one being received.
    pub(super) fn refuse_in_migration(&self, action: &Action) -> Option<Failure> {
        let live = self.live.as_ref()?;
        match action {
            Action::Ping | Action::Info | Action::Counters | Action::Metrics | Action::MigrationProgress => None,
            Action::CancelMigration | Action::ShutdownVmm | Action::PowerButton | Action::Nmi => None,
            Action::Shutdown | Action::Delete if live.is_sending() => None,
            Action::Resume(options) => match live {
                ActiveMigration::Outgoing(sent) if sent.is_unknown && options.force => None,
                ActiveMigration::Outgoing(sent) if sent.is_unknown => Some(conflict(
                    "the target of the migration may be running the guest; check there, and if it is not, resume with \
                     {\"force\": true}",
                )),
                _ => Some(self.busy()),
            },
            _ => Some(self.busy()),
        }
    }

    fn busy(&self) -> Failure {
        let what = match &self.live {
            Some(ActiveMigration::Incoming(_)) => "a VM is being received",
            _ => "the VM is being sent to another host",
        };
        conflict(format!("{what}; try again afterwards, or cancel that (vm.cancel-migration)"))
    }

    /// Starts sending the VM.
    pub(super) fn send_migration(&mut self, config: SendMigration) -> Result<Reply, Failure> {
        self.begin_sending(config).map_err(|failure| failure.in_context(NOT_SENT))?;
        self.events.vm("migration-started");
        Ok(Reply::Done)
    }

    fn begin_sending(&mut self, config: SendMigration) -> Result<(), Failure> {
        let address = check_send(&config)?;
        let tls = tls(&address, config.tls_dir.as_deref(), migration::tls::client)?;
        let instance = self.running()?;
        // The guest changes nothing from now on. The channel's state has the notices.
        instance.report_rest();
        let mut offer = instance.offer()?;
        let runs = offer.runs;
        let (mut passed, mut sockets) = (None, Vec::new());
        if config.local {
            let vm = instance.vm().ok_or_else(|| conflict("the VM is not booted"))?;
            sockets = vm.sockets();
            let (state, fds) = of_vm(vm, &sockets).map_err(conflict)?;
            (offer.passed, passed) = (Some(state), Some(fds));
        }
        instance.leaves_links = config.on_unlogged_backend == OnMissingBackend::LinkDown;
        let bytes = offer.bytes().map_err(|error| Failure::new(ErrorKind::Host, format!("no JSON: {error}")))?;
        let vm = instance.vm().ok_or_else(|| conflict("the VM is not booted"))?;
        let memory = (*vm.memory().memory()).clone();
        let progress = Progress::new(MigrationRole::Sender, "connecting");
        let (control, commands) = commands::queue().map_err(host)?;
        let (offer, discarded) = (bytes, vm.devices().discarded());
        let away = (!config.local).then(|| config.destination_url.clone());
        let params = SourceParams {
            config,
            address,
            tls,
            offer,
            passed,
            memory,
            discarded,
            progress: progress.clone(),
            control,
        };
        let thread = SourceHandle::start(params).map_err(host)?;
        self.progress = Some(progress.clone());
        let (is_stopped, is_unknown, stays_paused) = (false, false, None);
        let sent =
            OutgoingMigration { thread, commands, progress, runs, sockets, away, is_stopped, is_unknown, stays_paused };
        self.live = Some(ActiveMigration::Outgoing(sent));
        Ok(())
    }

    /// Starts waiting for a VM. Replies to the client once the guest has arrived or failed to; or now, with `detach`.
    pub(super) fn begin_receive(&mut self, pending: PendingAction) -> ControlFlow<()> {
        let (action, waiting) = pending.split();
        let Action::ReceiveMigration(config, fds) = action else { return ControlFlow::Continue(()) };
        let detach = config.detach;
        if let Err(failure) = self.begin_receiving(*config, fds) {
            waiting.answer(Err(failure.in_context(NOT_RECEIVED)));
            return ControlFlow::Continue(());
        }
        self.events.vm("migration-receive-ready");
        match &mut self.live {
            Some(ActiveMigration::Incoming(received)) if !detach => received.client = Some(waiting),
            _ => waiting.answer(Ok(Reply::Done)),
        }
        ControlFlow::Continue(())
    }

    fn begin_receiving(&mut self, config: ReceiveMigration, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        if self.instance.is_some() {
            return Err(conflict("there is already a VM; delete it first (vm.delete)"));
        }
        let ReceiveMigration { receiver_url, tls_dir, memory_mode, timeout_s, net_fds, .. } = config;
        let (backends, zone_updates) = (config.backends, config.zone_updates);
        let on_missing_backend = config.on_missing_backend;
        let address = Address::parse("receiver_url", &receiver_url).map_err(invalid)?;
        check_modes(memory_mode)?;
        let tls = tls(&address, tls_dir.as_deref(), migration::tls::server)?;
        if let Address::Tcp(host, _) = &address
            && host.parse::<std::net::IpAddr>().is_err()
        {
            let what = "give the address of this host instead of a name, such as tcp:0.0.0.0:4711";
            return Err(invalid(format!("receiver_url={receiver_url}: {what}")));
        }
        let listener = listening::bind(address).map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::AddrInUse => ErrorKind::Conflict,
                _ => ErrorKind::Invalid,
            };
            Failure::new(kind, format!("receiver_url={receiver_url}: {}", why_unheard(&receiver_url, &error)))
        })?;
        let given = RestoreConfig { net_fds, backends, zone_updates, on_missing_backend, ..RestoreConfig::default() };
        let preparer =
            Preparer { given, events: self.events.clone(), limits: self.limits, own_files: self.own_files.clone() };
        let progress = Progress::new(MigrationRole::Receiver, "listening");
        let (control, commands) = commands::queue().map_err(host)?;
        let patience = Duration::from_secs(timeout_s.into());
        let listener = Some(listener);
        let params = TargetParams { listener, tls, patience, preparer, fds, progress: progress.clone(), control };
        let thread = TargetHandle::start(params).map_err(host)?;
        self.progress = Some(progress.clone());
        let (restored, client, stays_paused) = (None, None, None);
        let (runs, is_local) = (false, false);
        let received = IncomingMigration { restored, thread, commands, progress, runs, is_local, client, stays_paused };
        self.live = Some(ActiveMigration::Incoming(received));
        Ok(())
    }

    /// Cancels the migration. Progress and events report the outcome.
    pub(super) fn cancel_migration(&mut self) -> Result<Reply, Failure> {
        match &self.live {
            Some(ActiveMigration::Outgoing(sent)) if sent.is_unknown => Err(conflict(
                "the guest was handed over, and the target has not replied; check there, and if the guest is not \
                 running, resume it here (vm.resume with {\"force\": true})",
            )),
            Some(ActiveMigration::Outgoing(sent)) => {
                sent.thread.send(SourceReply::Cancel);
                Ok(Reply::Done)
            }
            Some(ActiveMigration::Incoming(received)) => {
                received.thread.send(TargetReply::Cancel);
                Ok(Reply::Done)
            }
            None => Err(conflict("no migration is in progress")),
        }
    }

    /// Progress of the current or last migration.
    pub(super) fn migration_progress(&mut self) -> Result<Reply, Failure> {
        self.followers.ask();
        let nothing = || Failure::new(ErrorKind::NotFound, "there has been no migration");
        self.progress.as_ref().map(|progress| json(&progress.shown())).ok_or_else(nothing)
    }

    /// Forces a resume although the target's state is unknown.
    pub(super) fn force_resume(&mut self) -> Option<Reply> {
        match &self.live {
            Some(ActiveMigration::Outgoing(sent)) if sent.is_unknown => {
                sent.thread.send(SourceReply::Force);
                Some(Reply::Done)
            }
            _ => None,
        }
    }

    /// Handles the end of the VM during an outgoing migration.
    pub(super) fn end_sending(&mut self) {
        match &self.live {
            // With an unknown outcome, no reply is pending.
            Some(ActiveMigration::Outgoing(sent)) if sent.is_unknown => self.live = None,
            Some(ActiveMigration::Outgoing(sent)) => {
                sent.thread.send(SourceReply::GuestOff);
                // Cancels a paused guest's migration as well, unless Go was sent.
                sent.thread.send(SourceReply::Cancel);
            }
            _ => {}
        }
    }

    /// True if a reset requested by the guest is left to the side that owns it after the migration.
    pub(super) fn holds_guest(&self) -> bool {
        match (&self.live, self.instance.as_ref().and_then(Instance::vm)) {
            (Some(ActiveMigration::Outgoing(sent)), _) if sent.is_stopped => true,
            (Some(ActiveMigration::Outgoing(_)), Some(vm)) => vm.awaits_reset(),
            _ => false,
        }
    }

    /// Fails an outgoing migration whose VM has lost a device.
    pub(super) fn changed_while_sending(&self, what: &str) {
        if let Some(ActiveMigration::Outgoing(sent)) = &self.live {
            sent.thread.send(SourceReply::Changed(format!("{what}; send the VM again")));
        }
    }

    /// Answers further requests for the progress, if a client follows it, until a signal ends the program. Called once
    /// the guest's resources are released, before the API ends.
    pub(super) fn report_end(&mut self) {
        if !self.followers.wait() {
            return;
        }
        let mut end = Instant::now() + LINGERS;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(timeout) = Timespec::try_from(left) else { return };
            if left.is_zero() {
                return;
            }
            let mut fds =
                [borrow(self.actions.event()), self.signals.fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // If this fails (a signal), the queue is checked and the wait is repeated.
            let _ = poll(&mut fds, Some(&timeout));
            if !fds[1].revents().is_empty() {
                return;
            }
            match self.actions.take() {
                Some(pending) if matches!(pending.action(), Action::MigrationProgress) => {
                    pending.serve(|_| self.migration_progress());
                    end = end.min(Instant::now() + LINGERS_ON);
                }
                Some(pending) => {
                    pending.serve(|_| Err(Failure::new(ErrorKind::Host, "the VMM is shutting down")));
                }
                None => {}
            }
        }
    }
}

/// Returns why nothing can listen at the address `url`, after `error`, and the remedy.
fn why_unheard(url: &str, error: &std::io::Error) -> String {
    match url.strip_prefix("unix:") {
        Some(path) => why_no_socket(Path::new(path), error),
        None => format!("{error}; give an address of this host that is free"),
    }
}
