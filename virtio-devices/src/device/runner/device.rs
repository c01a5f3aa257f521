//! The differences between the devices whose backends run their queues.

use super::progress::Progress;
use crate::backend::{QueueRunner, RunnerError};
use crate::frames::net_protocol::Offloads;

/// The part of the work that depends on the kind of device. Called on the worker's thread.
pub(crate) trait RunnerDevice {
    /// The progress of the driver's queues. It outlives the worker, until a reset.
    fn progress(&self) -> &Progress;

    /// True if the host allows the queues to run: a NIC's link is up.
    fn is_wanted(&self) -> bool {
        true
    }

    /// The pairs of queues that the driver uses. A device other than a NIC uses all of them.
    fn active_pairs(&self) -> u16 {
        u16::MAX
    }

    /// The offloaded frames that the driver accepts.
    fn offloads(&self) -> Offloads {
        Offloads::empty()
    }

    /// Records a change of the device configuration.
    fn changed(&self);

    /// Takes over the backend's device configuration. Returns true if the driver must be notified.
    fn take_config(&self, _config: &[u8]) -> bool {
        false
    }

    /// True if the driver sees a lost backend in the device configuration.
    fn shows_loss(&self) -> bool {
        false
    }

    /// Does the device's part of a turn of the worker, such as commands of a control queue. Returns true if there may
    /// be more.
    ///
    /// # Errors
    ///
    /// Fails if the backend is lost.
    fn serve(&mut self, backend: &mut (dyn QueueRunner + 'static)) -> Result<bool, RunnerError>;

    /// Counts a wake-up of the worker.
    fn count_kick(&mut self) {}

    /// Counts an invalid ring.
    fn count_broken_ring(&mut self) {}
}
