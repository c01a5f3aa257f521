//! What carries the frames of several NICs with threads of its own, as a NIC knows it.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::counters::NetCounters;
use super::enforced::PolicyCell;
use super::pass::Shared;
use super::state::NetState;
use crate::net_protocol::Offloads;
use crate::policy::Replaced;
use crate::state::{BucketState, HeldAddress, StateError};
use crate::{SharedQueue, Worker};

/// What others need to know of a NIC, whether its driver runs or not.
#[derive(Clone)]
pub(crate) struct CarriedNic {
    /// What the driver changes at run time. A reset makes a new one.
    pub state: Arc<NetState>,
    /// What the NIC may do.
    pub policy: Arc<PolicyCell>,
    /// Its counters.
    pub counters: Arc<NetCounters>,
}

/// The carrier's end of a NIC.
///
/// What is called on a vCPU waits for nothing, but for one frame that is on its way.
pub(crate) trait Carrier: Send + Sync {
    /// What users call it.
    fn name(&self) -> &str;

    /// The offloaded frames that it carries.
    fn offloads(&self) -> Offloads;

    /// The MTU that its NICs should have, in bytes.
    fn mtu(&self) -> Option<u16>;

    /// The NIC is there, or is as after a reset. Called on a vCPU.
    fn attach(&self, nic: CarriedNic);

    /// The NIC is no longer there.
    fn detach(&self);

    /// Carries the frames of these queues from now on. Called on a vCPU.
    ///
    /// # Errors
    ///
    /// When the host has no eventfd or thread left. Nothing has been started then.
    fn open(&self, shared: &Arc<Shared>, queues: &[(u16, SharedQueue)]) -> io::Result<Worker>;

    /// The host has changed the NIC's policy, link or address, which holds for all frames when the answer has been
    /// waited for.
    fn changed(&self) -> Replaced;

    /// Has all frames wait where they are, or no longer: ports stop or come one after the other, and no frame is to
    /// meet one that has stopped already or has not come yet. Waits for the frames that are on their way.
    fn hold_frames(&self, held: bool);

    /// The addresses that the NIC has among others by its driver's wish, with what says who of several had one first.
    fn save_addresses(&self) -> Vec<HeldAddress>;

    /// The NIC had what [`Self::save_addresses`] has said, until its driver gives it up.
    fn restore_addresses(&self, addresses: &[HeldAddress]);

    /// What the NIC owes of its share of a limit that several NICs have; `None` if it owes nothing.
    fn save_share(&self) -> Option<BucketState>;

    /// The NIC owes what [`Self::save_share`] has said.
    ///
    /// # Errors
    ///
    /// When there is no such limit, or the NIC cannot owe that.
    fn restore_share(&self, share: Option<BucketState>) -> Result<(), StateError>;
}

/// A port of a [`Switch`](crate::Switch), for one NIC. The port is the NIC's as long as this lives.
pub struct PortHandle(Box<dyn Carrier>);

impl PortHandle {
    /// What a NIC is given.
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
