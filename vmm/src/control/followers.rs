//! Clients that follow a migration's progress. They learn its end before the program exits: otherwise they would see
//! their connection closed, and not know whether the target has the guest.

use std::time::{Duration, Instant};

/// A client that has asked for the progress within this time follows it.
const FOLLOWS: Duration = Duration::from_secs(10);
/// The longest wait for the next request of one of them.
pub(super) const LINGERS: Duration = Duration::from_secs(10);
/// The wait for those of others after that: some may ask often, and one for the end.
pub(super) const LINGERS_ON: Duration = Duration::from_secs(1);

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

    /// True if a client waits for the end.
    pub(super) fn wait(&self) -> bool {
        self.wait
    }

    /// Records that the program exits because the target has the guest.
    pub(super) fn end(&mut self) {
        self.wait = self.asked.is_some_and(|asked| asked.elapsed() < FOLLOWS);
    }
}
