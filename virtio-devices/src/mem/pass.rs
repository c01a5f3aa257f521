//! Requests of a driver, and their answers.

use std::sync::atomic::AtomicBool;

use vm_memory::GuestMemoryMmap;

use super::counters::{MemCounter, Tally};
use super::region::{Answer, MemRegion, Work};
use crate::Interrupts;
use crate::iovecs::{IoVecs, Storage, divide};
use crate::ring::{BrokenRing, Chain, Ring, Used};

/// The length of a request (`virtio 1.4 §5.15.6`, `struct virtio_mem_req`).
const REQUEST: usize = 24;
/// The length of an answer (`struct virtio_mem_resp`).
const ANSWER: usize = 10;
/// The most requests before a stop is looked at.
const BATCH: usize = 16;

/// A turn of the worker's loop.
pub(super) struct Pass<'p> {
    /// The guest's memory.
    pub memory: &'p GuestMemoryMmap,
    /// The memory of the device.
    pub region: &'p MemRegion,
    /// Stops it.
    pub stop: &'p AtomicBool,
    /// Where the driver is interrupted.
    pub interrupts: &'p Interrupts,
    /// For the segments of a request and of its answer.
    pub storage: &'p mut [Storage; 2],
    /// The counters.
    pub tally: &'p mut Tally,
}

impl Pass<'_> {
    /// Answers up to [`BATCH`] requests. Returns whether there are no more, and a doorbell will come for the next one.
    pub(super) fn serve(&mut self, ring: &mut Ring<'_>) -> Result<bool, BrokenRing> {
        let memory = self.memory;
        ring.suppress_doorbells(memory)?;
        for _ in 0..BATCH {
            let Some(chain) = ring.next(memory)? else { return Ok(!ring.expect_doorbell(memory)?) };
            let head = chain.head_index();
            let Some(len) = self.answer(chain) else {
                ring.put_back(1);
                break;
            };
            ring.give_back(memory, &[Used { head, len }])?;
            // The driver waits for each.
            if ring.wants_interrupt(memory)? {
                self.interrupts.signal_queue(ring.index());
                self.tally.count(MemCounter::Interrupts);
            }
        }
        Ok(false)
    }

    /// Does what `chain` asks for and answers there. Returns the answer's length; `None` if the worker is to stop.
    fn answer(&mut self, chain: Chain<'_>) -> Option<u32> {
        let [readable, writable] = &mut *self.storage;
        let (mut readable, mut writable) = (IoVecs::new(readable), IoVecs::new(writable));
        let divided = divide(self.memory, chain, &mut readable, &mut writable);
        let mut request = [0; REQUEST];
        if divided.is_err() || readable.read_at(0, &mut request) < REQUEST || writable.bytes() < ANSWER {
            self.tally.count(MemCounter::BadChains);
            return Some(0);
        }
        let Work::Done(answer) = perform(&request, (self.memory, self.region), self.stop, self.tally) else {
            return None;
        };
        self.tally.count(MemCounter::Requests);
        let (kind, state) = match answer {
            Answer::Ack => (0, 0),
            Answer::Nack => (1, 0),
            Answer::Error => (3, 0),
            Answer::State(state) => (0, state),
        };
        self.tally.add(MemCounter::RefusedRequests, (answer == Answer::Nack).into());
        self.tally.add(MemCounter::BadRequests, (answer == Answer::Error).into());
        let mut bytes = [0; ANSWER];
        bytes[..2].copy_from_slice(&u16::to_le_bytes(kind));
        bytes[8..].copy_from_slice(&u16::to_le_bytes(state));
        // There is room: this is ANSWER.
        Some(writable.write_at(0, &bytes) as u32)
    }
}

/// Does what `request` asks for.
fn perform(
    request: &[u8; REQUEST],
    (memory, region): (&GuestMemoryMmap, &MemRegion),
    stop: &AtomicBool,
    tally: &mut Tally,
) -> Work {
    const PLUG: u16 = 0;
    const UNPLUG: u16 = 1;
    const UNPLUG_ALL: u16 = 2;
    const STATE: u16 = 3;
    let [a, b, _, _, _, _, _, _, address @ .., c, d, _, _, _, _, _, _] = *request;
    let (kind, address, count) = (u16::from_le_bytes([a, b]), u64::from_le_bytes(address), u16::from_le_bytes([c, d]));
    let (counter, work) = match kind {
        PLUG => (MemCounter::PluggedBlocks, region.plug(memory, address, count, stop)),
        UNPLUG => (MemCounter::UnpluggedBlocks, region.unplug(memory, address, count, stop)),
        UNPLUG_ALL => return region.unplug_everything(memory, stop),
        STATE => return Work::Done(region.state_of(address, count)),
        _ => return Work::Done(Answer::Error),
    };
    if work == Work::Done(Answer::Ack) {
        tally.add(counter, count.into());
    }
    work
}
