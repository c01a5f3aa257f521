//! The request queue, handled when its doorbell rings.

use std::sync::Arc;

use super::config::{PROBE_SIZE, properties};
use super::counters::{IommuCounter, Tally};
use super::request::{LONGEST, Request, TAIL};
use super::status::Status;
use super::unit::Iommu;
use crate::queue::iovecs::{IoVecs, Storage, divide};
use crate::queue::ring::{BrokenRing, Chain, Ring, Used};
use crate::{DmaSpace, DmaView, Interrupts, SharedQueue};

/// The type of the request whose reply is more than a status.
const PROBE: u8 = 5;

/// The queue, and the context of its requests.
pub(super) struct RequestQueue {
    pub index: u16,
    pub queue: SharedQueue,
    pub memory: DmaSpace,
    pub interrupts: Arc<Interrupts>,
    pub iommu: Arc<Iommu>,
}

impl RequestQueue {
    /// Handles the available requests: at most as many as the queue holds. Requests made available in the meantime ring
    /// the doorbell again.
    pub(super) fn answer_all(&self) {
        let mut tally = Tally::new();
        if self.try_answer_all(&mut tally).is_err() && !self.interrupts.needs_reset() {
            tally.count(IommuCounter::BrokenRings);
            self.interrupts.ask_for_reset();
        }
        tally.flush(&self.iommu.common.counters);
    }

    fn try_answer_all(&self, tally: &mut Tally) -> Result<(), BrokenRing> {
        if self.interrupts.needs_reset() {
            return Err(BrokenRing);
        }
        let memory = &*self.memory.pass();
        let queue = Arc::clone(&self.queue);
        let mut ring = Ring::open(self.index, queue.lock(), false, memory)?;
        let mut storage = Default::default();
        for _ in 0..ring.size() {
            let Some(chain) = ring.next(memory)? else { break };
            let head = chain.head_index();
            let len = self.answer(chain, (memory, &mut storage), tally);
            // The driver may spin for each.
            ring.give_back(memory, &[Used { head, len }])?;
        }
        if ring.wants_interrupt(memory)? {
            self.interrupts.signal_queue(ring.index());
            tally.count(IommuCounter::Interrupts);
        }
        Ok(())
    }

    /// Handles a request. Returns the length of the reply.
    fn answer<'m>(
        &self,
        chain: Chain<'m>,
        (memory, storage): (&'m DmaView, &mut [Storage; 2]),
        tally: &mut Tally,
    ) -> u32 {
        let [readable, writable] = storage;
        let (mut request, mut reply) = (IoVecs::new(readable), IoVecs::new(writable));
        let divided = divide(memory, chain, &mut request, &mut reply);
        let mut bytes = [0; LONGEST];
        let len = request.read_at(0, &mut bytes);
        let is_probe = bytes.first() == Some(&PROBE);
        let tail = if is_probe { PROBE_SIZE } else { 0 };
        if divided.is_err() || len == 0 || reply.bytes() < tail + TAIL {
            tally.count(IommuCounter::BadChains);
            return 0;
        }
        let status = self.carry_out(bytes.get(..len).unwrap_or_default(), tally);
        if is_probe {
            let properties = if status == Status::Ok { properties() } else { [0; PROBE_SIZE] };
            reply.write_at(0, &properties);
        }
        reply.write_at(tail, &[status as u8, 0, 0, 0]);
        (tail + TAIL) as u32
    }

    fn carry_out(&self, bytes: &[u8], tally: &mut Tally) -> Status {
        let done = Request::parse(bytes).and_then(|request| self.iommu.carry_out(request).map(|()| request));
        tally.count(match &done {
            Ok(Request::Attach { .. }) => IommuCounter::Attaches,
            Ok(Request::Detach { .. }) => IommuCounter::Detaches,
            Ok(Request::Map { .. }) => IommuCounter::Maps,
            Ok(Request::Unmap { .. }) => IommuCounter::Unmaps,
            Ok(Request::Probe { .. }) => IommuCounter::Probes,
            Err(_) => IommuCounter::Refused,
        });
        done.map_or_else(|status| status, |_| Status::Ok)
    }
}
