//! Steps of the target, one for each action of its state machine. Each returns its event if the result is immediate.

use super::{MigrationTarget, QUITS};
use crate::migration::commands::TargetCommand;
use crate::migration::handover::Outcome;
use crate::migration::handover::target::{Event, Phase};
use crate::migration::wire::{Frame, Kind};

impl MigrationTarget {
    pub(super) fn stop_listening(&mut self) -> Option<Event> {
        // The listening thread accepts no other source, and ends once this one has all its connections.
        if self.machine.phase() == Phase::Ended {
            self.connection.stop_listening();
        }
        None
    }

    pub(super) fn send_greeting(&mut self) -> Option<Event> {
        self.connection.send_greeting().err().map(|_| Event::Disconnected)
    }

    pub(super) fn prepare_vm(&mut self) -> Option<Event> {
        let (fd_passing, cancel) = (self.connection.fd_passing(), self.connection.cancel().clone());
        self.guest.prepare(fd_passing, cancel, &mut self.tasks);
        None
    }

    pub(super) fn send(&mut self, kind: Kind) -> Option<Event> {
        let frame = match kind {
            Kind::Prepared => Frame::Prepared,
            Kind::Ready => Frame::Ready,
            Kind::Cancel => Frame::Cancel,
            Kind::Running => Frame::Running(u64::try_from(self.guest.since_go().as_micros()).unwrap_or(u64::MAX)),
            _ => Frame::Failed(self.report.error().unwrap_or_else(|| "the target failed".to_string())),
        };
        // Without the frame, the source detects the failure itself, or leaves the guest paused (`Outcome::Unknown`).
        self.connection.send(&frame);
        None
    }

    pub(super) fn load_state(&mut self) -> Option<Event> {
        self.memory.end();
        if self.guest.load_backends(&mut self.tasks) { None } else { self.load_machine() }
    }

    /// Commands the control thread to load the machine.
    pub(super) fn load_machine(&mut self) -> Option<Event> {
        let Some(load) = self.guest.take_load() else { return Some(Event::Failed) };
        self.control.send(load);
        None
    }

    pub(super) fn take_locks(&mut self) -> Option<Event> {
        self.guest.take_locks(&mut self.tasks);
        None
    }

    pub(super) fn start_guest(&mut self) -> Option<Event> {
        if self.quits {
            self.report.override_error(QUITS.to_string());
            return Some(Event::NotStarted);
        }
        self.control.send(TargetCommand::StartGuest);
        None
    }

    pub(super) fn close(&mut self) -> Option<Event> {
        self.connection.close();
        self.memory.close();
        self.connection.stop_listening();
        None
    }

    pub(super) fn report(&mut self, outcome: Outcome) -> Option<Event> {
        // Sent later, so that the control thread waits for no background thread.
        self.report.keep(outcome);
        None
    }

    pub(super) fn discard_guest(&mut self) -> Option<Event> {
        self.connection.cancel().cancel();
        self.guest.discard();
        self.control.send(TargetCommand::DiscardGuest);
        None
    }
}
