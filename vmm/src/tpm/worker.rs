//! The thread that forwards the guest's commands to swtpm, so that no vCPU waits for it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;

use crate::tpm::crb::CrbDevice;
use crate::tpm::error::TpmError;
use crate::tpm::order::Order;
use crate::tpm::swtpm::Swtpm;

/// State of the thread.
pub(super) struct Worker {
    /// The TPM.
    pub swtpm: Swtpm,
    /// The registers.
    pub device: Arc<CrbDevice>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
}

impl Worker {
    /// Serves requests until it must exit.
    pub(super) fn run(mut self) {
        let mut failures: u64 = 0;
        let mut complain = |error: &dyn std::fmt::Display| {
            failures += 1;
            // The guest can repeat the cause.
            if failures.is_power_of_two() {
                log::warn!("{error} ({failures} so far); the guest's TPM fails until it restarts");
            }
        };
        loop {
            match self.device.take_order() {
                Order::None => self.wait(&[]),
                Order::Command(command) => {
                    let response = self.execute(&command).inspect_err(|error| complain(error));
                    if !matches!(response, Ok(None)) {
                        self.device.answer(response.ok().flatten().as_deref());
                    }
                }
                Order::Reset => {
                    // A failed swtpm may be back.
                    let reset = if self.swtpm.is_lost() { self.swtpm.reconnect() } else { Ok(()) };
                    if let Err(error) = reset.and_then(|()| self.swtpm.power_on()) {
                        complain(&error);
                    }
                }
                Order::End => return self.swtpm.shut_down(),
            }
        }
    }

    /// Executes a command and returns the response; `None` if another request interrupted it.
    fn execute(&mut self, command: &[u8]) -> Result<Option<Vec<u8>>, TpmError> {
        self.swtpm.send(command)?;
        while !self.swtpm.has_response()? {
            if self.device.is_urgent() {
                // The command may take minutes. Closing the connection also drops its response.
                self.swtpm.give_up();
                return Ok(None);
            }
            if self.device.take_cancelled() {
                self.swtpm.cancel()?;
            }
            self.wait(&[self.swtpm.data().as_fd()]);
        }
        self.swtpm.receive().map(Some)
    }

    /// Waits for a request, or until one of `others` is readable.
    fn wait(&self, others: &[BorrowedFd<'_>]) {
        // SAFETY: the eventfd stays open while it is borrowed.
        let kick = unsafe { BorrowedFd::borrow_raw(self.kick.as_raw_fd()) };
        let mut fds: Vec<_> =
            others.iter().copied().chain([kick]).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // After an error (a signal, no memory), the caller checks again.
        let _ = poll(&mut fds, None);
        let _ = self.kick.read();
    }
}
