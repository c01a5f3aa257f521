//! The target's thread, which performs the actions of the target's state machine. The control thread changes the VM;
//! other threads wait for the source, read from it, receive pages, and create the VM.
//!
//! | file | what it is |
//! |---|---|
//! | `phases` | the phases in order, with the action that starts each |
//! | `steps` | the actions |
//! | `dispatch` | the messages, and the event that follows from each |
//! | `connection` | connections from the source, with `listening` |
//! | `memory_receiver` | receipt of guest memory, with `pages_in` |
//! | `received_guest` | VM and state of the guest, and its disk locks |
//! | `preparer` | creation of the VM, with `empty_files` |
//! | `message` | messages to the target's thread |

mod connection;
mod dispatch;
mod empty_files;
pub(crate) mod listening;
mod memory_receiver;
mod message;
mod pages_in;
mod phases;
pub(crate) mod preparer;
mod received_guest;
mod steps;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use rustls::ServerConfig;
use virtio_devices::Cancel;

use super::commands::{CommandSender, TargetCommand, TargetReply};
use super::event_loop::{EventLoop as _, PhaseTimer, TICK};
use super::handle::MigrationHandle;
use super::handover::target::{Event, Phase, TargetMachine};
use super::progress::Progress;
use super::report::Report;
use super::transport::Listener;
use crate::threads::no_thread;
use connection::SourceConnection;
use memory_receiver::MemoryReceiver;
use message::{TargetMessage, Tasks};
use preparer::Preparer;
use received_guest::ReceivedGuest;

/// Reason for discarding the guest when the target's program ends.
const QUITS: &str = "the target's program ends";

/// Parameters of an incoming migration.
pub(crate) struct TargetParams {
    /// Listener for a source.
    pub listener: Option<Listener>,
    /// TLS identity of the target, if connections are encrypted.
    pub tls: Option<Arc<ServerConfig>>,
    /// Time to wait for a source.
    pub patience: Duration,
    /// Creates the VM.
    pub preparer: Preparer,
    /// Descriptors that came with the request.
    pub fds: Vec<OwnedFd>,
    /// Progress of the migration.
    pub progress: Progress,
    /// Commands to the control thread.
    pub control: CommandSender<TargetCommand>,
}

/// Handle to an incoming migration.
pub(crate) type TargetHandle = MigrationHandle<TargetReply>;

impl TargetHandle {
    /// Starts to wait for a source.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(crate) fn start(params: TargetParams) -> io::Result<Self> {
        let run = |cancel, own, messages| MigrationTarget::new(params, cancel, own, messages).run();
        Self::spawn(TargetMessage::Control, run)
    }
}

/// State of the target's thread.
struct MigrationTarget {
    machine: TargetMachine,
    timer: PhaseTimer,
    control: CommandSender<TargetCommand>,
    messages: Receiver<TargetMessage>,
    connection: SourceConnection,
    memory: MemoryReceiver,
    guest: ReceivedGuest,
    report: Report,
    // Dropped after the connections, whose end ends some of the tasks.
    tasks: Tasks,
    /// True once the control thread no longer performs commands.
    quits: bool,
}

impl MigrationTarget {
    fn new(
        params: TargetParams,
        cancel: Cancel,
        own: Sender<TargetMessage>,
        messages: Receiver<TargetMessage>,
    ) -> Self {
        let TargetParams { listener, tls, patience, preparer, fds, progress, control } = params;
        Self {
            machine: TargetMachine::new(),
            timer: PhaseTimer::new(&progress, Some(patience)),
            control,
            messages,
            connection: SourceConnection::new(listener, tls, cancel),
            memory: MemoryReceiver::default(),
            guest: ReceivedGuest::new(preparer, fds),
            report: Report::new(progress),
            tasks: Tasks::new(own),
            quits: false,
        }
    }

    fn run(mut self) {
        if let Err(error) = self.connection.listen(&self.tasks) {
            self.fail(no_thread(&error), Event::Failed);
        }
        while !self.machine.is_over() {
            match self.messages.recv_timeout(TICK) {
                Ok(message) => self.on_message(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.tick();
        }
        self.close();
        if let Some((outcome, why)) = self.report.take_last() {
            self.tasks.wait();
            self.control.send(TargetCommand::Report(outcome, why));
        }
    }

    /// Sends keepalives, and checks for a silent source and for deadlines.
    fn tick(&mut self) {
        if self.connection.is_dead() {
            self.fail("the source no longer responds".to_string(), Event::Disconnected);
        }
        if self.timer.has_expired() {
            let phase = self.machine.phase().name();
            self.fail(format!("the source took too long ({phase})"), Event::TimedOut);
        }
    }

    /// Handles a failure. The first one is the reported reason, unless a later one discards the guest after Go.
    fn fail(&mut self, why: String, event: Event) {
        if matches!(event, Event::NotLocked | Event::NotStarted) {
            self.report.override_error(why);
        } else if self.machine.phase() < Phase::Locking {
            self.report.fail_with(why);
        }
        self.on(event);
    }
}
