//! Lines, replies and notices between the worker and the host, with their limits.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::control::Owed;
use super::lines::{Piece, Splitter};
use super::outbox::Outbox;
use crate::{RateLimit, RateLimiter};

/// The most requests that are not answered, or whose replies were not read.
pub(super) const MAX_WAITING: usize = 8;
/// The most notices that wait to be read. Then the oldest are dropped.
pub const MAX_WAITING_NOTICES: usize = 64;
/// The rate of requests: 100 in a second, and as many at once.
pub(super) const RATE: RateLimit = RateLimit { size: 100, one_time_burst: 0, refill: Duration::from_secs(1) };

/// State of a channel that outlives workers.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Number of resets: a worker of an earlier driver changes nothing.
    pub epoch: u64,
    /// Number of times that port 0 was opened, closed or reset: a reply for an earlier opening is dropped.
    pub opening: u64,
    pub driver: DriverPart,
    /// Lines that the host has taken and not answered, of this opening.
    pub in_hand: usize,
    /// The rate of requests; `None` for any.
    pub limiter: Option<RateLimiter>,
    /// Notices dropped since the worker counted them.
    pub lost_notices: u64,
}

/// The part of a channel's state that its driver causes, and that a reset ends.
#[derive(Debug, Default)]
pub(super) struct DriverPart {
    /// Control messages that the driver is owed.
    pub owed: Owed,
    /// Ports that a program of the guest has open.
    pub open: [bool; 2],
    /// Bytes that were taken of the chain at the head of port 0's transmit queue.
    pub taken: usize,
    pub splitter: Splitter,
    /// Lines that the host has not taken. `None` for one that was too long.
    pub lines: VecDeque<Option<Vec<u8>>>,
    pub replies: Outbox,
    pub notices: Outbox,
}

/// Reason why bytes were left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blocked {
    /// Too many requests wait.
    Full,
    /// There were too many requests, for this time.
    Limited(Duration),
}

/// Effect of bytes that were fed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Fed {
    /// Bytes that were taken.
    pub bytes: usize,
    /// Lines that the host can take now.
    pub lines: u64,
    /// Number of lines among them that were too long.
    pub too_long: u64,
    /// Reason why the others were left.
    pub blocked: Option<Blocked>,
}

impl Exchange {
    /// A channel whose requests are limited to `rate`.
    pub(super) fn new(rate: Option<RateLimit>, now: Instant) -> Self {
        Self {
            epoch: 0,
            opening: 0,
            driver: DriverPart::default(),
            in_hand: 0,
            limiter: rate.map(|rate| RateLimiter::of_ops(rate, now)),
            lost_notices: 0,
        }
    }

    /// Ends everything of the driver.
    pub(super) fn reset(&mut self) {
        self.epoch += 1;
        self.opening += 1;
        self.in_hand = 0;
        self.driver = DriverPart::default();
    }

    /// Notes that a program opened port 0, or closed it: nothing of its predecessor is left.
    pub(super) fn set_control_open(&mut self, open: bool) {
        self.opening += 1;
        self.in_hand = 0;
        let driver = &mut self.driver;
        driver.open[0] = open;
        // The worker drops the rest of a chain, but not that of a ring that is broken.
        driver.taken = 0;
        driver.splitter = Splitter::default();
        driver.lines.clear();
        driver.replies.clear();
    }

    /// Notes that a program opened port 1, or closed it: it reads what is announced from then on.
    pub(super) fn set_events_open(&mut self, open: bool) {
        self.driver.open[1] = open;
        self.driver.notices.clear();
    }

    /// Divides `bytes` of the guest into lines for the host, as far as the limits allow.
    pub(super) fn feed(&mut self, bytes: &[u8], now: Instant) -> Fed {
        let mut fed = Fed::default();
        while let Some(rest) = bytes.get(fed.bytes..).filter(|rest| !rest.is_empty()) {
            let piece = self.driver.splitter.next(rest);
            let len = match piece {
                Piece::Part(len) => len,
                Piece::Line(len) | Piece::TooLong(len) => {
                    if let Some(blocked) = self.blocked(now) {
                        fed.blocked = Some(blocked);
                        break;
                    }
                    self.limiter.iter_mut().for_each(|limiter| limiter.take_op(now));
                    len
                }
            };
            let line = self.driver.splitter.take(&piece, rest);
            if !matches!(piece, Piece::Part(_)) {
                fed.lines += 1;
                fed.too_long += u64::from(line.is_none());
                self.driver.lines.push_back(line);
            }
            fed.bytes += len;
        }
        fed
    }

    /// Reason why no request can be taken from the guest.
    fn blocked(&self, now: Instant) -> Option<Blocked> {
        if self.driver.lines.len() + self.in_hand + self.driver.replies.len() >= MAX_WAITING {
            return Some(Blocked::Full);
        }
        let wait = self.limiter.as_ref().map_or(Duration::ZERO, |limiter| limiter.wait(now));
        (!wait.is_zero()).then_some(Blocked::Limited(wait))
    }
}
