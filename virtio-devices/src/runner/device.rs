//! What differs between the devices whose backends run their queues.

use super::progress::Progress;
use crate::backend::{QueueRunner, RunnerError};
use crate::net_protocol::Offloads;

/// The part of the work that depends on the kind of device. It is called on the worker's thread.
pub(crate) trait RunnerDevice {
    /// How far the driver's queues have come. It outlives the worker, until a reset.
    fn progress(&self) -> &Progress;

    /// Whether the host wants the queues to run: a NIC's link is up.
    fn is_wanted(&self) -> bool {
        true
    }

    /// The pairs of queues that the driver uses. A device that is no NIC uses all that it has.
    fn active_pairs(&self) -> u16 {
        u16::MAX
    }

    /// The offloaded frames that the driver takes.
    fn offloads(&self) -> Offloads {
        Offloads::empty()
    }

    /// Something that the driver reads in the device configuration has changed.
    fn changed(&self);

    /// Takes over the device configuration that the backend has now. Returns whether the driver has to be told.
    fn take_config(&self, _config: &[u8]) -> bool {
        false
    }

    /// Whether the driver sees a lost backend in the device configuration.
    fn shows_loss(&self) -> bool {
        false
    }

    /// Does what is left for the device to do in a turn of the worker, such as commands of a control queue. Returns
    /// whether there may be more.
    ///
    /// # Errors
    ///
    /// When the backend is lost.
    fn serve(&mut self, backend: &mut (dyn QueueRunner + 'static)) -> Result<bool, RunnerError>;

    /// The worker was woken.
    fn count_kick(&mut self) {}

    /// A ring is invalid.
    fn count_broken_ring(&mut self) {}
}
