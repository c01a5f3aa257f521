//! A port's receive queue, which senders fill. Each locks it for a run of frames, and leaves when it is stopped.

use super::port_nic::PortNic;
use super::rings::x550::X550Receive;
use super::rings::{Room, Supply, VirtqueueReceive};
use super::rx_run::{Receiver, RxRun, RxScratch};
use crate::DmaView;
use crate::net::{Counter, Tally};
use crate::queue::ring::BrokenRing;

/// The ring of a receive queue.
pub(crate) enum ReceiveRing {
    /// A virtqueue.
    Virtqueue(VirtqueueReceive),
    /// A ring of an X550.
    X550(X550Receive),
}

/// A receive queue of a port.
pub(crate) struct PortRx {
    /// `None` once it was closed or given up, or if the driver does not use it.
    ring: Option<ReceiveRing>,
    /// The state of the driver's supply of buffers.
    supply: Supply,
    /// A sender will decide at the end of its batch if the driver needs an interrupt.
    touched: bool,
    tally: Tally,
}

impl PortRx {
    /// A queue that has received no frame yet.
    pub(crate) fn new(ring: Option<ReceiveRing>) -> Self {
        Self { ring, supply: Supply::default(), touched: false, tally: Tally::new() }
    }

    /// Records that the caller will return to the queue. Returns true if no other sender has done so before.
    pub(crate) fn touch(&mut self) -> bool {
        !std::mem::replace(&mut self.touched, true)
    }

    /// Puts frames into the queue, until the returned run is [finished](RxRun::finish). `None` if the queue is closed.
    ///
    /// # Errors
    ///
    /// Fails if the ring is invalid: the caller [gives it up](Self::give_up).
    pub(crate) fn start<'r, 'm>(
        &'r mut self,
        port: Receiver<'r>,
        memory: &'m DmaView,
        scratch: &'r mut RxScratch,
    ) -> Result<Option<RxRun<'r, 'm>>, BrokenRing> {
        let Self { ring, supply, tally, touched: _ } = self;
        let (virtqueue, whole, scratch) = scratch.parts();
        let room = match ring.as_ref().filter(|_| !port.is_stopped()) {
            None => return Ok(None),
            Some(ReceiveRing::Virtqueue(queue)) => Room::Virtqueue(queue.room(memory, virtqueue)?),
            Some(ReceiveRing::X550(queue)) => match queue.room(memory, whole) {
                Some(room) => Room::X550(room),
                None => return Ok(None),
            },
        };
        Ok(Some(RxRun::new(room, (supply, tally), port, memory, scratch)))
    }

    /// Ends a batch: interrupts the driver if it needs that, and publishes the counts.
    pub(crate) fn signal(&mut self, nic: &PortNic, memory: &DmaView) {
        self.touched = false;
        let signalled = match &self.ring {
            Some(ReceiveRing::Virtqueue(queue)) => queue.signal(memory),
            Some(ReceiveRing::X550(queue)) => Ok(queue.signal()),
            None => Ok(false),
        };
        match signalled {
            Ok(true) => self.tally.count(Counter::Interrupts),
            Ok(false) => {}
            Err(BrokenRing) => self.give_up(),
        }
        self.tally.flush(&nic.counters);
    }

    /// True if the driver has provided buffers.
    pub(crate) fn has_buffers(&self, memory: &DmaView) -> bool {
        self.ring.as_ref().is_none_or(|ring| match ring {
            ReceiveRing::Virtqueue(queue) => queue.has_buffers(memory),
            ReceiveRing::X550(queue) => queue.has_buffers(),
        })
    }

    /// Closes the queue: no thread writes to it afterwards. A sender that would interrupt the driver at the end of its
    /// batch finds no ring then, so an X550's driver is interrupted now.
    pub(crate) fn close(&mut self, nic: &PortNic) {
        if let Some(ReceiveRing::X550(queue)) = self.ring.take() {
            self.signal_last(&queue);
        }
        self.tally.flush(&nic.counters);
    }

    /// Gives up the queue, whose ring is invalid.
    pub(crate) fn give_up(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.tally.count(Counter::BrokenRings);
            match ring {
                ReceiveRing::Virtqueue(queue) => queue.ask_for_reset(),
                ReceiveRing::X550(queue) => self.signal_last(&queue),
            }
        }
    }

    /// Interrupts the driver for the last frames of a queue.
    fn signal_last(&mut self, queue: &X550Receive) {
        if queue.signal() {
            self.tally.count(Counter::Interrupts);
        }
    }
}
