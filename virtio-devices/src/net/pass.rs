//! The context of a NIC's workers.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::counters::{Counter, NetCounters, Tally};
use super::enforced::PolicyCell;
use super::state::NetState;
use crate::backend::TapQueue;
use crate::device::failures::Failures;
use crate::queue::ring::{BrokenRing, Ring};
use crate::{DmaSpace, DmaView, DriverLog, Interrupts};

/// The most frames that are handled in one direction before the other direction and a stop get their turn.
pub(crate) const BATCH: usize = 64;

/// The next event that a queue of frames waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing: there may be more frames.
    More,
    /// A frame.
    Frame,
    /// A doorbell: there are no buffers, or the backend failed.
    Doorbell,
    /// The rate limit: wait for this time.
    Limited(Duration),
}

/// The data that the workers of one start share.
pub(crate) struct Shared {
    /// The guest's memory.
    pub memory: DmaSpace,
    /// The negotiated features.
    pub features: u64,
    /// The number of queue pairs that the driver may use.
    pub pairs: u16,
    /// The state that the driver changes at run time.
    pub state: Arc<NetState>,
    /// The policy in force.
    pub policy: Arc<PolicyCell>,
    /// The counters.
    pub counters: Arc<NetCounters>,
    /// The host's failures.
    pub failures: Arc<Failures>,
    /// The interrupts of the driver.
    pub interrupts: Arc<Interrupts>,
    /// The log of the driver's commands, if they are logged.
    pub log: Option<Arc<DriverLog>>,
    /// True if this is the first start since a reset.
    pub fresh: bool,
    /// True if all workers have been spawned. Locked until that is certain, so that no worker touches anything before.
    pub complete: Mutex<bool>,
}

/// The context of one turn of a worker's loop. `B` is a tap's queue if the worker moves frames itself.
pub(crate) struct Pass<'m, B: ?Sized = TapQueue> {
    /// The guest's memory.
    pub memory: &'m DmaView,
    /// The backend.
    pub backend: &'m B,
    /// The state that the driver changes at run time.
    pub state: &'m NetState,
    /// The policy in force.
    pub policy: &'m PolicyCell,
    /// The counters.
    pub tally: &'m mut Tally,
    /// The host's failures.
    pub failures: &'m Failures,
    /// The interrupts of the driver.
    pub interrupts: &'m Interrupts,
    /// The log of the driver's commands, if they are logged.
    pub log: Option<&'m DriverLog>,
}

impl<B: ?Sized> Pass<'_, B> {
    /// Interrupts the driver if the ring requires it.
    pub(crate) fn interrupt(&mut self, ring: &mut Ring<'_>) -> Result<(), BrokenRing> {
        if ring.wants_interrupt(self.memory)? {
            self.interrupts.signal_queue(ring.index());
            self.tally.count(Counter::Interrupts);
        }
        Ok(())
    }
}

/// Gives up a queue whose ring is invalid, and asks the driver to reset the device. The other queues keep running.
pub(crate) fn give_up(tally: &mut Tally, interrupts: &Interrupts) {
    tally.count(Counter::BrokenRings);
    interrupts.ask_for_reset();
}
