//! What a NIC's workers work with.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::counters::{Counter, NetCounters, Tally};
use super::enforced::PolicyCell;
use super::state::NetState;
use crate::backend::TapQueue;
use crate::failures::Failures;
use crate::ring::{BrokenRing, Ring};
use crate::{DmaSpace, DmaView, Interrupts};

/// The most frames that are handled in one direction before the other direction and a stop get their turn.
pub(crate) const BATCH: usize = 64;

/// What a queue of frames waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing: there may be more frames.
    More,
    /// A frame.
    Frame,
    /// A doorbell: there are no buffers, or the backend does not work.
    Doorbell,
    /// The rate limit: wait this long.
    Limited(Duration),
}

/// What the workers of one start share.
pub(crate) struct Shared {
    /// The guest's memory.
    pub memory: DmaSpace,
    /// The negotiated features.
    pub features: u64,
    /// The number of queue pairs that the driver may use.
    pub pairs: u16,
    /// What the driver changes at run time.
    pub state: Arc<NetState>,
    /// What the NIC may do.
    pub policy: Arc<PolicyCell>,
    /// The counters.
    pub counters: Arc<NetCounters>,
    /// What the host fails to do.
    pub failures: Arc<Failures>,
    /// Where the driver is interrupted.
    pub interrupts: Arc<Interrupts>,
    /// Whether this is the first start since a reset.
    pub fresh: bool,
    /// Whether all workers have been spawned. Locked until that is known, so that no worker touches anything before.
    pub complete: Mutex<bool>,
}

/// What one turn of a worker's loop works with. `B` is a tap's queue where the worker moves frames itself.
pub(crate) struct Pass<'m, B: ?Sized = TapQueue> {
    /// The guest's memory.
    pub memory: &'m DmaView,
    /// The backend.
    pub backend: &'m B,
    /// What the driver changes at run time.
    pub state: &'m NetState,
    /// What the NIC may do.
    pub policy: &'m PolicyCell,
    /// The counters.
    pub tally: &'m mut Tally,
    /// What the host fails to do.
    pub failures: &'m Failures,
    /// Where the driver is interrupted.
    pub interrupts: &'m Interrupts,
}

impl<B: ?Sized> Pass<'_, B> {
    /// Interrupts the driver if it wants that.
    pub(crate) fn interrupt(&mut self, ring: &mut Ring<'_>) -> Result<(), BrokenRing> {
        if ring.wants_interrupt(self.memory)? {
            self.interrupts.signal_queue(ring.index());
            self.tally.count(Counter::Interrupts);
        }
        Ok(())
    }
}

/// Gives up a queue whose ring is invalid, and asks the driver to reset the device. The other queues go on.
pub(crate) fn give_up(tally: &mut Tally, interrupts: &Interrupts) {
    tally.count(Counter::BrokenRings);
    interrupts.ask_for_reset();
}
