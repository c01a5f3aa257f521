//! A NIC's backend: a tap, or a queue runner.

use super::queue_runner::QueueRunner;
use super::tap::Tap;

/// A NIC's backend.
pub enum Backend {
    /// A tap, whose frames the NIC's own workers carry.
    Tap(Tap),
    /// One that runs the NIC's queues by itself.
    Runner(Box<dyn QueueRunner>),
}

impl From<Tap> for Backend {
    fn from(tap: Tap) -> Self {
        Self::Tap(tap)
    }
}
