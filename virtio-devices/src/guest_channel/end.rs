//! The host's end of a channel.

use std::io;
use std::time::Instant;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::exchange::{Exchange, MAX_WAITING_NOTICES, RATE};
use crate::os::clock;
use crate::state::ChannelState;
use crate::{RateLimit, StateError};

/// The host's end of a guest's channel, shared with its device. No call waits for the guest.
#[derive(Debug)]
pub struct ChannelEnd {
    exchange: Mutex<Exchange>,
    /// Readable while lines may wait for the host.
    arrived: EventFd,
    /// Wakes the worker: there may be something for the guest.
    wake: EventFd,
}

/// A line of the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct ChannelLine {
    /// The opening of the port that it is of, for [`ChannelEnd::answer`].
    pub opening: u64,
    /// The line without its newline, any bytes; `None` if it was longer than [`MAX_LINE`](crate::MAX_LINE).
    pub bytes: Option<Vec<u8>>,
}

impl ChannelEnd {
    /// Creates the end of a channel.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Self::with_rate(Some(RATE), clock::now())
    }

    /// As [`Self::new`], with another limit of requests.
    pub(super) fn with_rate(rate: Option<RateLimit>, now: Instant) -> io::Result<Self> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        Ok(Self { exchange: Mutex::new(Exchange::new(rate, now)), arrived: event()?, wake: event()? })
    }

    /// Readable while lines of the guest may wait.
    pub fn event(&self) -> &EventFd {
        &self.arrived
    }

    /// The next line of the guest. Each must be answered; until then it counts as waiting.
    pub fn take(&self) -> Option<ChannelLine> {
        let mut exchange = self.exchange.lock();
        let line = exchange.driver.lines.pop_front();
        if exchange.driver.lines.is_empty() {
            // The worker signals it again for each line that it adds.
            let _ = self.arrived.read();
        }
        let bytes = line?;
        exchange.in_hand += 1;
        Some(ChannelLine { opening: exchange.opening, bytes })
    }

    /// Sends the reply for a line of this opening: one line with its newline, of at most
    /// [`MAX_MESSAGE`](crate::MAX_MESSAGE) bytes. It is dropped if the port was closed since.
    pub fn answer(&self, opening: u64, reply: Vec<u8>) {
        let mut exchange = self.exchange.lock();
        if exchange.opening != opening || exchange.in_hand == 0 {
            return;
        }
        exchange.in_hand -= 1;
        exchange.driver.replies.push(reply);
        drop(exchange);
        self.wake_worker();
    }

    /// Sends a notice, of the same form, to the program that has port 1 open. If too many wait, the oldest is dropped.
    pub fn announce(&self, notice: Vec<u8>) {
        let mut exchange = self.exchange.lock();
        if !exchange.driver.open[1] {
            return;
        }
        if exchange.driver.notices.len() >= MAX_WAITING_NOTICES {
            exchange.driver.notices.drop_oldest();
            exchange.lost_notices += 1;
        }
        exchange.driver.notices.push(notice);
        drop(exchange);
        self.wake_worker();
    }

    /// True if a line waits for the host.
    pub fn has_lines(&self) -> bool {
        !self.exchange.lock().driver.lines.is_empty()
    }

    /// Present number of resets of the device.
    pub(super) fn epoch(&self) -> u64 {
        self.exchange.lock().epoch
    }

    /// Calls `act` with the state; `None` if the device was reset since it had this number of resets.
    pub(super) fn with<T>(&self, epoch: u64, act: impl FnOnce(&mut Exchange) -> T) -> Option<T> {
        let mut exchange = self.exchange.lock();
        (exchange.epoch == epoch).then(|| act(&mut exchange))
    }

    /// Eventfd that wakes the worker.
    pub(super) const fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Signals that lines wait.
    pub(super) fn lines_arrived(&self) {
        // A full counter is readable already.
        let _ = self.arrived.write(1);
    }

    /// Ends everything of the driver.
    pub(super) fn reset(&self) {
        self.exchange.lock().reset();
    }

    /// The driver's part of the state.
    pub(super) fn save(&self) -> ChannelState {
        self.exchange.lock().driver.save()
    }

    /// Restores the driver's part.
    ///
    /// # Errors
    ///
    /// Fails if no driver could have caused it.
    pub(super) fn restore(&self, state: &ChannelState) -> Result<(), StateError> {
        self.exchange.lock().driver.restore(state)?;
        self.lines_arrived();
        Ok(())
    }

    fn wake_worker(&self) {
        // A full counter has woken the worker.
        let _ = self.wake.write(1);
    }
}
