//! The way from clients, which are many threads, to the one that has the virtual machine.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::api::{Action, Failure, FailureKind, Handler, Reply};

/// What a client asks for, and where it waits for the answer.
pub struct Request {
    action: Action,
    reply: SyncSender<Result<Reply, Failure>>,
}

impl Request {
    /// Does what the client asks for by `apply`, and answers it, if it has not gone.
    pub fn serve(self, apply: impl FnOnce(Action) -> Result<Reply, Failure>) {
        let _ = self.reply.send(apply(self.action));
    }
}

/// The clients' end.
pub struct Control {
    requests: Sender<Request>,
    wake: Arc<EventFd>,
}

/// The end of the thread that has the virtual machine.
pub struct Requests {
    requests: Receiver<Request>,
    wake: Arc<EventFd>,
}

/// Both ends.
///
/// # Errors
///
/// When there is no file descriptor left.
pub fn pair() -> io::Result<(Control, Requests)> {
    let (sender, receiver) = channel();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    Ok((Control { requests: sender, wake: Arc::clone(&wake) }, Requests { requests: receiver, wake }))
}

impl Handler for Control {
    fn handle(&self, action: Action) -> Result<Reply, Failure> {
        let (reply, answer) = sync_channel(1);
        let gone = || Failure::new(FailureKind::Internal, "the VMM is shutting down");
        self.requests.send(Request { action, reply }).map_err(|_| gone())?;
        // A full counter has woken it already.
        let _ = self.wake.write(1);
        answer.recv().map_err(|_| gone())?
    }
}

impl Requests {
    /// Readable when there is something to take.
    pub fn event(&self) -> &EventFd {
        &self.wake
    }

    /// The next request, if there is one.
    pub fn take(&self) -> Option<Request> {
        let _ = self.wake.read();
        let request = self.requests.try_recv().ok()?;
        // There may be another.
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
    fn a_request_that_waits_behind_another_is_told_of() {
        let (control, requests) = pair().unwrap();
        let (reply, _answer) = sync_channel(2);
        for _ in 0..2 {
            control.requests.send(Request { action: Action::Ping, reply: reply.clone() }).unwrap();
        }
        control.wake.write(1).unwrap();
        assert!(requests.take().is_some());
        assert_eq!(requests.event().read().unwrap(), 1);
        requests.event().write(1).unwrap();
        assert!(requests.take().is_some() && requests.take().is_none());
        assert!(requests.event().read().is_err());
    }

    #[test]
    fn a_client_is_told_when_nobody_answers_any_more() {
        let (control, requests) = pair().unwrap();
        drop(requests);
        assert_eq!(control.handle(Action::Ping).unwrap_err().kind, FailureKind::Internal);
    }
}
