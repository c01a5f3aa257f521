//! Transmit queues: frames from the driver to the tap (`virtio 1.4 §5.1.6.2`).

use std::io;
use std::os::fd::AsFd;

use vm_memory::{GuestMemoryMmap, Permissions};

use super::counters::Counter;
use super::filter::ETHERNET_HEADER;
use super::pass::{BATCH, Next, Pass};
use crate::iovecs::{IoVecs, Storage};
use crate::net_protocol::MAX_FRAME;
use crate::net_protocol::header::{self, HEADER};
use crate::ring::{BrokenRing, Chain, Ring, Used};

/// A transmit queue.
pub(crate) struct Transmit<'q> {
    ring: Ring<'q>,
    features: u64,
    storage: Storage,
    used: Vec<Used>,
}

impl<'q> Transmit<'q> {
    /// Takes frames from `ring`.
    pub(crate) fn new(ring: Ring<'q>, features: u64) -> Self {
        Self { ring, features, storage: Storage::default(), used: Vec::with_capacity(BATCH) }
    }

    /// Sends what the driver has made available and the limits let through, up to [`BATCH`] frames.
    ///
    /// A frame that cannot be sent is dropped and counted, also when the backend's buffer is full: a tap accepts as
    /// much as memory allows unless its owner has limited it, and waiting would let one slow receiver hold up all
    /// others' frames.
    pub(crate) fn run(&mut self, pass: &mut Pass<'_>) -> Result<Next, BrokenRing> {
        self.ring.suppress_doorbells(pass.memory)?;
        let mut drained = false;
        let mut limited = None;
        for _ in 0..BATCH {
            limited = pass.limits.transmit.limited_for();
            if limited.is_some() {
                break;
            }
            let Some(chain) = self.ring.next(pass.memory)? else {
                drained = true;
                break;
            };
            let head = chain.head_index();
            let counter = match Self::send(chain, pass, self.features, &mut self.storage) {
                Ok(len) => {
                    pass.limits.transmit.take(len);
                    pass.tally.add(Counter::TxBytes, len as u64);
                    Counter::TxFrames
                }
                Err(reason) => {
                    // What is dropped took time as well.
                    pass.limits.transmit.take(0);
                    reason
                }
            };
            pass.tally.count(counter);
            self.used.push(Used { head, len: 0 });
        }
        self.ring.give_back(pass.memory, &self.used)?;
        self.used.clear();
        pass.interrupt(&mut self.ring)?;
        if limited.is_none() && !drained {
            return Ok(Next::More);
        }
        match (self.ring.expect_doorbell(pass.memory)?, limited) {
            (false, _) => Ok(Next::Doorbell),
            (true, None) => Ok(Next::More),
            (true, Some(wait)) => {
                // The driver need not ring before the time is over.
                self.ring.suppress_doorbells(pass.memory)?;
                pass.tally.count(Counter::TxRateWaits);
                Ok(Next::Limited(wait))
            }
        }
    }

    /// Sends a frame, and returns its length or the reason why it is dropped.
    fn send<'m>(chain: Chain<'m>, pass: &Pass<'m>, features: u64, storage: &mut Storage) -> Result<usize, Counter> {
        let memory: &GuestMemoryMmap = pass.memory;
        let mut iovecs = IoVecs::new(storage);
        let extent = iovecs.append(memory, chain, Permissions::Read).map_err(|_| Counter::TxBadChains)?;
        // The header is checked and sent as a copy: what the guest writes to it afterwards changes nothing.
        let mut header = [0; HEADER];
        if !iovecs.take_front(&mut header) {
            return Err(Counter::TxTooShort);
        }
        let len = extent.bytes - HEADER;
        if len < ETHERNET_HEADER {
            return Err(Counter::TxTooShort);
        }
        if len > MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        let header = header::check(header, len, features).map_err(|_| Counter::TxBadHeaders)?;
        if !pass.state.link_up() {
            return Err(Counter::TxLinkDown);
        }
        iovecs.send(pass.backend.as_fd(), &header).map_err(|error| reason(&error))?;
        Ok(len)
    }
}

/// Why the backend did not take a frame.
fn reason(error: &io::Error) -> Counter {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Counter::TxBackendFull,
        Some(libc::EINVAL | libc::EMSGSIZE | libc::E2BIG) => Counter::TxBackendRefused,
        _ => Counter::TxBackendErrors,
    }
}
