//! Where a NIC's frames come from and go to.

mod doorbell_page;
mod health;
mod offload;
mod tap;
mod vdpa;
mod vhost_common;
mod vhost_net;
mod vhost_user;

pub use doorbell_page::{DOORBELL_PAGE, DoorbellPage, DoorbellPages};
pub use health::{BackendChange, BackendObserver, Health};
pub use offload::{Ability, Attention, Offload, OffloadError, OffloadQueue, OffloadRun, StartError};
pub use tap::{InterfaceNameError, Offloads, Tap, TapError, TapQueue, TapSpec, check_interface_name, is_network_mask};
pub use vdpa::{Locking, Vdpa, VdpaError, VdpaFault, VdpaSpec};
pub use vhost_net::{VhostKernel, VhostNet, VhostNetError};
pub use vhost_user::{VhostUser, VhostUserError, VhostUserSocket, VhostUserSpec};

/// A NIC's backend.
pub enum Backend {
    /// A tap, whose frames the NIC's own workers carry.
    Tap(Tap),
    /// One that runs the NIC's queues by itself.
    Offload(Box<dyn Offload>),
}

impl From<Tap> for Backend {
    fn from(tap: Tap) -> Self {
        Self::Tap(tap)
    }
}

/// What a NIC's backend is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// A tap whose frames this process carries.
    Tap,
    /// A tap whose frames the host's kernel carries.
    VhostNet,
    /// Another process, over a socket.
    VhostUser,
    /// A vDPA device of the host.
    Vdpa,
}
