//! Commands of a migration thread to the control thread, which stops, saves, restores and starts the guest for it.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::time::Instant;

use sd_notify::NotifyState;

use crate::api::{Failure, Reply};
use crate::control::ControlLoop;
use crate::control::active_migration::{ActiveMigration, IncomingMigration, NOT_RECEIVED, OutgoingMigration, conflict};
use crate::control::instance::Instance;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::migration::commands::{SourceCommand, SourceReply, StoppedGuest, TargetCommand, TargetReply};
use crate::migration::handover::Outcome;
use crate::migration::progress::Progress;
use crate::snapshot::restorer::Restored;
use crate::telemetry::events::Source;
use crate::threads;
use crate::vm::Vm;

impl ControlLoop {
    /// Performs the commands of the migration thread.
    pub(super) fn run_migration_commands(&mut self) -> Result<ControlFlow<()>, Error> {
        match self.live.take() {
            Some(ActiveMigration::Outgoing(sent)) => self.run_source_commands(sent),
            Some(ActiveMigration::Incoming(received)) => {
                self.run_target_commands(received);
                Ok(ControlFlow::Continue(()))
            }
            None => Ok(ControlFlow::Continue(())),
        }
    }

    fn run_source_commands(&mut self, mut sent: OutgoingMigration) -> Result<ControlFlow<()>, Error> {
        while let Some(command) = sent.commands.take() {
            match command {
                SourceCommand::FindWriters => {
                    let vm = self.instance.as_ref().and_then(Instance::vm);
                    let (locks, drivers) =
                        vm.map(|vm| (vm.storage_locks(), vm.devices().drivers())).unwrap_or_default();
                    sent.thread.send(SourceReply::Writers(self.find_writers(), locks, drivers));
                }
                SourceCommand::Throttle(is_held) => {
                    self.guest_mut().into_iter().for_each(|vm| vm.slow(is_held));
                }
                SourceCommand::StopGuest => {
                    sent.is_stopped = true;
                    // From here on only the side that has the guest removes them.
                    sent.sockets.iter().for_each(|socket| socket.own(false));
                    sent.thread.send(SourceReply::Stopped(self.stop_guest()));
                }
                SourceCommand::ResumeGuest => {
                    sent.is_stopped = false;
                    sent.sockets.iter().for_each(|socket| socket.own(true));
                    sent.stays_paused = self.resume_guest(sent.runs).err();
                }
                SourceCommand::ReleaseGuest => {
                    let vm = self.instance.as_mut().and_then(Instance::give_up);
                    sent.thread.send(SourceReply::GuestReleased(vm.map(Box::new)));
                }
                SourceCommand::PassStarted(number) => {
                    self.events.tell(Source::Vm, "migration-memory-iteration", &[("id", &number.to_string())]);
                }
                SourceCommand::Report(Outcome::Unknown, why) => {
                    sent.is_unknown = true;
                    sent.progress.end(Outcome::Unknown, why.clone());
                    self.report(Outcome::Unknown, why.as_deref(), "migration-unknown");
                }
                SourceCommand::Report(outcome, why) => return self.end_outgoing(sent, outcome, why),
            }
        }
        self.live = Some(ActiveMigration::Outgoing(sent));
        Ok(ControlFlow::Continue(()))
    }

    /// Handles the end of an outgoing migration. If the target runs the guest, exits.
    fn end_outgoing(
        &mut self,
        sent: OutgoingMigration,
        outcome: Outcome,
        why: Option<String>,
    ) -> Result<ControlFlow<()>, Error> {
        let OutgoingMigration { thread, progress, stays_paused, sockets, away, .. } = sent;
        let why = [why, stays_paused].into_iter().flatten().reduce(|why, more| format!("{why}; {more}"));
        if outcome != Outcome::Finished {
            // The source stopped the guest without resuming it if it could not lock its disks again.
            sockets.iter().for_each(|socket| socket.own(true));
            self.restore_links();
        }
        match outcome {
            Outcome::Finished => self.report_sent(&progress),
            outcome => self.report(outcome, why.as_deref(), "migration-failed"),
        }
        drop(thread);
        let next = self.release(outcome, away.as_deref());
        // Set last: a client that sees the end also sees its effects.
        progress.end(outcome, why);
        next
    }

    /// Releases a guest that the target runs, and exits. `away` is the target's address, unless it is on this host.
    fn release(&mut self, outcome: Outcome, away: Option<&str>) -> Result<ControlFlow<()>, Error> {
        if outcome != Outcome::Finished {
            return Ok(ControlFlow::Continue(()));
        }
        // The VM was handed over and is closed.
        self.events.vm("shutdown");
        if let Some(target) = away {
            notify_moved(target);
        }
        if self.no_shutdown {
            self.instance = None;
            return Ok(ControlFlow::Continue(()));
        }
        self.followers.end();
        Ok(ControlFlow::Break(()))
    }

    fn stop_guest(&mut self) -> Result<StoppedGuest, String> {
        let vm = self.guest_mut().map_err(|_| "the guest shut down".to_string())?;
        let began = Instant::now();
        vm.pause_in_time().map_err(|error| error.to_string())?;
        let stop = began.elapsed();
        let mut machine = vm.save_machine().map_err(|error| error.to_string())?;
        let (stateful, locks) = (vm.devices().memory_users().stateful(), vm.storage_locks());
        machine.guest_vfs = self.instance.as_ref().map(Instance::saved_guest_settings).unwrap_or_default();
        Ok(StoppedGuest { machine: Box::new(machine), locks, stateful, stop })
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

    fn run_target_commands(&mut self, mut received: IncomingMigration) {
        while let Some(command) = received.commands.take() {
            match command {
                TargetCommand::Accepted => self.events.vm("migration-receive-started"),
                TargetCommand::LoadState { restored, fds, runs, is_local } => {
                    (received.runs, received.is_local) = (runs, is_local);
                    let (instance, loaded) = match self.load(*restored, fds) {
                        Ok(instance) => {
                            let locks = instance.vm().map(Vm::storage_locks).unwrap_or_default();
                            (Some(instance), Ok(locks))
                        }
                        Err(error) => (None, Err(error.to_string())),
                    };
                    received.restored = instance;
                    received.thread.send(TargetReply::Loaded(loaded));
                }
                TargetCommand::StartGuest => {
                    let started = self.start_received(received.restored.take(), received.runs, received.is_local);
                    let started = started.map(|paused| received.stays_paused = paused);
                    received.thread.send(TargetReply::Started(started.map_err(|error| error.to_string())));
                }
                TargetCommand::DiscardGuest => {
                    received.restored = None;
                    self.instance = None;
                }
                TargetCommand::Report(outcome, why) => return self.end_incoming(received, outcome, why),
            }
        }
        self.live = Some(ActiveMigration::Incoming(received));
    }

    /// Handles the end of an incoming migration, and replies to the client.
    fn end_incoming(&self, received: IncomingMigration, outcome: Outcome, why: Option<String>) {
        // Spare threads that no driver needed.
        threads::end_spares();
        let is_here = outcome == Outcome::Finished;
        if is_here {
            self.report_received(&received.progress);
        } else {
            self.report(outcome, why.as_deref(), "migration-receive-failed");
        }
        received.progress.end(outcome, why.clone().or_else(|| received.stays_paused.clone()));
        if let Some(client) = received.client {
            client.answer(reply(outcome, why, received.stays_paused));
        }
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
        restored: Option<Box<Instance>>,
        runs: bool,
        is_local: bool,
    ) -> Result<Option<String>, Error> {
        let mut instance = *restored.ok_or_else(|| Error::Host {
            action: "start the received guest",
            error: std::io::Error::other("no guest was received"),
        })?;
        let resumed = instance.vm_mut().filter(|_| runs).map_or(Ok(()), Vm::resume);
        if resumed.is_ok() || is_local {
            instance.vm().into_iter().flat_map(Vm::sockets).for_each(|socket| socket.own(true));
        }
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
        self.set_instance(instance);
        Ok(stays_paused)
    }

    /// Continues with a VM, which is on this host, whatever moved away before.
    pub(super) fn set_instance(&mut self, instance: Instance) {
        self.instance = Some(instance);
        notify(NotifyState::Status(""));
    }

    /// Reports a migration whose guest runs here. An older source does not send the time of its stop.
    fn report_received(&self, progress: &Progress) {
        let shown = progress.shown();
        let downtime_us = shown.downtime.map(|parts| parts.total_us.to_string());
        let bytes = shown.transferred_bytes.to_string();
        let properties = [("downtime_us", downtime_us.as_deref().unwrap_or("unknown")), ("bytes", &bytes)];
        self.events.tell(Source::Vm, "migration-receive-finished", &properties);
    }

    /// Reports a migration whose target runs the guest.
    fn report_sent(&self, progress: &Progress) {
        let shown = progress.shown();
        let downtime_us = shown.downtime.map(|parts| parts.total_us.to_string()).unwrap_or_default();
        let [passes, bytes] = [shown.pass.into(), shown.transferred_bytes].map(|number: u64| number.to_string());
        let properties = [("downtime_us", downtime_us.as_str()), ("passes", &passes), ("bytes", &bytes)];
        self.events.tell(Source::Vm, "migration-finished", &properties);
    }

    fn report(&self, outcome: Outcome, why: Option<&str>, event: &'static str) {
        let name = outcome.name();
        match why {
            Some(why) if outcome != Outcome::Finished => {
                log::warn!("vm: the migration ended ({name}): {why}");
                self.events.tell(Source::Vm, event, &[("outcome", name), ("error", why)]);
            }
            _ => self.events.vm(event),
        }
    }
}

/// Reply to the client that waited for a guest.
fn reply(outcome: Outcome, why: Option<String>, stays_paused: Option<String>) -> Result<Reply, Failure> {
    let why = || why.unwrap_or_else(|| format!("the migration ended ({})", outcome.name()));
    match (outcome, stays_paused) {
        (Outcome::Finished, None) => Ok(Reply::Done),
        (Outcome::Finished, Some(why)) => Err(Failure::new(ErrorKind::Host, why)),
        (Outcome::Cancelled, _) => Err(conflict(why()).in_context(NOT_RECEIVED)),
        _ => Err(Failure::new(ErrorKind::Host, why()).in_context(NOT_RECEIVED)),
    }
}

/// Sends the service manager a status that names the address of the `target`, which runs the guest from now on. The
/// units of `contrib/systemd` do not start a VM with this status again.
fn notify_moved(target: &str) {
    // A line's end would begin another notification.
    let target = target.replace(char::is_control, " ");
    notify(NotifyState::Status(&format!("the guest moved away to {target}")));
}

/// Sends the service manager a state. Does nothing without one.
fn notify(state: NotifyState<'_>) {
    let _ = sd_notify::notify(&[state]);
}
