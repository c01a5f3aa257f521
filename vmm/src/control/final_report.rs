//! The end of a migration, reported to a client that follows its progress before the program exits. Otherwise the
//! client would see its connection end, and not know whether the target has the guest.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_devices::borrow_eventfd as borrow;

use super::ControlLoop;
use crate::api::{Action, Failure};
use crate::error_kind::ErrorKind;

/// A client that has asked for the progress within this time follows it.
const FOLLOWS: Duration = Duration::from_secs(2);
/// The longest wait for its next request.
const LINGERS: Duration = Duration::from_secs(2);

/// The clients that follow a migration's progress.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Followers {
    /// Time of the last request for the progress.
    asked: Option<Instant>,
    /// True if one waits for the end of a migration that ends the program.
    wait: bool,
}

impl Followers {
    /// Records a request for the progress.
    pub(super) fn ask(&mut self) {
        self.asked = Some(Instant::now());
    }

    /// Records that the program exits because the target has the guest.
    pub(super) fn end(&mut self) {
        self.wait = self.asked.is_some_and(|asked| asked.elapsed() < FOLLOWS);
    }
}

impl ControlLoop {
    /// Answers the next request for the progress, if a client follows it. Called once the guest's resources are
    /// released, before the API ends.
    pub(super) fn report_end(&mut self) {
        let end = Instant::now() + LINGERS;
        while self.followers.wait {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(timeout) = Timespec::try_from(left) else { return };
            let mut fds = [PollFd::from_borrowed_fd(borrow(self.actions.event()), PollFlags::IN)];
            // If this fails (a signal), the queue is checked and the wait is repeated.
            let _ = poll(&mut fds, Some(&timeout));
            match self.actions.take() {
                Some(pending) if matches!(pending.action(), Action::MigrationProgress) => {
                    pending.serve(|_| self.migration_progress());
                    return;
                }
                Some(pending) => {
                    pending.serve(|_| Err(Failure::new(ErrorKind::Host, "the VMM is shutting down")));
                }
                None if left.is_zero() => return,
                None => {}
            }
        }
    }
}
