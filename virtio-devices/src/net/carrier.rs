//! The interface of a carrier: it moves the frames of several NICs with its own threads.

use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::counters::NetCounters;
use super::enforced::PolicyCell;
use super::pass::Shared;
use super::state::NetState;
use crate::frames::net_protocol::Offloads;
use crate::frames::policy::Replaced;
use crate::state::{BucketState, HeldAddress, StateError};
use crate::{SharedQueue, Worker};

/// The data of a NIC that others need, whether or not its driver runs.
#[derive(Clone)]
pub(crate) struct CarriedNic {
    /// The state that the driver changes at run time. A reset creates a new one.
    pub state: Arc<NetState>,
    /// The policy in force.
    pub policy: Arc<PolicyCell>,
    /// The counters.
    pub counters: Arc<NetCounters>,
}

/// The carrier's end of a NIC.
///
/// Methods that are called on a vCPU wait at most for one frame in progress.
pub(crate) trait Carrier: Send + Sync {
    /// The name that users know.
    fn name(&self) -> &str;

    /// The offloaded frames that it carries.
    fn offloads(&self) -> Offloads;

    /// The MTU that its NICs should have, in bytes.
    fn mtu(&self) -> Option<u16>;

    /// The limit in Mbit/s of its uplink, which its NICs share, if there is one.
    fn rate(&self) -> Option<NonZeroU32>;

    /// Makes the links of its NICs current while no thread of it runs.
    fn look(&self);

    /// Attaches the NIC, also again after a reset. Called on a vCPU.
    fn attach(&self, nic: CarriedNic);

    /// Detaches the NIC.
    fn detach(&self);

    /// Carries the frames of these queues from now on. Called on a vCPU.
    ///
    /// # Errors
    ///
    /// Fails if the host has no eventfd or thread left. Nothing is started then.
    fn open(&self, shared: &Arc<Shared>, queues: &[(u16, SharedQueue)]) -> io::Result<Worker>;

    /// Applies a change by the host of the NIC's policy, link or address. It applies to all frames once the caller has
    /// waited for the returned handle.
    fn changed(&self) -> Replaced;

    /// Makes the NIC's link follow the uplink, if there is one, or stay up while that is down. Called on a vCPU.
    fn follow_uplink(&self, follows: bool);

    /// Makes all frames wait in their queues, or ends that: while ports stop or start one after the other, no frame may
    /// meet one that has stopped already or not started yet. Waits for frames in progress.
    fn hold_frames(&self, held: bool);

    /// The addresses on a switch that the NIC's driver has set, with numbers that define the first of several owners.
    fn save_addresses(&self) -> Vec<HeldAddress>;

    /// Restores the addresses of [`Self::save_addresses`], until the driver removes them.
    fn restore_addresses(&self, addresses: &[HeldAddress]);

    /// The NIC's debt in a limit that several NICs share; `None` if there is none.
    fn save_share(&self) -> Option<BucketState>;

    /// Restores the debt of [`Self::save_share`].
    ///
    /// # Errors
    ///
    /// Fails if there is no such limit, or the debt is impossible.
    fn restore_share(&self, share: Option<BucketState>) -> Result<(), StateError>;
}

/// A port of a [`Switch`](crate::Switch), for one NIC, which has the port until this is dropped.
pub struct PortHandle(Box<dyn Carrier>);

impl PortHandle {
    /// A handle over `carrier`, for a NIC.
    pub(crate) fn new(carrier: impl Carrier + 'static) -> Self {
        Self(Box::new(carrier))
    }

    /// The carrier's end.
    pub(crate) fn carrier(&self) -> &dyn Carrier {
        &*self.0
    }
}

impl Drop for PortHandle {
    fn drop(&mut self) {
        self.0.detach();
    }
}

impl fmt::Debug for PortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PortHandle").field(&self.0.name()).finish()
    }
}
