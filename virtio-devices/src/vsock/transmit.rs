//! The transmit queue: the driver's packets to the host's sockets.

use vm_memory::Permissions;
use zerocopy::{FromZeros, IntoBytes};

use super::counters::VsockCounter;
use super::packet::Header;
use super::pass::{Next, Pass};
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Ring, Used};

/// The most packets before checking other queues, or a stop.
const BATCH: usize = 32;

/// The queue, and the storage of its segments.
pub(crate) struct Transmit<'q> {
    ring: Ring<'q>,
    storage: Storage,
}

impl<'q> Transmit<'q> {
    pub(crate) fn new(ring: Ring<'q>) -> Self {
        Self { ring, storage: Storage::default() }
    }

    /// Takes up to [`BATCH`] packets, while there is room for the packets that they cause.
    pub(crate) fn run(&mut self, pass: &mut Pass<'_>) -> Result<Next, BrokenRing> {
        let Self { ring, storage } = self;
        ring.suppress_doorbells(pass.memory)?;
        let mut next = Next::More;
        for _ in 0..BATCH {
            if !pass.muxer.takes_packets() {
                next = Next::Room;
                break;
            }
            let Some(chain) = ring.next(pass.memory)? else {
                next = if ring.expect_doorbell(pass.memory)? { Next::More } else { Next::Doorbell };
                break;
            };
            let head = chain.head_index();
            let mut segments = IoVecs::new(storage);
            if segments.append(pass.memory, chain, Permissions::Read).is_ok() {
                let mut header = Header::new_zeroed();
                if segments.take_front(header.as_mut_bytes()) {
                    pass.muxer.receive(&header, &mut segments, pass.now, pass.tally);
                } else {
                    pass.tally.count(VsockCounter::TxBadPackets);
                }
            } else {
                pass.tally.count(VsockCounter::TxBadChains);
            }
            ring.give_back(pass.memory, &[Used { head, len: 0 }])?;
        }
        pass.interrupt(ring)?;
        Ok(next)
    }
}
