//! The queue of actions from the API's threads to the control thread.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::api::{Action, Failure, Handler, Reply};
use crate::control::action_log;
use crate::error_kind::ErrorKind;

/// An action, and the channel for its reply.
pub(crate) struct PendingAction {
    action: Action,
    reply: SyncSender<Result<Reply, Failure>>,
}

impl PendingAction {
    pub(crate) const fn action(&self) -> &Action {
        &self.action
    }

    /// Applies the action and sends the reply, unless the client has disconnected.
    pub(crate) fn serve(self, apply: impl FnOnce(Action) -> Result<Reply, Failure>) {
        let _ = self.reply.send(apply(self.action));
    }

    /// Splits into the action, and the client to reply to later.
    pub(crate) fn split(self) -> (Action, WaitingClient) {
        (self.action, WaitingClient(self.reply))
    }
}

/// A client that waits for a reply. Dropping this reports that the program exits.
pub(crate) struct WaitingClient(SyncSender<Result<Reply, Failure>>);

impl WaitingClient {
    /// Sends the reply, unless the client has disconnected.
    pub(crate) fn answer(self, reply: Result<Reply, Failure>) {
        let _ = self.0.send(reply);
    }
}

/// Sending end, for API threads.
pub(crate) struct ActionSender {
    actions: Sender<PendingAction>,
    wake: Arc<EventFd>,
}

/// Receiving end, for the control thread.
pub(crate) struct ActionQueue {
    actions: Receiver<PendingAction>,
    wake: Arc<EventFd>,
}

/// Creates both ends.
///
/// # Errors
///
/// Fails if no file descriptor is left.
pub(crate) fn pair() -> io::Result<(ActionSender, ActionQueue)> {
    let (sender, receiver) = channel();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    Ok((ActionSender { actions: sender, wake: Arc::clone(&wake) }, ActionQueue { actions: receiver, wake }))
}

impl Handler for ActionSender {
    fn handle(&self, action: Action) -> Result<Reply, Failure> {
        let change = action_log::begin(&action);
        let outcome = self.perform(action);
        action_log::end(change.as_deref(), &outcome);
        outcome
    }
}

impl ActionSender {
    fn perform(&self, action: Action) -> Result<Reply, Failure> {
        let (reply, answer) = sync_channel(1);
        let gone = || Failure::new(ErrorKind::Host, "the VMM is shutting down");
        self.actions.send(PendingAction { action, reply }).map_err(|_| gone())?;
        // A full eventfd has woken the control thread already.
        let _ = self.wake.write(1);
        answer.recv().map_err(|_| gone())?
    }
}

impl ActionQueue {
    /// Returns an eventfd that is readable when actions may be queued.
    pub(crate) fn event(&self) -> &EventFd {
        &self.wake
    }

    /// Returns the next action, if any.
    pub(crate) fn take(&self) -> Option<PendingAction> {
        let _ = self.wake.read();
        let request = self.actions.try_recv().ok()?;
        // Keep the eventfd readable: more may be queued.
        let _ = self.wake.write(1);
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_gets_the_answer_to_its_own_request() {
        let (control, requests) = pair().unwrap();
        let control = Arc::new(control);
        let ask = |action: fn() -> Action| {
            let control = Arc::clone(&control);
            std::thread::spawn(move || control.handle(action()))
        };
        let (ping, info) = (ask(|| Action::Ping), ask(|| Action::Info));
        let mut served = 0;
        while served < 2 {
            let Some(request) = requests.take() else {
                std::thread::yield_now();
                continue;
            };
            served += 1;
            request.serve(|action| Ok(Reply::Json(format!("{action:?}"))));
        }
        assert_eq!(ping.join().unwrap(), Ok(Reply::Json("Ping".to_string())));
        assert_eq!(info.join().unwrap(), Ok(Reply::Json("Info".to_string())));
    }

    #[test]
    fn a_request_that_waits_behind_another_is_signalled() {
        let (control, requests) = pair().unwrap();
        let (reply, _answer) = sync_channel(2);
        for _ in 0..2 {
            control.actions.send(PendingAction { action: Action::Ping, reply: reply.clone() }).unwrap();
        }
        control.wake.write(1).unwrap();
        assert!(requests.take().is_some());
        assert_eq!(requests.event().read().unwrap(), 1);
        requests.event().write(1).unwrap();
        assert!(requests.take().is_some() && requests.take().is_none());
        assert!(requests.event().read().is_err());
    }

    #[test]
    fn a_client_gets_an_error_once_the_control_thread_has_ended() {
        let (control, requests) = pair().unwrap();
        drop(requests);
        assert_eq!(control.handle(Action::Ping).unwrap_err().kind, ErrorKind::Host);
    }
}
