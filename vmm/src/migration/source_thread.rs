//! The source's thread, which performs the actions of the source's state machine. The control thread changes the VM;
//! other threads read from the target and send pages.
//!
//! | file | what it is |
//! |---|---|
//! | `phases` | the phases in order, with the action that starts each |
//! | `steps` | the actions |
//! | `dispatch` | the messages, and the event that follows from each |
//! | `connection` | connections to the target |
//! | `memory_copy` | copy of guest memory, with `passes`, `throttle` and `pages_out` |
//! | `guest_handover` | description and state of the guest, and its disk locks |
//! | `limits` | time limits of phases |
//! | `message` | messages to the source's thread |

mod connection;
mod dispatch;
mod guest_handover;
mod limits;
mod memory_copy;
mod message;
mod pages_out;
mod passes;
mod phases;
mod steps;
#[cfg(test)]
mod tests;
mod throttle;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use rustls::ClientConfig;
use virtio_devices::{Cancel, GuestMap};
use vm_api::migration::SendMigration;

use super::commands::{CommandSender, SourceCommand, SourceReply};
use super::event_loop::{EventLoop as _, PhaseTimer, TICK};
use super::handle::MigrationHandle;
use super::handover::source::{Event, Phase, SourceMachine};
use super::progress::Progress;
use super::report::Report;
use super::transport::Address;
use crate::lazy_memory::discarded::Discarded;
use crate::threads::ThreadKind;
use connection::TargetConnection;
use guest_handover::GuestHandover;
use limits::Limits;
use memory_copy::MemoryCopy;
use message::{SourceMessage, Tasks};

/// Parameters of an outgoing migration.
pub(crate) struct SourceParams {
    /// Request of the client.
    pub config: SendMigration,
    /// Address of the target.
    pub address: Address,
    /// TLS identity of the source, if connections are encrypted.
    pub tls: Option<Arc<ClientConfig>>,
    /// Serialized offer.
    pub offer: Vec<u8>,
    /// Descriptors to pass instead of copying, for a target on the same host.
    pub passed: Option<Vec<OwnedFd>>,
    /// The guest's memory.
    pub memory: GuestMap,
    /// Persistent memory that is not sent, and must be unwritten.
    pub discarded: Discarded,
    /// Progress of the migration.
    pub progress: Progress,
    /// Commands to the control thread.
    pub control: CommandSender<SourceCommand>,
}

/// Handle to an outgoing migration.
pub(crate) type SourceHandle = MigrationHandle<SourceReply>;

impl SourceHandle {
    /// Starts the migration.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(crate) fn start(params: SourceParams) -> io::Result<Self> {
        let run = |cancel, own, messages| MigrationSource::new(params, cancel, own, messages).run();
        Self::spawn(SourceMessage::Control, run)
    }
}

/// State of the source's thread.
struct MigrationSource {
    config: SendMigration,
    machine: SourceMachine,
    timer: PhaseTimer,
    limits: Limits,
    control: CommandSender<SourceCommand>,
    messages: Receiver<SourceMessage>,
    connection: TargetConnection,
    copy: MemoryCopy,
    handover: GuestHandover,
    report: Report,
    // Dropped after the connections, whose end ends some of the tasks.
    tasks: Tasks,
    /// True once the program exits.
    quits: bool,
}

impl MigrationSource {
    fn new(
        params: SourceParams,
        cancel: Cancel,
        own: Sender<SourceMessage>,
        messages: Receiver<SourceMessage>,
    ) -> Self {
        let SourceParams { config, address, tls, offer, passed, memory, discarded, progress, control } = params;
        let copy = MemoryCopy::new(&config, memory, discarded);
        progress.set_memory(copy.size());
        Self {
            machine: SourceMachine::new(),
            timer: PhaseTimer::new(&progress, None),
            limits: Limits::new(&config, copy.size()),
            control,
            messages,
            connection: TargetConnection::new(&config, address, tls, passed, cancel),
            copy,
            handover: GuestHandover::new(offer),
            report: Report::new(progress),
            tasks: Tasks::new(own),
            quits: false,
            config,
        }
    }

    fn run(mut self) {
        match self.copy.check_discarded() {
            Ok(()) => self.connection.connect(&mut self.tasks),
            Err(why) => self.fail(why, Event::Failed),
        }
        while !self.machine.is_over() && !self.quits {
            let wait = self.throttle();
            match self.messages.recv_timeout(wait) {
                Ok(message) => self.on_message(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.tick();
        }
        if self.machine.phase() == Phase::Finished {
            self.close_guest();
        }
        if let Some((outcome, why)) = self.report.take_last() {
            self.tasks.wait();
            // Drops a log that was started late here, rather than when the control thread waits for this one.
            while self.messages.try_recv().is_ok() {}
            self.control.send(SourceCommand::Report(outcome, why));
        }
    }

    /// Closes the VM of a guest that has moved. The kernel takes long for that, longer with more memory, while the
    /// control thread must serve clients.
    fn close_guest(&mut self) {
        let memory = self.copy.take_memory();
        while !self.quits {
            match self.messages.recv() {
                Ok(SourceMessage::Control(SourceReply::GuestReleased(vm))) => {
                    return self.tasks.drop_later(ThreadKind::Open, (vm, memory));
                }
                Ok(SourceMessage::Control(SourceReply::Quit)) => self.quits = true,
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Throttles the vCPUs by the share that the policy asks for. Returns how long to wait before the next check.
    fn throttle(&mut self) -> Duration {
        let (change, time) = self.copy.throttle(self.machine.phase() == Phase::Copying);
        if let Some(is_held) = change {
            self.control.send(SourceCommand::Throttle(is_held));
        }
        time.map_or(TICK, |time| time.min(TICK))
    }

    /// Sends keepalives, and checks for a silent target and for deadlines.
    fn tick(&mut self) {
        let Some(is_dead) = self.connection.is_dead() else { return };
        if is_dead && self.machine.phase() < Phase::Unknown {
            self.fail("the target no longer responds".to_string(), Event::Disconnected);
        } else if self.timer.has_expired() {
            let why = match self.machine.phase() {
                Phase::Copying => self.too_slow(),
                phase => format!("the target or this host took too long ({})", phase.name()),
            };
            self.fail(why, Event::TimedOut);
        }
    }

    /// Error for a copy that has reached its timeout.
    fn too_slow(&self) -> String {
        if self.copy.passes.count() > 1 {
            return self.too_fast();
        }
        let time = self.config.timeout_s;
        format!("after timeout_s={time}, the memory has not been copied once: the target receives it too slowly")
    }

    /// Error for a guest that writes faster than its memory is copied.
    fn too_fast(&self) -> String {
        let SendMigration { timeout_s, downtime_ms, .. } = self.config;
        let rate = self.copy.passes.dirty_rate() >> 20;
        format!(
            "after timeout_s={timeout_s}, the guest still writes {rate} MiB/s, too fast for downtime_ms={downtime_ms}"
        )
    }

    /// Handles a failure. The first one is the reported reason.
    fn fail(&mut self, why: String, event: Event) {
        if !self.machine.is_over() {
            self.report.fail_with(why);
        }
        self.on(event);
    }
}
