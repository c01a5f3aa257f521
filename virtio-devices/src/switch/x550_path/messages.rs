//! Interrupts of an X550 that wait for the end of an interval, or report frames that were sent.
//!
//! The NIC keeps them. The switch's workers send them: each waits for doorbells at most until the first is due, so
//! there is no thread and no timer for them.

use std::sync::Arc;
use std::time::Instant;

use super::number_of;
use crate::net::{Counter, NetCounters};
use crate::switch::switch_core::Deferred;
use crate::x550_sriov::X550Handle;

/// The interrupts of a NIC that wait.
pub(super) struct MessagesLater {
    nic: X550Handle,
    /// The counters of all functions, the PF's first.
    counters: Vec<Arc<NetCounters>>,
}

impl MessagesLater {
    /// Messages of `nic`, with the counters of all functions, the PF's first.
    pub(super) fn new(nic: X550Handle, counters: Vec<Arc<NetCounters>>) -> Self {
        Self { nic, counters }
    }
}

impl Deferred for MessagesLater {
    fn due(&self) -> Option<Instant> {
        self.nic.due()
    }

    fn send(&self) {
        for (place, vectors) in self.nic.send_deferred() {
            if let Some(counters) = self.counters.get(number_of(place)) {
                counters.add(Counter::Interrupts, vectors.count_ones().into());
            }
        }
    }
}
