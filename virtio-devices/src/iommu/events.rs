//! The event queue, and its worker, which reports failed accesses to the driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use vm_memory::Permissions;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{IommuCounter, Tally};
use super::endpoint::Common;
use super::fault::{EVENT, Fault};
use crate::device::worker::own;
use crate::os::eventfd::borrow;
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Ring, Used};
use crate::{DmaSpace, Interrupts, SharedQueue};

/// The queue, and the worker's resources.
pub(super) struct EventWorker {
    pub index: u16,
    pub queue: SharedQueue,
    pub memory: DmaSpace,
    pub interrupts: Arc<Interrupts>,
    pub common: Arc<Common>,
    pub kick: Arc<EventFd>,
    pub stop: Arc<AtomicBool>,
}

impl EventWorker {
    /// Reports faults until stopped. First waits for the predecessor's end.
    pub(super) fn run(self) {
        let queue = Arc::clone(&self.queue);
        let Some(queue) = own(&queue, &self.stop) else { return };
        let (mut tally, mut storage) = (Tally::new(), Storage::default());
        let mut ring = Ring::open(self.index, queue, false, &self.memory.pass()).ok();
        if ring.is_none() {
            self.give_up(&mut tally);
        }
        while !self.stop.load(Ordering::Acquire) {
            while let Some(fault) = self.common.faults.take() {
                let told = ring.as_mut().map_or(Ok(false), |ring| self.tell(fault, ring, &mut storage, &mut tally));
                let told = told.unwrap_or_else(|BrokenRing| {
                    ring = None;
                    self.give_up(&mut tally);
                    false
                });
                tally.count(if told { IommuCounter::Events } else { IommuCounter::EventsDropped });
            }
            tally.flush(&self.common.counters);
            // If this fails (a signal, no memory), the faults are checked and the wait is repeated.
            let _ = poll(&mut [PollFd::from_borrowed_fd(borrow(&self.kick), PollFlags::IN)], None);
            let _ = self.kick.read();
        }
        tally.flush(&self.common.counters);
    }

    /// Writes a fault to the driver's next buffer. Returns false if there is none.
    fn tell(
        &self,
        fault: Fault,
        ring: &mut Ring<'_>,
        storage: &mut Storage,
        tally: &mut Tally,
    ) -> Result<bool, BrokenRing> {
        let memory = &*self.memory.pass();
        let Some(chain) = ring.next(memory)? else { return Ok(false) };
        let head = chain.head_index();
        let mut buffer = IoVecs::new(storage);
        let fits = buffer.append(memory, chain, Permissions::Write).is_ok_and(|extent| extent.bytes >= EVENT);
        if fits {
            buffer.write_at(0, &fault.event());
        } else {
            tally.count(IommuCounter::BadChains);
        }
        ring.give_back(memory, &[Used { head, len: if fits { EVENT as u32 } else { 0 } }])?;
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(IommuCounter::Interrupts);
        }
        Ok(fits)
    }

    fn give_up(&self, tally: &mut Tally) {
        tally.count(IommuCounter::BrokenRings);
        self.interrupts.ask_for_reset();
    }
}
