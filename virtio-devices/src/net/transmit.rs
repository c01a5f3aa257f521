//! Transmit queues: frames from the driver to the tap (`virtio 1.4 §5.1.6.2`).

use std::io;
use std::os::fd::AsFd;

use vm_memory::Permissions;

use super::counters::Counter;
use super::enforced::Enforced;
use super::filter::{ETHERNET_HEADER, Mac, is_multicast};
use super::pass::{BATCH, Next, Pass};
use super::state::NetState;
use crate::DmaView;
use crate::device::failures::{Failures, RequestKind};
use crate::frames::net_protocol::MAX_FRAME;
use crate::frames::net_protocol::header::{self, HEADER, MAX_PACKETS};
use crate::frames::policy::{self, Head, NEW_HEAD};
use crate::frames::walk;
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Chain, Ring, Used};

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

    /// Sends available frames within the limits, up to [`BATCH`].
    ///
    /// A frame that cannot be sent is dropped and counted, also when the backend's buffer is full: a tap accepts as
    /// much as memory allows unless its owner has limited it, and waiting would let one slow receiver hold up all
    /// others' frames.
    pub(crate) fn run(&mut self, pass: &mut Pass<'_>) -> Result<Next, BrokenRing> {
        self.ring.suppress_doorbells(pass.memory)?;
        let policy = pass.policy.load();
        let (mut drained, mut worked) = (false, false);
        let mut limited = None;
        let mut spent = 0;
        for _ in 0..BATCH {
            if spent >= walk::TAP_BATCH_COST {
                break;
            }
            limited = policy.transmit.limited_for();
            if limited.is_some() {
                break;
            }
            let Some(chain) = self.ring.next(pass.memory)? else {
                drained = true;
                break;
            };
            let head = chain.head_index();
            let counter = match Self::send(chain, pass, &policy, self.features, (&mut self.storage, &mut spent)) {
                Ok((len, packets)) => {
                    worked = true;
                    policy.transmit.take(len, packets);
                    pass.tally.add(Counter::TxBytes, len as u64);
                    Counter::TxFrames
                }
                Err(reason) => {
                    // A dropped frame took time as well.
                    policy.transmit.take(0, 1);
                    pass.policy.note(reason);
                    reason
                }
            };
            pass.tally.count(counter);
            self.used.push(Used { head, len: 0 });
        }
        if worked {
            pass.failures.worked(RequestKind::Write);
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

    /// Sends a frame, and returns its length and its number of packets, or the reason why it is dropped.
    fn send<'m>(
        chain: Chain<'m>,
        pass: &Pass<'m>,
        policy: &Enforced,
        features: u64,
        (storage, spent): (&mut Storage, &mut usize),
    ) -> Result<(usize, u32), Counter> {
        let memory: &DmaView = pass.memory;
        let mut iovecs = IoVecs::new(storage);
        let appended = iovecs.append_within(memory, chain, Permissions::Read, walk::bounds(memory));
        let bytes = appended.map_or(0, |extent| extent.bytes.min(MAX_FRAME));
        *spent += bytes + walk::price(iovecs.take_walked(), bytes, memory);
        let extent = appended.map_err(|_| Counter::TxBadChains)?;
        // The header is checked and sent as a copy: later writes of the guest change nothing.
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
        // A single frame must not cause a debt of seconds, for which the guest's other frames would have to wait.
        let packets = header::packets(&header, len);
        if packets > MAX_PACKETS && policy.transmit.counts_packets() {
            return Err(Counter::TxBadHeaders);
        }
        if !pass.state.link_up() {
            return Err(Counter::TxLinkDown);
        }
        let fd = pass.backend.as_fd();
        let sent = if policy.checks_sent {
            let front = Front::checked(&mut iovecs, len, header, policy, pass.state)?;
            iovecs.send(fd, front.bytes())
        } else {
            iovecs.send(fd, &header)
        };
        sent.map_err(|error| reason(&error, pass.failures))?;
        Ok((len, packets))
    }
}

/// The header of a frame and its first bytes, as they were checked: later writes of the guest change nothing.
struct Front {
    bytes: [u8; HEADER + NEW_HEAD],
    len: usize,
}

impl Front {
    /// Takes the first bytes off the frame of `len` bytes in `iovecs`, and applies `policy` to them and to `header`; or
    /// returns the reason why the frame is dropped.
    fn checked(
        iovecs: &mut IoVecs<'_, '_>,
        len: usize,
        header: [u8; HEADER],
        policy: &Enforced,
        state: &NetState,
    ) -> Result<Self, Counter> {
        let mut copy = [0; policy::HEAD];
        let copy = &mut copy[..len.min(policy::HEAD)];
        if !iovecs.take_front(copy) {
            return Err(Counter::TxTooShort);
        }
        let head = Head::of(copy)?;
        let is_further = |mac: &Mac| state.filter().unicast.addresses().contains(mac);
        let new = policy.policy.ingress(&head, state.mac(), is_further)?;
        let header = policy::changed(header, &new).map_err(|_| Counter::TxBadHeaders)?;
        if new.new_len(len) > MAX_FRAME {
            return Err(Counter::TxTooLong);
        }
        if policy.policy.storm.is_some() && is_multicast(&head.destination()) {
            let packets = header::packets(&header, len);
            if !policy.storm.allows(packets) {
                return Err(Counter::StormDropped);
            }
            policy.storm.take(0, packets);
        }
        let (mut bytes, head) = ([0; HEADER + NEW_HEAD], new.bytes());
        bytes[..HEADER].copy_from_slice(&header);
        bytes[HEADER..HEADER + head.len()].copy_from_slice(head);
        Ok(Self { bytes, len: HEADER + head.len() })
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The reason why the backend did not accept a frame. Failures of the backend are recorded in `failures`.
pub(crate) fn reason(error: &io::Error, failures: &Failures) -> Counter {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => return Counter::TxBackendFull,
        Some(libc::EINVAL | libc::EMSGSIZE | libc::E2BIG) => return Counter::TxBackendRefused,
        // A deleted tap is lost, and reported as such.
        Some(libc::EBADFD) => {}
        _ => failures.failed(RequestKind::Write, error),
    }
    Counter::TxBackendErrors
}
