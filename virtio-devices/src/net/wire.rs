//! The backend of a NIC: a tap, a queue runner, the port of a switch, or none while it is missing.

use super::carrier::PortHandle;
use crate::backend::{Absent, QueueRunner, Tap, Vdpa, VhostNet, VhostUser};

/// A NIC's backend.
pub enum Backend {
    /// A tap, whose frames the NIC's own workers move.
    Tap(Tap),
    /// A backend that runs the NIC's queues itself.
    Runner(Box<dyn QueueRunner>),
    /// The port of a switch, whose workers move the frames of all its ports.
    Switch(PortHandle),
    /// None: it is missing.
    Absent(Absent),
}

impl From<Absent> for Backend {
    fn from(backend: Absent) -> Self {
        Self::Absent(backend)
    }
}

impl From<Tap> for Backend {
    fn from(tap: Tap) -> Self {
        Self::Tap(tap)
    }
}

impl From<PortHandle> for Backend {
    fn from(port: PortHandle) -> Self {
        Self::Switch(port)
    }
}

impl From<VhostNet> for Backend {
    fn from(backend: VhostNet) -> Self {
        Self::Runner(Box::new(backend))
    }
}

impl From<VhostUser> for Backend {
    fn from(backend: VhostUser) -> Self {
        Self::Runner(Box::new(backend))
    }
}

impl From<Vdpa> for Backend {
    fn from(backend: Vdpa) -> Self {
        Self::Runner(Box::new(backend))
    }
}
