//! Requests of a driver, and the replies.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::counters::{MemCounter, Tally};
use super::region::{Answer, MemRegion, Work};
use crate::GuestMap;
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::queue::iovecs::{IoVecs, divide};
use crate::queue::ring::Chain;

/// The length of a request (`virtio 1.4 §5.15.6`, `struct virtio_mem_req`).
const REQUEST: usize = 24;
/// The length of a reply (`struct virtio_mem_resp`).
const ANSWER: usize = 10;

/// Handles requests for this memory.
pub(super) struct Requests(pub(super) Arc<MemRegion>);

impl QueueHandler for Requests {
    type Tally = Tally;

    /// Executes the request in `chain`, unless the worker must stop in the meantime.
    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, stop, storage: [readable, writable], tally, .. } = context;
        let (mut readable, mut writable) = (IoVecs::new(readable), IoVecs::new(writable));
        let divided = divide(memory, chain, &mut readable, &mut writable);
        let mut request = [0; REQUEST];
        if divided.is_err() || readable.read_at(0, &mut request) < REQUEST || writable.bytes() < ANSWER {
            tally.count(MemCounter::BadChains);
            return ChainResult::Used(0);
        }
        let Work::Done(answer) = perform(&request, (memory.map(), &self.0), stop, tally) else {
            return ChainResult::Later(Duration::ZERO);
        };
        tally.count(MemCounter::Requests);
        let (kind, state) = match answer {
            Answer::Ack => (0, 0),
            Answer::Nack => (1, 0),
            Answer::Busy => (2, 0),
            Answer::Error => (3, 0),
            Answer::State(state) => (0, state),
        };
        tally.add(MemCounter::RefusedRequests, (answer == Answer::Nack).into());
        tally.add(MemCounter::BadRequests, (answer == Answer::Error).into());
        let mut bytes = [0; ANSWER];
        bytes[..2].copy_from_slice(&u16::to_le_bytes(kind));
        bytes[8..].copy_from_slice(&u16::to_le_bytes(state));
        // There is room for ANSWER bytes.
        ChainResult::Used(writable.write_at(0, &bytes) as u32)
    }
}

/// Executes `request`.
fn perform(
    request: &[u8; REQUEST],
    (memory, region): (&GuestMap, &MemRegion),
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
