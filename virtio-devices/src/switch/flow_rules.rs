//! Rules by which the driver of an X550 drops received frames, or moves them to a queue of any function.

use std::sync::Arc;

use x550::{Counter as Statistic, FlowAction, Flows, Key, Nic, Place};

use super::frame::Frame;
use super::frame::body::Body;
use super::table::{PortIndex, Route};
use crate::net::Counter;
use crate::x550_sriov::X550Handle;

/// The first bytes of a frame, with all headers that rules compare.
const HEADERS: usize = 78;
/// Queues of a NIC.
const QUEUES: u16 = 128;

/// The rules, as they were at one time.
pub(crate) struct FlowRules {
    flows: Arc<Flows>,
    /// By queue of the NIC, the port and its receive queue, from 0.
    targets: Box<[(PortIndex, usize)]>,
    /// The PF's pool.
    pool_of_pf: u16,
    nic: X550Handle,
}

impl FlowRules {
    /// The rules of a NIC, if it has any. The PF has the pool `pool_of_pf`.
    pub(crate) fn of(handle: &X550Handle, nic: &Nic, pool_of_pf: u16) -> Option<Self> {
        let flows = nic.flows();
        if !flows.is_active() || flows.is_empty() {
            return None;
        }
        let first_of_pf = nic.pool(pool_of_pf).queues.start;
        let target = |queue: u16| match nic.owner(queue) {
            (Place::Pf, queue) => (0, queue.saturating_sub(first_of_pf).into()),
            (Place::Vf(index), queue) => (index + 1, queue.into()),
        };
        let targets = (0..QUEUES).map(target).collect();
        Some(Self { flows, targets, pool_of_pf, nic: handle.clone() })
    }

    /// Applies the rules to a frame for the function at the port of its route. The uplink is the port `uplink`.
    pub(crate) fn apply(&self, frame: &mut Frame<'_>, body: &Body<'_, '_, '_>, uplink: PortIndex) {
        let Ok(Route::One(port)) = frame.route else { return };
        if port == uplink {
            return;
        }
        let mut head = [0; HEADERS];
        let Some(key) = Key::of(frame.first_bytes(body, &mut head)) else { return };
        let matched = self.flows.matched(&key.in_pool(port.checked_sub(1).unwrap_or(self.pool_of_pf)));
        let statistic = if matched.is_some() { Statistic::FlowMatched } else { Statistic::FlowMissed };
        self.nic.lock().count(statistic, 1);
        match matched.flatten() {
            None => {}
            Some(FlowAction::Drop) => frame.route = Err(Counter::FlowDropped),
            Some(FlowAction::Queue(queue)) => {
                if let Some((port, queue)) = self.targets.get(usize::from(queue)) {
                    frame.route = Ok(Route::One(*port));
                    frame.queue = Some(*queue);
                }
            }
        }
    }
}
