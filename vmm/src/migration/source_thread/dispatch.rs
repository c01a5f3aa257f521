//! Messages to the source's thread, and the events that follow from them.

use std::io;

use super::MigrationSource;
use super::guest_handover::GuestHandover;
use super::memory_copy::MemoryCopy;
use super::message::SourceMessage;
use crate::dirty::{DirtyLog, DirtySource};
use crate::migration::commands::{SourceReply, StoppedGuest};
use crate::migration::control_channel::PeerMessage;
use crate::migration::event_loop::EventLoop as _;
use crate::migration::handover::source::{Event, Phase};
use crate::migration::precopy::Decision;
use crate::migration::progress::Part;
use crate::migration::transport::{Route, Stream};
use crate::migration::wire::{Frame, Greeting, Kind};
use crate::threads::ThreadKind;

impl MigrationSource {
    pub(super) fn on_message(&mut self, message: SourceMessage) {
        let phase = self.machine.phase();
        match message {
            SourceMessage::Control(reply) => self.on_reply(reply),
            SourceMessage::Target(message) => self.on_target(message),
            SourceMessage::Connected(connected) => self.on_connected(connected),
            // The phase has ended since.
            SourceMessage::PageConnections(_) | SourceMessage::DescriptorsPassed(_) if phase != Phase::Greeting => {}
            SourceMessage::PageConnections(Ok(streams)) => self.on_page_connections(streams),
            SourceMessage::PageConnections(Err(why)) => {
                self.fail(format!("a connection for pages: {why}"), Event::Failed);
            }
            SourceMessage::DescriptorsPassed(Ok(stream)) => {
                self.connection.keep(stream);
                self.on(Event::Greeted);
            }
            SourceMessage::DescriptorsPassed(Err(why)) => {
                self.fail(format!("the connection for descriptors: {why}"), Event::Failed);
            }
            SourceMessage::LogStarted(log) => self.on_log(log),
            SourceMessage::PassSent(Ok(sent)) => self.on_pass_sent(sent),
            SourceMessage::PassSent(Err(why)) => self.fail(why, Event::Disconnected),
            SourceMessage::DisksFlushed(Ok(())) if phase == Phase::Copying => self.send_pages(),
            SourceMessage::DisksFlushed(Ok(())) => {}
            SourceMessage::DisksFlushed(Err(why)) | SourceMessage::BackendsSaved(Err(why)) => {
                self.fail(why, Event::Failed);
            }
            SourceMessage::BackendsSaved(Ok(states)) => {
                self.handover.set_backends(states);
                self.on_saved();
            }
            SourceMessage::LocksReleased(Ok(())) => self.on(Event::Released),
            SourceMessage::LocksReleased(Err(why)) => self.fail(why, Event::NotReleased),
            SourceMessage::LocksTaken(Ok(())) => self.on(Event::Locked),
            SourceMessage::LocksTaken(Err(why)) => self.on_locks_refused(&why),
        }
    }

    fn on_target(&mut self, message: PeerMessage) {
        match message {
            PeerMessage::Greeting(greeting) => match greeting.common_version() {
                Ok(_) if self.connection.is_reply(&greeting) => self.on_greeting(greeting),
                Ok(_) => self.fail("the target replied to another source".to_string(), Event::Failed),
                Err(error) => self.fail(error.to_string(), Event::Failed),
            },
            PeerMessage::Frame(Frame::Failed(line)) => {
                self.fail(format!("the target: {line}"), Event::Frame(Kind::Failed));
            }
            PeerMessage::Frame(Frame::Cancel) => {
                self.fail("cancelled at the target (vm.cancel-migration)".to_string(), Event::Frame(Kind::Cancel));
            }
            PeerMessage::Frame(frame) => self.on_frame(frame.kind()),
            PeerMessage::Offer(_) => self.on_frame(Kind::Offer),
            PeerMessage::State(_) => self.on_frame(Kind::State),
            PeerMessage::Disconnected(why) => {
                let is_greeting = self.machine.phase() == Phase::Greeting;
                let hint = if is_greeting { self.connection.tls_hint() } else { "" };
                self.fail(format!("{why}{hint}"), Event::Disconnected);
            }
        }
    }

    fn on_frame(&mut self, kind: Kind) {
        self.report.note_error(format!("the target sent {kind:?} out of turn"));
        self.on(Event::Frame(kind));
    }

    fn on_reply(&mut self, reply: SourceReply) {
        if matches!(reply, SourceReply::Quit) {
            self.quits = true;
            return;
        }
        // Any other message ends the migration, but only after connecting: reporting the end waits for all threads, and
        // name resolution cannot be interrupted.
        let Some(reply) = self.connection.defer(reply) else { return };
        match reply {
            SourceReply::Writers(Ok(writers), locks, drivers) => {
                self.copy.passes.expect(self.connection.rtt(), drivers);
                self.handover.set_storage(locks);
                self.on_writers(writers);
            }
            SourceReply::Stopped(Ok(stopped)) => self.on_stopped(stopped),
            SourceReply::Writers(Err(why), ..) | SourceReply::Stopped(Err(why)) | SourceReply::Changed(why) => {
                self.fail(why, Event::Failed);
            }
            SourceReply::Cancel => self.fail("cancelled (vm.cancel-migration)".to_string(), Event::Cancelled),
            SourceReply::Force => {
                self.report.set_lock_error(None);
                self.on(Event::Forced);
            }
            SourceReply::GuestOff => self.fail("the guest shut down".to_string(), Event::GuestOff),
            // Handled in `close_guest` and above.
            SourceReply::GuestReleased(_) | SourceReply::Quit => {}
        }
    }

    fn on_connected(&mut self, connected: Result<(Route, Stream), String>) {
        if let Some(reply) = self.connection.end_connecting() {
            return self.on_reply(reply);
        }
        let opened = connected.and_then(|(route, stream)| {
            self.connection.open_channel(route, stream, &self.tasks).map_err(|error| error.to_string())
        });
        match opened {
            Ok(()) => self.on(Event::Connected),
            Err(why) => {
                let url = &self.config.destination_url;
                self.fail(format!("destination_url={url}: {why}"), Event::Disconnected);
            }
        }
    }

    fn on_greeting(&mut self, greeting: Greeting) {
        if let Err(why) = self.connection.open_others(greeting, &mut self.timer, &mut self.tasks) {
            self.fail(why, Event::Failed);
        }
    }

    fn on_page_connections(&mut self, streams: Vec<Stream>) {
        match self.copy.open(streams, &self.report.progress, &self.tasks) {
            Ok(()) => self.on(Event::Greeted),
            Err(error) => self.fail(format!("a connection for pages: {error}"), Event::Failed),
        }
    }

    /// Starts the dirty log. With no writers, all memory is sent in the final pass.
    fn on_writers(&mut self, writers: Vec<Box<dyn DirtySource>>) {
        if self.machine.phase() != Phase::Copying {
            return;
        }
        if writers.is_empty() {
            return self.on(Event::Copied(Decision::StopGuest));
        }
        MemoryCopy::start_log(writers, &mut self.tasks);
    }

    /// The dirty log is on; starts the passes unless the migration was cancelled.
    fn on_log(&mut self, log: Result<DirtyLog, String>) {
        match log {
            Ok(log) if self.machine.phase() == Phase::Copying => {
                self.copy.passes.begin(log);
                self.send_pages();
            }
            Ok(log) => self.tasks.drop_later(ThreadKind::Migration, log),
            Err(why) => self.fail(why, Event::Failed),
        }
    }

    /// Counts a connection that has sent its share of a pass, and ends the pass after the last one.
    fn on_pass_sent(&mut self, sent: u64) {
        let is_last = self.copy.passes.sent(sent);
        match self.machine.phase() {
            Phase::Copying if is_last => self.end_pass(),
            Phase::Finishing if is_last => self.send_state(),
            _ => {}
        }
    }

    /// Ends a pass while the guest runs.
    fn end_pass(&mut self) {
        let decision = match self.copy.passes.passed(&self.report.progress) {
            Ok(decision) => decision,
            Err(error) => return self.fail(error.to_string(), Event::Failed),
        };
        match decision {
            Decision::Fail => {
                let why = self.too_fast();
                self.fail(why, Event::Copied(decision));
            }
            // Flushes the guest's disks while it still runs, to keep the host's writes out of the downtime. Another
            // pass sends the pages that the guest writes until then.
            Decision::StopGuest if self.handover.flush_once(&mut self.tasks) => {}
            _ => self.on(Event::Copied(decision)),
        }
    }

    fn on_stopped(&mut self, stopped: StoppedGuest) {
        if let Err(why) = self.copy.check_discarded() {
            return self.fail(why, Event::Failed);
        }
        self.report.end_part(Part::Stop, Some(stopped.stop));
        let backends = self.handover.keep(stopped);
        if backends.is_empty() {
            return self.on_saved();
        }
        GuestHandover::save_backends(backends, &mut self.tasks);
    }

    fn on_saved(&mut self) {
        self.report.end_part(Part::Save, None);
        self.on(Event::Stopped);
    }

    /// Sends the state, after the last page.
    fn send_state(&mut self) {
        let Some(state) = self.handover.take_state(self.copy.passes.count()) else { return };
        let bytes = state.bytes().map_err(io::Error::from);
        match bytes.and_then(|bytes| self.connection.send_document(Frame::State, &bytes, &self.timer)) {
            Ok(()) => {
                self.report.end_part(Part::Send, None);
                self.on(Event::Sent);
            }
            Err(error) => self.fail(format!("the state cannot be sent: {error}"), Event::Failed),
        }
    }

    /// Keeps the guest paused, because another program locks its disk locks.
    fn on_locks_refused(&mut self, error: &str) {
        self.report.set_lock_error(Some(format!(
            "the guest stays paused: its disk locks could not be taken back: {error}; then resume it (vm.resume)"
        )));
        self.on(Event::NotLocked);
    }
}
