//! Backends: implementations that run a device's queues, or the sources and sinks of a NIC's frames.

mod absent;
mod doorbell_page;
mod health;
mod iotlb;
mod mapping;
mod memory_user;
mod queue_runner;
mod shared_log;
mod tap;
mod vdpa;
mod vhost_common;
mod vhost_net;
mod vhost_user;

pub use absent::Absent;
pub use doorbell_page::{DOORBELL_PAGE, DoorbellPage, DoorbellPages};
pub(crate) use health::Health;
pub use health::{BackendChange, BackendObserver};
pub(crate) use memory_user::MemoryMailbox;
pub use memory_user::MemoryUser;
pub use queue_runner::{Ability, Attention, BackendKind, QueueRun, QueueRunner, RunnerError, RunnerQueue};
pub(crate) use queue_runner::{LOG, StartError};
pub use shared_log::SharedLog;
pub use tap::{
    InterfaceNameError, PassedTap, Tap, TapError, TapHandle, TapQueue, TapSpec, check_interface_name, is_network_mask,
    tap_name,
};
pub(crate) use tap::{Successor, TapSearch};
pub use vdpa::{Locking, Vdpa, VdpaError, VdpaFault, VdpaSpec};
pub use vhost_net::{VhostKernel, VhostNet, VhostNetError};
#[cfg(any(test, feature = "testing"))]
pub use vhost_user::VhostUserSteps;
pub use vhost_user::{
    Cancel, MAX_DEVICE_STATE, VhostUser, VhostUserError, VhostUserRole, VhostUserSocket, VhostUserSpec,
};
pub(crate) use vhost_user::{DEVICE_FEATURES, MAX_CONFIG, RING_FEATURES};
