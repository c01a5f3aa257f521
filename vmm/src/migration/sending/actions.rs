//! Actions of the source's state machine.

use std::time::Instant;

use super::{Conductor, Inbox};
use crate::migration::course::Conducts;
use crate::migration::handover::Outcome;
use crate::migration::handover::sender::{Action, Event};
use crate::migration::orders::SourceOrder;
use crate::migration::precopy::Verdict;
use crate::migration::progress::Part;
use crate::migration::wire::{Frame, Kind, Role};
use virtio_devices::Holds;

impl Conducts for Conductor {
    type Event = Event;
    type Action = Action;

    fn decide(&mut self, event: Event) -> Vec<Action> {
        let before = self.machine.stage();
        let actions = self.machine.on(event);
        let stage = self.machine.stage();
        if stage != before {
            let is_rest = self.job.config.local || self.passes.count() > 0;
            self.course.enter(stage.name(), self.limits.of(stage, is_rest));
        }
        actions
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Greet => {
                let greeting = self.greeting(Role::Control);
                self.greeted = Some(Instant::now());
                let sent = self.link.as_mut().map(|link| link.greet(&greeting));
                return sent.and_then(Result::err).map(|error| self.lost(&error));
            }
            Action::Offer => {
                let offer = std::mem::take(&mut self.job.offer);
                return self.document(Frame::Offer, &offer).err().map(|error| self.lost(&error));
            }
            // Passed memory is not copied.
            Action::StartLogs if self.job.config.local => return Some(Event::Copied(Verdict::Stop)),
            Action::StartLogs => self.job.control.send(SourceOrder::FindWriters),
            Action::StopLogs => {
                self.let_go();
                let log = self.passes.end();
                self.stop_log(log);
            }
            // The first pass starts with the logs.
            Action::CopyPass if self.passes.count() == 0 => {}
            Action::CopyPass => self.send_pages(),
            Action::StopGuest => {
                let now = Instant::now();
                self.still = Some((now, now));
                self.job.control.send(SourceOrder::Stop);
            }
            Action::SendRest if self.job.config.local => {
                // Takes the path of a completed pass.
                let _ = self.own.send(Inbox::Copied(Ok(0)));
            }
            Action::SendRest => {
                // All writers are stopped: this is the last collection.
                if let Err(error) = self.passes.collect() {
                    self.course.blame(error.to_string());
                    return Some(Event::Broke);
                }
                self.send_pages();
            }
            Action::ReleaseLocks => {
                self.part(Part::Load, None);
                let release = if self.job.config.local { Holds::pass } else { Holds::release };
                self.have_done(release, Inbox::Released);
            }
            Action::SendGo => {
                let sent = self.link.as_mut().map_or(Err(true), |link| link.say_once(&Frame::Go));
                return sent.err().map(|is_unsent| if is_unsent { Event::Unsent } else { Event::Lost });
            }
            Action::Tell(kind) => {
                let why = self.told_why().unwrap_or_else(|| "the source failed".to_string());
                let frame = if kind == Kind::Cancel { Frame::Cancel } else { Frame::Failed(why) };
                // Without the frame, the target detects the end itself.
                let _ = self.link.as_mut().map(|link| link.say(&frame));
            }
            Action::HangUp => {
                self.cancel.cancel();
                (self.link, self.out, self.passing) = (None, None, None);
            }
            Action::TakeLocks => self.have_done(Holds::take, Inbox::Locked),
            Action::ResumeGuest => {
                self.let_go();
                self.job.control.send(SourceOrder::Resume);
            }
            Action::EndGuest => {
                self.part(Part::Handover, None);
                if let Some((began, last)) = self.still {
                    self.job.progress.set_downtime(last.saturating_duration_since(began));
                }
                self.job.control.send(SourceOrder::GiveUp);
            }
            Action::Report(outcome) => {
                let why = if outcome == Outcome::Finished { None } else { self.told_why() };
                // Sent after the background threads have ended, so that the control thread waits for no disk. See
                // `run`.
                match self.machine.is_over() {
                    true => self.last_word = Some((outcome, why)),
                    false => self.job.control.send(SourceOrder::Report(outcome, why)),
                }
            }
        }
        None
    }
}
