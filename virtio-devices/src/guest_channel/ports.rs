//! The worker: chains of all queues of a channel.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_memory::Permissions;

use super::control::{self, Told};
use super::counters::{ChannelCounter, Tally};
use super::end::ChannelEnd;
use super::exchange::Blocked;
use super::outbox::Outbox;
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::os::clock;
use crate::os::eventfd::borrow;
use crate::queue::iovecs::IoVecs;
use crate::queue::ring::Chain;

// Queues (`virtio 1.4 §5.3.2`): the driver receives from those with even numbers.
/// Replies.
pub(super) const REPLIES: u16 = 0;
/// Requests.
pub(super) const REQUESTS: u16 = 1;
/// Control messages to the driver.
pub(super) const TO_DRIVER: u16 = 2;
/// Control messages of the driver.
pub(super) const OF_DRIVER: u16 = 3;
/// Notices.
pub(super) const NOTICES: u16 = 4;
/// Most bytes transferred at once.
const PART: usize = 4096;
/// The most bytes of one chain that are read. Linux transmits 32 KiB at most.
pub(super) const MAX_CHAIN: usize = 64 << 10;

/// The ports of a channel.
pub(super) struct Ports {
    end: Arc<ChannelEnd>,
    /// Number of resets of the device when its queues started.
    epoch: u64,
    names: [&'static str; 2],
    /// True if the driver knows ports.
    multiport: bool,
    /// True while requests are dropped before the port of their writer is closed.
    closing: bool,
    /// True if a chain of requests was handled since all queues were last checked.
    moved: bool,
    /// True if a queue that was checked before may have something to do.
    again: bool,
}

impl Ports {
    /// Creates the ports that `end` is of, for the present driver.
    pub(super) fn new(end: Arc<ChannelEnd>, names: [&'static str; 2], multiport: bool) -> Self {
        let epoch = end.epoch();
        Self { end, epoch, names, multiport, closing: false, moved: false, again: false }
    }

    /// Takes requests of the guest. A chain whose requests must wait is continued where it was left.
    fn requests<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, stop, storage: [storage, _], tally, .. } = context;
        self.moved = true;
        let mut iovecs = IoVecs::new(storage);
        let is_sound = iovecs.append(memory, chain, Permissions::Read).is_ok();
        let Some((is_open, mut taken)) = self.end.with(self.epoch, |exchange| {
            let driver = &mut exchange.driver;
            let is_read = is_sound && driver.open[0] && !self.closing;
            if !is_read {
                driver.taken = 0;
            }
            (is_read, driver.taken)
        }) else {
            return ChainResult::Stopped;
        };
        if !is_open {
            tally.add(ChannelCounter::TxBadChains, u64::from(!is_sound));
            if is_sound {
                tally.add(ChannelCounter::Dropped, iovecs.bytes() as u64);
            }
            return ChainResult::Used(0);
        }
        let mut part = [0; PART];
        let mut done = false;
        while !done {
            if stop.load(Ordering::Acquire) {
                return ChainResult::Stopped;
            }
            let room = part.get_mut(..PART.min(MAX_CHAIN.saturating_sub(taken))).unwrap_or_default();
            let len = iovecs.read_at(taken, room);
            let fed = self.end.with(self.epoch, |exchange| {
                let fed = exchange.feed(room.get(..len).unwrap_or_default(), clock::now());
                // A chain that ends here leaves nothing to continue.
                let next = taken + fed.bytes;
                done = fed.blocked.is_none() && (len < PART || next >= MAX_CHAIN);
                exchange.driver.taken = if done { 0 } else { next };
                fed
            });
            let Some(fed) = fed else { return ChainResult::Stopped };
            taken += fed.bytes;
            tally.add(ChannelCounter::TxBytes, fed.bytes as u64);
            tally.add(ChannelCounter::Lines, fed.lines);
            tally.add(ChannelCounter::LongLines, fed.too_long);
            if fed.lines > 0 {
                self.end.lines_arrived();
            }
            match fed.blocked {
                None => {}
                Some(Blocked::Full) => {
                    tally.count(ChannelCounter::Full);
                    return ChainResult::Waits;
                }
                Some(Blocked::Limited(pause)) => {
                    tally.count(ChannelCounter::Limited);
                    return ChainResult::Later(pause);
                }
            }
        }
        tally.add(ChannelCounter::TxTooLong, u64::from(iovecs.bytes() > taken));
        ChainResult::Used(0)
    }

    /// Drops bytes that the guest writes to port 1.
    fn dropped<'m>(chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, storage: [storage, _], tally, .. } = context;
        let mut iovecs = IoVecs::new(storage);
        match iovecs.append(memory, chain, Permissions::Read) {
            Ok(_) => tally.add(ChannelCounter::Dropped, iovecs.bytes() as u64),
            Err(_) => tally.count(ChannelCounter::TxBadChains),
        }
        ChainResult::Used(0)
    }

    /// Handles a control message of the driver.
    fn of_driver<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, storage: [storage, _], tally, .. } = context;
        let mut iovecs = IoVecs::new(storage);
        let mut message = [0; control::LEN];
        let is_sound = iovecs.append(memory, chain, Permissions::Read).is_ok();
        if !is_sound || iovecs.read_at(0, &mut message) < message.len() {
            tally.count(ChannelCounter::TxBadChains);
            return ChainResult::Used(0);
        }
        let told = if self.multiport { Told::of(message) } else { Told::Unknown };
        if matches!(told, Told::PortOpen(0, _)) {
            // What the queue of requests has now is of the former program. So it is dropped before the driver sees that
            // the port is closed, and before it lets another program open it.
            if !std::mem::replace(&mut self.closing, true) || self.moved {
                return ChainResult::AfterOthers;
            }
        }
        self.closing = false;
        let done = self.end.with(self.epoch, |exchange| match told {
            Told::DeviceReady => exchange.driver.owed.ports(),
            Told::PortReady(port) => exchange.driver.owed.port(port),
            Told::PortOpen(0, open) => exchange.set_control_open(open),
            Told::PortOpen(_, open) => exchange.set_events_open(open),
            Told::Failed | Told::Unknown => {}
        });
        if done.is_none() {
            return ChainResult::Stopped;
        }
        tally.add(ChannelCounter::Openings, u64::from(matches!(told, Told::PortOpen(_, true))));
        tally.add(ChannelCounter::BadMessages, u64::from(told == Told::Unknown));
        self.again = true;
        ChainResult::Used(0)
    }

    /// Gives the driver bytes that `take` has for it. It returns their number, or `None` if the driver must first
    /// provide more room.
    fn give<'m>(
        &self,
        chain: Chain<'m>,
        context: ChainContext<'_, 'm, Tally>,
        take: impl FnOnce(&mut super::exchange::Exchange, &mut [u8]) -> Option<usize>,
    ) -> ChainResult {
        let ChainContext { memory, storage: [storage, _], tally, .. } = context;
        let mut iovecs = IoVecs::new(storage);
        let room = iovecs.append(memory, chain, Permissions::Write).map_or(0, |extent| extent.bytes);
        let mut part = [0; PART];
        let taken = if room == 0 {
            Some(None)
        } else {
            let part = part.get_mut(..room.min(PART)).unwrap_or_default();
            self.end.with(self.epoch, |exchange| take(exchange, part))
        };
        match taken {
            None => ChainResult::Stopped,
            Some(None) => {
                tally.count(ChannelCounter::RxBadChains);
                ChainResult::Used(0)
            }
            Some(Some(0)) => ChainResult::Waits,
            Some(Some(len)) => {
                let written = iovecs.write_at(0, part.get(..len).unwrap_or_default());
                tally.add(ChannelCounter::RxBytes, written as u64);
                // At most PART.
                ChainResult::Used(written as u32)
            }
        }
    }

    /// Gives the driver the next control message that it is owed.
    fn to_driver<'m>(&self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        self.give(chain, context, |exchange, part| {
            let owed = &mut exchange.driver.owed;
            let Some(message) = owed.next(self.names) else { return Some(0) };
            part.get_mut(..message.len())?.copy_from_slice(&message);
            owed.sent();
            Some(message.len())
        })
    }
}

impl QueueHandler for Ports {
    type Tally = Tally;

    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let next = |outbox: &mut Outbox, part: &mut [u8]| Some(outbox.take(part));
        match context.queue {
            REPLIES => self.give(chain, context, |exchange, part| next(&mut exchange.driver.replies, part)),
            REQUESTS => self.requests(chain, context),
            TO_DRIVER => self.to_driver(chain, context),
            OF_DRIVER => self.of_driver(chain, context),
            NOTICES => self.give(chain, context, |exchange, part| next(&mut exchange.driver.notices, part)),
            _ => Self::dropped(chain, context),
        }
    }

    fn after_look(&mut self, tally: &mut Tally) -> Option<Duration> {
        self.moved = false;
        let lost = self.end.with(self.epoch, |exchange| std::mem::take(&mut exchange.lost_notices));
        tally.add(ChannelCounter::LostNotices, lost.unwrap_or_default());
        std::mem::take(&mut self.again).then_some(Duration::ZERO)
    }

    /// Also waits for something that the host has for the guest.
    fn wait(&mut self, kick: BorrowedFd<'_>, timeout: Option<Duration>) {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let fds = [kick, borrow(self.end.wake())].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // If this fails (no memory), the queues are checked and the wait is repeated.
        let _ = poll(&mut { fds }, timeout.as_ref());
        // Before the queues are checked, so that nothing is missed.
        let _ = self.end.wake().read();
    }
}
