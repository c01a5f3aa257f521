//! Steps of the source, one for each action of its state machine. Each returns its event if the result is immediate.

use std::io;

use virtio_devices::StorageLocks;

use super::MigrationSource;
use super::message::SourceMessage;
use crate::migration::commands::SourceCommand;
use crate::migration::handover::Outcome;
use crate::migration::handover::source::Event;
use crate::migration::precopy::Decision;
use crate::migration::progress::Part;
use crate::migration::wire::{Frame, Kind};

impl MigrationSource {
    pub(super) fn send_greeting(&mut self) -> Option<Event> {
        let sent = self.connection.send_greeting();
        self.connection_lost(sent)
    }

    pub(super) fn send_offer(&mut self) -> Option<Event> {
        let offer = self.handover.take_offer();
        let sent = self.connection.send_document(Frame::Offer, &offer, &self.timer);
        self.connection_lost(sent)
    }

    fn connection_lost(&mut self, sent: io::Result<()>) -> Option<Event> {
        let error = sent.err()?;
        self.report.fail_with(format!("the connection to the target: {error}"));
        Some(Event::Disconnected)
    }

    pub(super) fn start_logs(&mut self) -> Option<Event> {
        if self.config.local {
            // Passed memory is not copied.
            return Some(Event::Copied(Decision::StopGuest));
        }
        self.control.send(SourceCommand::FindWriters);
        None
    }

    pub(super) fn copy_pass(&mut self) -> Option<Event> {
        // The first pass starts with the logs.
        if self.copy.passes.count() > 0 {
            self.send_pages();
        }
        None
    }

    /// Starts a pass over the memory.
    pub(super) fn send_pages(&mut self) {
        if let Some(number) = self.copy.start_pass() {
            self.control.send(SourceCommand::PassStarted(number));
        }
    }

    pub(super) fn stop_guest(&mut self) -> Option<Event> {
        self.report.start_downtime();
        self.control.send(SourceCommand::StopGuest);
        None
    }

    pub(super) fn send_final_pass(&mut self) -> Option<Event> {
        if self.config.local {
            // Takes the path of a completed pass.
            self.tasks.post(SourceMessage::PassSent(Ok(0)));
            return None;
        }
        // All writers are stopped: this is the last collection.
        if let Err(error) = self.copy.passes.collect() {
            self.report.fail_with(error.to_string());
            return Some(Event::Failed);
        }
        self.send_pages();
        None
    }

    pub(super) fn release_locks(&mut self) -> Option<Event> {
        self.report.end_part(Part::Load, None);
        let release = if self.config.local { StorageLocks::pass } else { StorageLocks::release };
        self.handover.with_disks(release, SourceMessage::LocksReleased, &mut self.tasks);
        None
    }

    pub(super) fn send_go(&mut self) -> Option<Event> {
        let is_unsent = self.connection.send_go(self.report.stopped_us()).err()?;
        Some(if is_unsent { Event::GoNotSent } else { Event::Disconnected })
    }

    pub(super) fn close(&mut self) -> Option<Event> {
        self.connection.close();
        self.copy.close();
        None
    }

    pub(super) fn release_guest(&mut self) -> Option<Event> {
        self.report.end_downtime();
        self.control.send(SourceCommand::ReleaseGuest);
        None
    }

    pub(super) fn report(&mut self, outcome: Outcome) -> Option<Event> {
        if self.machine.is_over() {
            // Sent after the background threads have ended, so that the control thread waits for no disk. See `run`.
            self.report.keep(outcome);
        } else {
            let (outcome, why) = self.report.with_error(outcome);
            self.control.send(SourceCommand::Report(outcome, why));
        }
        None
    }

    pub(super) fn send_failure(&mut self, kind: Kind) -> Option<Event> {
        let why = self.report.error().unwrap_or_else(|| "the source failed".to_string());
        let frame = if kind == Kind::Cancel { Frame::Cancel } else { Frame::Failed(why) };
        // Without the frame, the target detects the end itself.
        let _ = self.connection.send(&frame);
        None
    }

    pub(super) fn stop_logs(&mut self) -> Option<Event> {
        self.stop_throttling();
        self.copy.stop_log(&mut self.tasks);
        None
    }

    pub(super) fn take_locks(&mut self) -> Option<Event> {
        self.handover.with_disks(StorageLocks::take, SourceMessage::LocksTaken, &mut self.tasks);
        None
    }

    pub(super) fn resume_guest(&mut self) -> Option<Event> {
        self.stop_throttling();
        self.control.send(SourceCommand::ResumeGuest);
        None
    }

    fn stop_throttling(&mut self) {
        if let (Some(is_held), _) = self.copy.throttle(false) {
            self.control.send(SourceCommand::Throttle(is_held));
        }
    }
}
