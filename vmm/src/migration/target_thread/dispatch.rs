//! Messages to the target's thread, and the events that follow from them.

use std::sync::Arc;

use vm_memory::GuestAddressSpace as _;

use super::listening::Connected;
use super::message::TargetMessage;
use super::preparer::PreparedVm;
use super::{MigrationTarget, QUITS};
use crate::migration::commands::{TargetCommand, TargetReply};
use crate::migration::control_channel::PeerMessage;
use crate::migration::event_loop::EventLoop as _;
use crate::migration::handover::target::{Event, Phase};
use crate::migration::loader::Loader;
use crate::migration::offer::FinalState;
use crate::migration::progress::Part;
use crate::migration::transport::Stream;
use crate::migration::wire::{Frame, Greeting, Kind};
use crate::threads::no_thread;

impl MigrationTarget {
    pub(super) fn on_message(&mut self, message: TargetMessage) {
        let phase = self.machine.phase();
        match message {
            TargetMessage::Control(reply) => self.on_reply(reply),
            TargetMessage::Source(message) => self.on_source(message),
            TargetMessage::Connected(Connected::Control(stream, greeting)) => self.on_connected(stream, greeting),
            TargetMessage::Connected(Connected::Pages(_, stream)) if self.connection.is_local() => {
                self.on_passing(stream);
            }
            TargetMessage::Connected(Connected::Pages(index, stream)) => {
                self.memory.add(index, stream);
                self.receive_pages();
            }
            TargetMessage::Connected(Connected::Failed(why)) => self.fail(why, Event::Failed),
            TargetMessage::Prepared(Ok(vm)) => self.on_prepared(vm),
            TargetMessage::Prepared(Err(why)) | TargetMessage::BackendsLoaded(Err(why)) => {
                self.fail(why, Event::Failed);
            }
            TargetMessage::PassReceived(Ok(())) => self.check_received(),
            // The receiving threads have been ended.
            TargetMessage::PassReceived(Err(_)) if phase >= Phase::Loading => {}
            TargetMessage::PassReceived(Err(why)) => self.fail(why, Event::Disconnected),
            TargetMessage::BackendsLoaded(Ok(())) if phase == Phase::Loading => {
                if let Some(event) = self.load_machine() {
                    self.on(event);
                }
            }
            TargetMessage::BackendsLoaded(Ok(())) => {}
            TargetMessage::LocksTaken(Ok(())) => self.on(Event::Locked),
            TargetMessage::LocksTaken(Err(why)) => self.fail(why, Event::NotLocked),
        }
    }

    fn on_source(&mut self, message: PeerMessage) {
        match message {
            PeerMessage::Offer(offer) => {
                self.guest.set_offer(offer);
                self.check_offered();
            }
            PeerMessage::State(state) => match FinalState::read(&state) {
                Ok(state) if self.machine.phase() == Phase::Receiving => {
                    self.guest.set_state(state);
                    self.check_received();
                }
                Ok(_) => self.fail("the source sent its state too early".to_string(), Event::Failed),
                Err(error) => self.fail(error.to_string(), Event::Failed),
            },
            PeerMessage::Frame(Frame::Failed(line)) => {
                self.fail(format!("the source: {line}"), Event::Frame(Kind::Failed));
            }
            PeerMessage::Frame(Frame::Cancel) => {
                self.fail("cancelled at the source".to_string(), Event::Frame(Kind::Cancel));
            }
            PeerMessage::Frame(frame) => {
                if let Frame::Go(stopped_us) = frame {
                    self.guest.set_stopped(stopped_us);
                }
                self.report.note_error(format!("the source sent {:?} out of turn", frame.kind()));
                self.on(Event::Frame(frame.kind()));
            }
            PeerMessage::Greeting(_) => self.fail("the source greeted twice".to_string(), Event::Failed),
            PeerMessage::Disconnected(why) => self.fail(why, Event::Disconnected),
        }
    }

    fn on_reply(&mut self, reply: TargetReply) {
        match reply {
            TargetReply::Loaded(Ok(locks)) => {
                self.guest.set_storage(locks);
                self.on(Event::Loaded);
            }
            TargetReply::Loaded(Err(why)) => self.fail(why, Event::Failed),
            TargetReply::Started(Ok(())) => {
                if let Some(downtime) = self.guest.downtime() {
                    self.report.progress.add_downtime(Part::Handover, self.guest.since_go());
                    self.report.progress.set_downtime(downtime);
                }
                self.on(Event::Started);
            }
            TargetReply::Started(Err(why)) => self.fail(why, Event::NotStarted),
            TargetReply::Cancel => self.fail("cancelled (vm.cancel-migration)".to_string(), Event::Cancelled),
            TargetReply::Quit => {
                // Pending lock attempts finish before the guest's end is certain.
                self.quits = true;
                self.fail(QUITS.to_string(), Event::NotStarted);
            }
        }
    }

    /// Starts the control channel to a source that has sent its greeting.
    fn on_connected(&mut self, stream: Stream, greeting: Greeting) {
        self.control.send(TargetCommand::Accepted);
        match self.connection.open_channel(stream, greeting, &self.tasks) {
            Ok(()) => {
                self.on(Event::Accepted);
                self.on(Event::Greeted);
            }
            Err(error) => self.fail(no_thread(&error), Event::Failed),
        }
    }

    /// Accepts the connection for descriptors, which are received once the offer has announced them.
    fn on_passing(&mut self, stream: Stream) {
        if !self.connection.set_passing(stream) {
            return self.fail("the source passes descriptors twice".to_string(), Event::Failed);
        }
        self.check_offered();
    }

    /// Continues once the offer is complete, and with it the connection for descriptors, if any.
    fn check_offered(&mut self) {
        if self.guest.has_offer() && (self.connection.fd_passing().is_some() || !self.connection.is_local()) {
            self.on(Event::Offered);
        }
    }

    /// Starts receiving pages for the created VM.
    fn on_prepared(&mut self, vm: Box<PreparedVm>) {
        if self.machine.phase() != Phase::Preparing {
            return;
        }
        let loader = Arc::new(Loader::new((*vm.vm.memory().memory()).clone()));
        self.report.progress.set_memory(loader.size());
        self.memory.set_memory(loader, self.connection.page_connections());
        self.guest.set_vm(vm);
        self.receive_pages();
        self.on(Event::Prepared);
    }

    /// Starts receiving on waiting connections, once there is memory.
    fn receive_pages(&mut self) {
        if self.guest.has_vm() {
            self.memory.start(&self.report.progress, &self.tasks);
        }
    }

    /// Continues once all pages and the state have arrived.
    fn check_received(&mut self) {
        let has_all = self.guest.passes().is_some_and(|passes| self.memory.has(passes));
        if self.machine.phase() == Phase::Receiving && has_all {
            self.on(Event::Received);
        }
    }
}
