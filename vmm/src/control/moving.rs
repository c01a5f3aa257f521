//! The control thread's part of a migration: stops and starts the guest on request of the migration thread, and serves
//! clients throughout.

use crate::api::{Action, Failure, Reply};
use crate::config::{OnMissingBackend, RestoreConfig};
use crate::control::instance::Instance;
use crate::control::live::{Live, NOT_RECEIVED, NOT_SENT, check_modes, check_send, conflict, host, invalid, tls};
use crate::control::queue::PendingAction;
use crate::control::{ControlLoop, Next, json};
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::migration;
use crate::migration::handover::Outcome;
use crate::migration::listening;
use crate::migration::orders::{self, SourceNote, SourceOrder, Stopped, TargetNote, TargetOrder};
use crate::migration::passed::of_vm;
use crate::migration::preparer::Preparer;
use crate::migration::progress::Progress;
use crate::migration::receiving::{ReceiveJob, Receiving};
use crate::migration::sending::{SendJob, Sending};
use crate::migration::transport::Address;
use crate::snapshot::restorer::Restored;
use crate::telemetry::events::Source;
use crate::threads;
use crate::vm::Vm;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
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
                Live::Sending { is_unknown: true, .. } if options.force => None,
                Live::Sending { is_unknown: true, .. } => Some(conflict(
                    "nobody knows whether the target of the migration runs the guest; look there, and if it does not, \
                     resume with {\"force\": true}",
                )),
                _ => Some(self.busy()),
            },
            _ => Some(self.busy()),
        }
    }

    fn busy(&self) -> Failure {
        let what = match &self.live {
            Some(Live::Receiving { .. }) => "a VM is being received",
            _ => "the VM is being sent to another host",
        };
        conflict(format!("{what}; try again afterwards, or end that (vm.cancel-migration)"))
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
        let mut offer = instance.offer()?;
        let runs = offer.runs;
        let mut passed = None;
        if config.local {
            let vm = instance.vm().ok_or_else(|| conflict("the VM is not booted"))?;
            let (state, fds) = of_vm(vm).map_err(conflict)?;
            (offer.passed, passed) = (Some(state), Some(fds));
        }
        instance.leaves_links = config.on_unlogged_backend == OnMissingBackend::LinkDown;
        let bytes = offer.bytes().map_err(|error| Failure::new(ErrorKind::Host, format!("no JSON: {error}")))?;
        let vm = instance.vm().ok_or_else(|| conflict("the VM is not booted"))?;
        let memory = (*vm.memory().memory()).clone();
        let progress = Progress::new(MigrationRole::Sender, "connecting");
        let (control, orders) = orders::pair().map_err(host)?;
        let (offer, discarded) = (bytes, vm.devices().discarded());
        let job =
            SendJob { config, address, tls, offer, passed, memory, discarded, progress: progress.clone(), control };
        let sending = Sending::begin(job).map_err(host)?;
        self.progress = Some(progress.clone());
        let (is_stopped, is_unknown, stays_paused) = (false, false, None);
        self.live = Some(Live::Sending { sending, orders, progress, runs, is_stopped, is_unknown, stays_paused });
        Ok(())
    }

    /// Starts waiting for a VM. Replies to the client once the guest has arrived or failed to; or now, with `detach`.
    pub(super) fn begin_receive(&mut self, pending: PendingAction) -> Next {
        let (action, waiting) = pending.split();
        let Action::ReceiveMigration(config, fds) = action else { return Next::On };
        let detach = config.detach;
        if let Err(failure) = self.begin_receiving(*config, fds) {
            waiting.answer(Err(failure.in_context(NOT_RECEIVED)));
            return Next::On;
        }
        self.events.vm("migration-receive-ready");
        match &mut self.live {
            Some(Live::Receiving { client, .. }) if !detach => *client = Some(waiting),
            _ => waiting.answer(Ok(Reply::Done)),
        }
        Next::On
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
            Failure::new(
                kind,
                format!("receiver_url={receiver_url}: {error}; give an address of this host that is free"),
            )
        })?;
        let given = RestoreConfig { net_fds, backends, zone_updates, on_missing_backend, ..RestoreConfig::default() };
        let preparer =
            Preparer { given, events: self.events.clone(), limits: self.limits, own_files: self.own_files.clone() };
        let progress = Progress::new(MigrationRole::Receiver, "listening");
        let (control, orders) = orders::pair().map_err(host)?;
        let patience = Duration::from_secs(timeout_s.into());
        let listener = Some(listener);
        let job = ReceiveJob { listener, tls, patience, preparer, fds, progress: progress.clone(), control };
        let receiving = Receiving::begin(job).map_err(host)?;
        self.progress = Some(progress.clone());
        let (held, client, stays_paused) = (None, None, None);
        let (runs, is_local) = (false, false);
        self.live = Some(Live::Receiving { receiving, orders, progress, held, runs, is_local, client, stays_paused });
        Ok(())
    }

    /// Cancels the migration. Progress and events report the outcome.
    pub(super) fn cancel_migration(&mut self) -> Result<Reply, Failure> {
        match &self.live {
            Some(Live::Sending { is_unknown: true, .. }) => Err(conflict(
                "the guest was given to the target, and no answer came; look there, and if it does not run, resume it \
                 here (vm.resume with {\"force\": true})",
            )),
            Some(Live::Sending { sending, .. }) => {
                sending.tell(SourceNote::Cancel);
                Ok(Reply::Done)
            }
            Some(Live::Receiving { receiving, .. }) => {
                receiving.tell(TargetNote::Cancel);
                Ok(Reply::Done)
            }
            None => Err(conflict("no migration is under way")),
        }
    }

    /// Progress of the current or last migration.
    pub(super) fn migration_progress(&self) -> Result<Reply, Failure> {
        let nothing = || Failure::new(ErrorKind::NotFound, "there has been no migration");
        self.progress.as_ref().map(|progress| json(&progress.shown())).ok_or_else(nothing)
    }

    /// Forces a resume although the target's state is unknown.
    pub(super) fn force_resume(&mut self) -> Option<Reply> {
        match &self.live {
            Some(Live::Sending { sending, is_unknown: true, .. }) => {
                sending.tell(SourceNote::Force);
                Some(Reply::Done)
            }
            _ => None,
        }
    }

    /// Handles the end of the VM during an outgoing migration.
    pub(super) fn end_sending(&mut self) {
        match &self.live {
            // With an unknown outcome, no reply is pending.
            Some(Live::Sending { is_unknown: true, .. }) => self.live = None,
            Some(Live::Sending { sending, .. }) => {
                sending.tell(SourceNote::GuestOff);
                // Cancels a paused guest's migration as well, unless Go was sent.
                sending.tell(SourceNote::Cancel);
            }
            _ => {}
        }
    }

    /// True if a reset requested by the guest is left to the side that owns it after the migration.
    pub(super) fn holds_guest(&self) -> bool {
        match (&self.live, self.instance.as_ref().and_then(Instance::vm)) {
            (Some(Live::Sending { is_stopped: true, .. }), _) => true,
            (Some(Live::Sending { .. }), Some(vm)) => vm.awaits_reset(),
            _ => false,
        }
    }

    /// Fails an outgoing migration whose VM has lost a device.
    pub(super) fn changed_while_sending(&self, what: &str) {
        if let Some(Live::Sending { sending, .. }) = &self.live {
            sending.tell(SourceNote::Changed(format!("{what}; send the VM again")));
        }
    }

    /// Performs the requests of the migration thread.
    pub(super) fn migrate(&mut self) -> Result<Next, Error> {
        match self.live.take() {
            Some(live @ Live::Sending { .. }) => self.follow_source(live),
            Some(live @ Live::Receiving { .. }) => {
                self.follow_target(live);
                Ok(Next::On)
            }
            None => Ok(Next::On),
        }
    }

    fn follow_source(&mut self, live: Live) -> Result<Next, Error> {
        let Live::Sending { sending, orders, progress, runs, mut is_stopped, mut is_unknown, mut stays_paused } = live
        else {
            return Ok(Next::On);
        };
        while let Some(order) = orders.take() {
            match order {
                SourceOrder::FindWriters => {
                    let vm = self.instance.as_ref().and_then(Instance::vm);
                    let (holds, drivers) = vm.map(|vm| (vm.holds(), vm.devices().drivers())).unwrap_or_default();
                    sending.tell(SourceNote::Writers(self.find_writers(), holds, drivers));
                }
                SourceOrder::Slow(is_slow) => {
                    self.guest_mut().into_iter().for_each(|vm| vm.slow(is_slow));
                }
                SourceOrder::Stop => {
                    is_stopped = true;
                    sending.tell(SourceNote::Stopped(self.stop_guest()));
                }
                SourceOrder::Resume => {
                    is_stopped = false;
                    stays_paused = self.resume_guest(runs).err();
                }
                SourceOrder::GiveUp => {
                    let vm = self.instance.as_mut().and_then(Instance::give_up);
                    sending.tell(SourceNote::GivenUp(vm.map(Box::new)));
                }
                SourceOrder::Pass(number) => {
                    self.events.tell(Source::Vm, "migration-memory-iteration", &[("id", &number.to_string())]);
                }
                SourceOrder::Report(Outcome::Unknown, why) => {
                    is_unknown = true;
                    progress.end(Outcome::Unknown, why.clone());
                    self.report(Outcome::Unknown, why.as_deref(), "migration-unknown");
                }
                SourceOrder::Report(outcome, why) => {
                    let why =
                        [why, stays_paused.take()].into_iter().flatten().reduce(|why, more| format!("{why}; {more}"));
                    if outcome != Outcome::Finished {
                        self.give_links_back();
                    }
                    let event = if outcome == Outcome::Finished { "migration-finished" } else { "migration-failed" };
                    self.report(outcome, why.as_deref(), event);
                    drop(sending);
                    let next = self.sent(outcome);
                    // Set last: a client that sees the end also sees its effects.
                    progress.end(outcome, why);
                    return next;
                }
            }
        }
        self.live = Some(Live::Sending { sending, orders, progress, runs, is_stopped, is_unknown, stays_paused });
        Ok(Next::On)
    }

    /// Handles the end of a migration. If the target runs the guest, releases it and exits.
    fn sent(&mut self, outcome: Outcome) -> Result<Next, Error> {
        if outcome != Outcome::Finished {
            return Ok(Next::On);
        }
        // The VM was handed over and is closed.
        self.events.vm("shutdown");
        if self.no_shutdown {
            self.instance = None;
            return Ok(Next::On);
        }
        Ok(Next::End)
    }

    fn stop_guest(&mut self) -> Result<Stopped, String> {
        let vm = self.guest_mut().map_err(|_| "the guest shut down".to_string())?;
        let began = Instant::now();
        vm.pause_in_time().map_err(|error| error.to_string())?;
        let stop = began.elapsed();
        let machine = vm.save_machine().map_err(|error| error.to_string())?;
        let stateful = vm.devices().memory_users().stateful();
        Ok(Stopped { machine: Box::new(machine), holds: vm.holds(), stateful, stop })
    }

    /// Resumes a guest that ran.
    ///
    /// # Errors
    ///
    /// Fails with the reason why the guest stays paused.
    fn resume_guest(&mut self, runs: bool) -> Result<(), String> {
        let Some(vm) = self.instance.as_mut().and_then(Instance::vm_mut).filter(|_| runs) else { return Ok(()) };
        vm.resume().map_err(|error| {
            let why = format!("the VM stays paused after its migration failed: {error}; resume it with vm.resume");
            log::error!("{why}");
            why
        })
    }

    fn follow_target(&mut self, live: Live) {
        let Live::Receiving { receiving, orders, progress, mut held, mut runs, mut is_local, client, stays_paused } =
            live
        else {
            return;
        };
        let mut stays_paused = stays_paused;
        while let Some(order) = orders.take() {
            match order {
                TargetOrder::Accepted => self.events.vm("migration-receive-started"),
                TargetOrder::Load { restored, fds, runs: ran, is_local: is_passed } => {
                    (runs, is_local) = (ran, is_passed);
                    let loaded = self.load(*restored, fds);
                    let (instance, said) = match loaded {
                        Ok(instance) => {
                            let holds = instance.vm().map(Vm::holds).unwrap_or_default();
                            (Some(instance), Ok(holds))
                        }
                        Err(error) => (None, Err(error.to_string())),
                    };
                    held = instance;
                    receiving.tell(TargetNote::Loaded(said));
                }
                TargetOrder::Start => {
                    let started = self.start_received(held.take(), runs, is_local);
                    let started = started.map(|paused| stays_paused = paused).map_err(|error| error.to_string());
                    receiving.tell(TargetNote::Started(started));
                }
                TargetOrder::Discard => {
                    held = None;
                    self.instance = None;
                }
                TargetOrder::Report(outcome, why) => {
                    // Spare threads that no driver needed.
                    threads::end_spares();
                    let is_here = outcome == Outcome::Finished;
                    let event = if is_here { "migration-receive-finished" } else { "migration-receive-failed" };
                    self.report(outcome, why.as_deref(), event);
                    progress.end(outcome, why.clone().or_else(|| stays_paused.clone()));
                    if let Some(client) = client {
                        client.answer(received(outcome, why, stays_paused));
                    }
                    return;
                }
            }
        }
        self.live = Some(Live::Receiving { receiving, orders, progress, held, runs, is_local, client, stays_paused });
    }

    /// Restores the machine, paused as at the source.
    fn load(&mut self, restored: Restored, fds: Vec<OwnedFd>) -> Result<Box<Instance>, Error> {
        // The thread that opened it may have confined itself.
        landlock::follow()?;
        Ok(Box::new(Instance::restored(restored, fds, self.events.clone(), self.limits)?))
    }

    /// Starts the received guest, whose locks are taken. On a failure, drops guest and locks.
    ///
    /// With the source's memory, which devices may already have changed, the guest cannot be dropped: it stays paused,
    /// and the reason is returned.
    fn start_received(
        &mut self,
        held: Option<Box<Instance>>,
        runs: bool,
        is_local: bool,
    ) -> Result<Option<String>, Error> {
        let mut instance = *held.ok_or_else(|| Error::Host {
            action: "start the received guest",
            error: std::io::Error::other("it is not there"),
        })?;
        let resumed = instance.vm_mut().filter(|_| runs).map_or(Ok(()), Vm::resume);
        let mut stays_paused = None;
        match resumed {
            Err(error) if is_local => {
                let why = format!("the received VM stays paused: {error}; resume it with vm.resume");
                log::error!("{why}");
                stays_paused = Some(why);
            }
            Ok(()) if runs => self.events.vm("resumed"),
            resumed => resumed?,
        }
        self.instance = Some(instance);
        Ok(stays_paused)
    }

    fn report(&self, outcome: Outcome, why: Option<&str>, event: &'static str) {
        let name = outcome.name();
        match why {
            Some(why) if outcome != Outcome::Finished => {
                log::warn!("the migration ended ({name}): {why}");
                self.events.tell(Source::Vm, event, &[("outcome", name), ("error", why)]);
            }
            _ => self.events.vm(event),
        }
    }
}

/// Reply to the client that waited for a guest.
fn received(outcome: Outcome, why: Option<String>, stays_paused: Option<String>) -> Result<Reply, Failure> {
    let why = || why.unwrap_or_else(|| format!("the migration ended ({})", outcome.name()));
    match (outcome, stays_paused) {
        (Outcome::Finished, None) => Ok(Reply::Done),
        (Outcome::Finished, Some(why)) => Err(Failure::new(ErrorKind::Host, why)),
        (Outcome::Cancelled, _) => Err(conflict(why()).in_context(NOT_RECEIVED)),
        _ => Err(Failure::new(ErrorKind::Host, why()).in_context(NOT_RECEIVED)),
    }
}
