//! The driver's commands, which the worker of its port executes.

use std::io;
use std::sync::Arc;

use super::sender::{ControlQueue, PortTx};
use crate::DmaView;
use crate::frames::net_protocol::Offloads;
use crate::net::{Commanded, Control, Pass, give_up};
use crate::queue::ring::BrokenRing;

/// The most commands per turn. One with many addresses takes as long as hundreds of frames.
const COMMANDS: usize = 2;

/// A backend without offload settings: frames are converted to the offloads of their receiver.
struct AnyOffloads;

impl Commanded for AnyOffloads {
    fn set_offloads(&self, _: Offloads) -> io::Result<()> {
        Ok(())
    }
}

/// The result of a driver's commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Served {
    /// There may be more.
    pub more: bool,
    /// The receive filter or the address has changed.
    pub filter_changed: bool,
}

/// Executes the commands that the driver has made available, up to a number.
pub(crate) fn serve(tx: &mut PortTx, memory: &DmaView) -> Served {
    let Some(queue) = tx.control.take() else { return Served::default() };
    let ControlQueue { ring: parked, shared } = &queue;
    let before = Arc::clone(&shared.state.filter());
    let tally = &mut tx.tally;
    let served: Result<bool, BrokenRing> = (|| {
        let ring = parked.ring(memory)?;
        let mut control = Control::new(ring, shared.features, shared.pairs, Vec::new());
        let mut pass = Pass {
            memory,
            backend: &AnyOffloads,
            state: &shared.state,
            policy: &shared.policy,
            tally,
            failures: &shared.failures,
            interrupts: &shared.interrupts,
            log: shared.log.as_deref(),
        };
        let more = control.run_some(COMMANDS, &mut pass);
        parked.park(control.into_ring());
        more
    })();
    let filter_changed = !Arc::ptr_eq(&before, &shared.state.filter());
    match served {
        Ok(_) => tx.control = Some(queue),
        Err(BrokenRing) => give_up(&mut tx.tally, &shared.interrupts),
    }
    Served { more: served.unwrap_or(false), filter_changed }
}
