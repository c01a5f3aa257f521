//! The worker of both queues.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::Permissions;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{ConsoleCounter, ConsoleCounters, Tally};
use crate::device::worker::own;
use crate::os::chardev::CharDevice;
use crate::os::eventfd::borrow;
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Ring, Used};
use crate::transport::features::has;
use crate::{DmaSpace, DmaView, Interrupts, SharedQueue};

/// The queue that the driver receives from (`virtio 1.4 §5.3.2`).
pub(crate) const RECEIVE: u16 = 0;
/// The queue that the driver transmits to.
pub(crate) const TRANSMIT: u16 = 1;
/// Most bytes transferred at once.
const PART: usize = 4096;
/// The most bytes of one chain that are transmitted. Linux transmits a page at most.
const MAX_CHAIN: usize = 256 << 10;
/// The most chains of one direction that are handled before the other direction, or a stop.
const BATCH: usize = 16;

/// The queues, and the worker's resources.
pub(crate) struct QueueWorker {
    /// Receive queue, if the driver enabled it.
    pub receive: Option<SharedQueue>,
    /// Transmit queue, if the driver enabled it.
    pub transmit: Option<SharedQueue>,
    /// The other end.
    pub device: Arc<CharDevice>,
    /// The negotiated features.
    pub features: u64,
    /// The guest's memory.
    pub memory: DmaSpace,
    /// Interrupts of the device.
    pub interrupts: Arc<Interrupts>,
    /// The counters.
    pub counters: Arc<ConsoleCounters>,
    /// Wakes the worker.
    pub kick: Arc<EventFd>,
    /// Stops the worker.
    pub stop: Arc<AtomicBool>,
}

/// The event that a queue waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// None: there may be more to do.
    More,
    /// Input.
    Input,
    /// A doorbell.
    Doorbell,
}

/// A queue and the storage of its segments.
pub(crate) struct Running<'q> {
    /// The queue.
    pub ring: Ring<'q>,
    /// The storage.
    pub storage: Storage,
}

impl QueueWorker {
    /// Runs the queues until stopped. First waits for the predecessor's end.
    pub(crate) fn run(self) {
        let mut tally = Tally::new();
        let mut receive = self.open(RECEIVE, self.receive.as_ref(), &mut tally);
        let mut transmit = self.open(TRANSMIT, self.transmit.as_ref(), &mut tally);
        while !self.stop.load(Ordering::Acquire) {
            let memory = self.memory.pass();
            let sent = self.attempt(&mut transmit, &mut tally, |queue, tally| self.send(queue, &memory, tally));
            let received = self.attempt(&mut receive, &mut tally, |queue, tally| self.fill(queue, &memory, tally));
            drop(memory);
            tally.flush(&self.counters);
            if sent != Next::More && received != Next::More {
                self.wait(received == Next::Input, &mut tally);
            }
        }
        tally.flush(&self.counters);
    }

    fn open<'q>(&self, index: u16, queue: Option<&'q SharedQueue>, tally: &mut Tally) -> Option<Running<'q>> {
        let event_idx = has(self.features, VIRTIO_RING_F_EVENT_IDX);
        let ring = Ring::open(index, own(queue?, &self.stop)?, event_idx, &self.memory.pass());
        let ring = ring.inspect_err(|BrokenRing| self.give_up(tally)).ok()?;
        Some(Running { ring, storage: Storage::default() })
    }

    /// Runs a queue, and stops it if its ring is invalid.
    fn attempt<'q>(
        &self,
        queue: &mut Option<Running<'q>>,
        tally: &mut Tally,
        run: impl FnOnce(&mut Running<'q>, &mut Tally) -> Result<Next, BrokenRing>,
    ) -> Next {
        let Some(running) = queue else { return Next::Doorbell };
        run(running, tally).unwrap_or_else(|BrokenRing| {
            self.give_up(tally);
            *queue = None;
            Next::Doorbell
        })
    }

    /// Counts an invalid ring, and asks the driver for a reset.
    fn give_up(&self, tally: &mut Tally) {
        tally.count(ConsoleCounter::BrokenRings);
        self.interrupts.ask_for_reset();
    }

    /// Writes the driver's output to the device.
    pub(crate) fn send(
        &self,
        Running { ring, storage }: &mut Running<'_>,
        memory: &DmaView,
        tally: &mut Tally,
    ) -> Result<Next, BrokenRing> {
        ring.suppress_doorbells(memory)?;
        let mut next = Next::More;
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else {
                next = if ring.expect_doorbell(memory)? { Next::More } else { Next::Doorbell };
                break;
            };
            let head = chain.head_index();
            let mut iovecs = IoVecs::new(storage);
            match iovecs.append(memory, chain, Permissions::Read) {
                Ok(_) => self.write(&iovecs, tally),
                Err(_) => tally.count(ConsoleCounter::TxBadChains),
            }
            ring.give_back(memory, &[Used { head, len: 0 }])?;
            // A driver may wait for this one with a spinning vCPU.
            self.interrupt(ring, memory, tally)?;
            if self.stop.load(Ordering::Acquire) {
                break;
            }
        }
        Ok(next)
    }

    fn write(&self, iovecs: &IoVecs<'_, '_>, tally: &mut Tally) {
        let mut part = [0; PART];
        let mut done = 0;
        while done < MAX_CHAIN && !self.stop.load(Ordering::Acquire) {
            let len = iovecs.read_at(done, &mut part);
            if len == 0 {
                break;
            }
            self.device.write(&part[..len]);
            done += len;
        }
        tally.add(ConsoleCounter::TxBytes, done as u64);
        tally.add(ConsoleCounter::TxTooLong, (done >= MAX_CHAIN && iovecs.bytes() > done).into());
    }

    /// Sends available input to the driver.
    pub(crate) fn fill(
        &self,
        Running { ring, storage }: &mut Running<'_>,
        memory: &DmaView,
        tally: &mut Tally,
    ) -> Result<Next, BrokenRing> {
        ring.suppress_doorbells(memory)?;
        let mut next = Next::More;
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else {
                next = if ring.expect_doorbell(memory)? { Next::More } else { Next::Doorbell };
                break;
            };
            let head = chain.head_index();
            let mut iovecs = IoVecs::new(storage);
            let room = iovecs.append(memory, chain, Permissions::Write).map_or(0, |extent| extent.bytes);
            if room == 0 {
                tally.count(ConsoleCounter::RxBadChains);
                ring.give_back(memory, &[Used { head, len: 0 }])?;
                continue;
            }
            let mut part = [0; PART];
            match self.device.read(&mut part[..room.min(PART)]) {
                Ok(len @ 1..) => {
                    let written = iovecs.write_at(0, &part[..len]);
                    tally.add(ConsoleCounter::RxBytes, written as u64);
                    // At most PART.
                    ring.give_back(memory, &[Used { head, len: written as u32 }])?;
                }
                result => {
                    ring.put_back(1);
                    let nothing = result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
                    // At the end of input, only doorbells are left to wait for.
                    next = if nothing { Next::Input } else { Next::Doorbell };
                    break;
                }
            }
        }
        self.interrupt(ring, memory, tally)?;
        Ok(next)
    }

    fn interrupt(&self, ring: &mut Ring<'_>, memory: &DmaView, tally: &mut Tally) -> Result<(), BrokenRing> {
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(ConsoleCounter::Interrupts);
        }
        Ok(())
    }

    /// Waits for a doorbell, a stop, or input if `input`.
    fn wait(&self, input: bool, tally: &mut Tally) {
        let kick = borrow(&self.kick);
        // If this fails (no memory), the queues are checked and the wait is repeated.
        let _ = self.device.wait([kick], input);
        if self.kick.read().is_ok() {
            tally.count(ConsoleCounter::Kicks);
        }
    }
}
