//! A port's NIC, as the switch sees it while the port's queues run.

use std::sync::Arc;

use crate::DmaSpace;
use crate::net::{NetCounters, NetState, PolicyCell, Shared};

/// The parts of a NIC that the switch uses, whatever its rings are.
pub(crate) struct PortNic {
    /// The guest's memory, by the addresses of the NIC's function.
    pub memory: DmaSpace,
    /// The state that the driver changes at run time.
    pub state: Arc<NetState>,
    /// The policy in force.
    pub policy: Arc<PolicyCell>,
    /// The counters.
    pub counters: Arc<NetCounters>,
    /// Notifies the driver that the link has changed.
    pub tell_link: Box<dyn Fn() + Send + Sync>,
    /// Decides on frames to a group that the receive filter lets through, if the filter knows groups less exactly than
    /// the driver has set them.
    pub wants_address: Option<AddressFilter>,
}

/// True if the driver wants the frames to an address.
pub(crate) type AddressFilter = Box<dyn Fn([u8; 6]) -> bool + Send + Sync>;

impl PortNic {
    /// The NIC of a virtio driver's start.
    pub(crate) fn of_virtio(shared: &Shared) -> Self {
        let interrupts = Arc::clone(&shared.interrupts);
        Self {
            memory: shared.memory.clone(),
            state: Arc::clone(&shared.state),
            policy: Arc::clone(&shared.policy),
            counters: Arc::clone(&shared.counters),
            tell_link: Box::new(move || interrupts.signal_config()),
            wants_address: None,
        }
    }
}
