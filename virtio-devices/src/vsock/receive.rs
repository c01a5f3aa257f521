//! The receive queue: the host's packets into the driver's buffers.

use vm_memory::Permissions;
use zerocopy::IntoBytes;

use super::connection::MAX_BURST;
use super::counters::{Tally, VsockCounter};
use super::muxer::{Muxer, Output};
use super::packet::{HEADER, Header, Ports};
use super::pass::{Next, Pass};
use crate::DmaView;
use crate::queue::iovecs::{IoVecs, MAX_SEGMENTS, Storage};
use crate::queue::ring::{BrokenRing, Ring, Used};

/// The most turns of connections before checking other queues, or a stop.
const BATCH: usize = 32;

/// A buffer of the driver.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    head: u16,
    /// The room after the header, in bytes.
    room: usize,
}

/// The queue, and the storage of its segments.
pub(crate) struct Receive<'q> {
    ring: Ring<'q>,
    chain: Storage,
    headers: Storage,
    data: Storage,
    buffers: Vec<Buffer>,
    used: Vec<Used>,
}

impl<'q> Receive<'q> {
    pub(crate) fn new(ring: Ring<'q>) -> Self {
        let [chain, headers, data] = std::array::from_fn(|_| Storage::default());
        Self { ring, chain, headers, data, buffers: Vec::new(), used: Vec::new() }
    }

    /// Sends the driver the packets of up to [`BATCH`] turns.
    pub(crate) fn run(&mut self, pass: &mut Pass<'_>) -> Result<Next, BrokenRing> {
        self.ring.suppress_doorbells(pass.memory)?;
        let mut next = Next::More;
        for _ in 0..BATCH {
            let Some((wanted, bytes)) = pass.muxer.buffers() else {
                next = Next::Doorbell;
                break;
            };
            if !self.turn((wanted.min(MAX_BURST), bytes), pass)? {
                next = if self.ring.expect_doorbell(pass.memory)? { Next::More } else { Next::Doorbell };
                break;
            }
        }
        pass.interrupt(&mut self.ring)?;
        Ok(next)
    }

    /// Writes the next packets into the driver's buffers, up to `wanted` buffers and bytes. Returns false if there is
    /// no buffer.
    fn turn(&mut self, wanted: (usize, usize), pass: &mut Pass<'_>) -> Result<bool, BrokenRing> {
        let Self { ring, chain, headers, data, buffers, used } = self;
        let Pass { memory, muxer, tally, now, .. } = pass;
        buffers.clear();
        used.clear();
        let mut taken = Taken { headers: IoVecs::new(headers), data: IoVecs::new(data), buffers };
        taken.gather(ring, memory, wanted, chain, tally)?;
        if taken.buffers.is_empty() {
            return Ok(false);
        }
        match muxer.next(*now, tally) {
            Some(Output::Packet(header)) => taken.write(used, &header, 0),
            Some(Output::Data(ports)) => taken.fill(muxer, ports, used, tally),
            None => {}
        }
        tally.add(VsockCounter::RxPackets, used.len() as u64);
        ring.give_back(memory, used)?;
        // At most MAX_BURST.
        ring.put_back((taken.buffers.len() - used.len()) as u16);
        Ok(true)
    }
}

/// Consecutive buffers taken from the ring.
struct Taken<'s, 'm> {
    /// The space for their headers, [`HEADER`] bytes each.
    headers: IoVecs<'s, 'm>,
    /// The space for payload, after the headers.
    data: IoVecs<'s, 'm>,
    buffers: &'s mut Vec<Buffer>,
}

impl<'m> Taken<'_, 'm> {
    /// Takes up to `wanted` buffers, and after the first only until they hold `bytes` of payload. An invalid chain goes
    /// back to the driver only if it is the first, which keeps the order.
    fn gather(
        &mut self,
        ring: &mut Ring<'_>,
        memory: &'m DmaView,
        (wanted, bytes): (usize, usize),
        storage: &mut Storage,
        tally: &mut Tally,
    ) -> Result<(), BrokenRing> {
        // At most the ring's chains: a driver that keeps adding invalid ones does not delay the other queue.
        let mut held = 0;
        for _ in 0..ring.size() {
            if self.buffers.len() == wanted || !self.buffers.is_empty() && held >= bytes {
                break;
            }
            let Some(chain) = ring.next(memory)? else { break };
            let head = chain.head_index();
            let mut segments = IoVecs::new(storage);
            let extent = segments.append(memory, chain, Permissions::Write);
            let is_buffer = extent.is_ok_and(|extent| extent.bytes > HEADER);
            if !is_buffer && self.buffers.is_empty() {
                tally.count(VsockCounter::RxBadChains);
                ring.give_back(memory, &[Used { head, len: 0 }])?;
                continue;
            }
            if !is_buffer || self.data.segments().len() + segments.segments().len() > MAX_SEGMENTS {
                ring.put_back(1);
                break;
            }
            segments.move_front(HEADER, &mut self.headers);
            let room = segments.bytes();
            segments.move_front(room, &mut self.data);
            held += room;
            self.buffers.push(Buffer { head, room });
        }
        Ok(())
    }

    /// Fills buffers with the host's data of a connection.
    fn fill(&mut self, muxer: &mut Muxer, ports: Ports, used: &mut Vec<Used>, tally: &mut Tally) {
        let mut rest = muxer.fill(ports, &mut self.data);
        tally.add(VsockCounter::RxBytes, rest as u64);
        while let (1.., Some(buffer)) = (rest, self.buffers.get(used.len())) {
            let len = rest.min(buffer.room);
            rest -= len;
            let header = muxer.data_header(ports, len);
            self.write(used, &header, len);
        }
        muxer.end_turn(ports, tally);
    }

    /// Writes the header of the first buffer that is not in `used`, and adds the buffer there with `len` bytes of data.
    fn write(&self, used: &mut Vec<Used>, header: &Header, len: usize) {
        if let Some(Buffer { head, .. }) = self.buffers.get(used.len()) {
            self.headers.write_at(used.len() * HEADER, header.as_bytes());
            // One call reads less than 2 GiB.
            used.push(Used { head: *head, len: (HEADER + len) as u32 });
        }
    }
}
