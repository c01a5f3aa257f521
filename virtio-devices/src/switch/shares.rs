//! The ports' shares of an uplink's rate.
//!
//! The uplink's rate is divided among the ports that send to it: each has its guaranteed rate, and a part of the rest
//! by its weight. The share that a port cannot use goes to the others. So each competing port has a bucket of its own,
//! which refills at its current share, and a frame over the share waits in its ring for the time that the share needs.
//! The buckets are filled on demand, by the time that has passed.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use crate::frames::net_protocol::MAX_FRAME;
use crate::os::clock;
use crate::state::{BucketState, StateError};

use super::table::PortIndex;

/// The bytes per nanosecond of one Mbit/s.
const MBIT: f64 = 1e6 / 8.0 / 1e9;
/// The least capacity of a bucket, in bytes: a segment of 64 KiB and the longest frame, as for other limits.
const LEAST: f64 = (64 << 10) as f64 + MAX_FRAME as f64;
/// The time for which a bucket holds its rate, in nanoseconds, if that is more: a worker that comes late loses nothing.
const HELD: f64 = 10e6;
/// The longest wait before a port tries again: others may have stopped sending, which increases its share.
const LONGEST: Duration = Duration::from_millis(10);
/// The time for which a port that could send and does not still counts as competing.
const GRACE: Duration = Duration::from_millis(10);
/// The least time between two fillings for each port that competes: about ten times as long as one takes.
const REST: Duration = Duration::from_nanos(200);
/// The rounds in which the excess of full buckets is divided among the others; the rest is spare.
const TURNS: usize = 4;

/// The rate of an uplink, and its division among the ports.
#[derive(Debug)]
pub(crate) struct Shares {
    /// In bytes a nanosecond.
    rate: f64,
    /// The bytes that no competing port had room for: a port without tokens takes from them.
    spare: f64,
    /// The time of the last filling.
    filled: Instant,
    ports: Box<[Share]>,
    /// The ports that compete.
    competing: Vec<PortIndex>,
    /// The sum of their guaranteed rates.
    guaranteed: f64,
    /// The sum of their weights.
    weights: f64,
}

/// A port's share of the uplink's rate.
#[derive(Debug, Clone)]
struct Share {
    /// The guaranteed rate, in bytes a nanosecond.
    guaranteed: f64,
    /// The weight for the rest.
    weight: f64,
    /// The content of its bucket, in bytes; negative if it owes.
    tokens: f64,
    /// The time until which it competes.
    until: Option<Instant>,
}

impl Share {
    /// The room in its bucket.
    fn room(&self) -> f64 {
        (LEAST.max(self.guaranteed * HELD) - self.tokens).max(0.0)
    }
}

impl Shares {
    /// The shares of an uplink of `rate` Mbit/s, for ports of this weight without guarantees.
    pub(crate) fn new(rate: NonZeroU32, ports: u16, weight: u8) -> Self {
        let rate = f64::from(rate.get()) * MBIT;
        let share = Share { guaranteed: 0.0, weight: f64::from(weight.max(1)), tokens: 0.0, until: None };
        let ports = vec![share; usize::from(ports)].into();
        let (spare, filled, competing) = (Self::most_spare(rate), clock::now(), Vec::new());
        Self { rate, spare, filled, ports, competing, guaranteed: 0.0, weights: 0.0 }
    }

    fn most_spare(rate: f64) -> f64 {
        LEAST.max(rate * HELD)
    }

    /// Sets the guaranteed rate of a port in Mbit/s, and its weight.
    pub(crate) fn set(&mut self, port: PortIndex, guaranteed: u32, weight: u8) {
        if let Some(share) = self.ports.get_mut(usize::from(port)) {
            share.guaranteed = f64::from(guaranteed) * MBIT;
            share.weight = f64::from(weight.max(1));
        }
        self.sum_up();
    }

    /// The time that a port must wait before it may send another frame; `None` if it may now.
    pub(crate) fn limited_for(&mut self, port: PortIndex) -> Option<Duration> {
        let now = clock::now();
        let has_some = |share: &Share| share.until.is_some() && share.tokens > 0.0;
        if !self.ports.get(usize::from(port)).is_some_and(has_some) {
            self.fill(now);
            self.join(port);
        }
        let (own, rest) = (self.rate_of(port), self.rest());
        let Self { ports, spare, .. } = self;
        let share = ports.get_mut(usize::from(port))?;
        if share.tokens <= 0.0 && *spare > 0.0 {
            let taken = spare.min(LEAST - share.tokens);
            *spare -= taken;
            share.tokens += taken;
        }
        let wait = (share.tokens <= 0.0).then(|| {
            // A waiting port needs one byte.
            let nanos = (1.0 - share.tokens) / own;
            Duration::from_nanos(nanos.ceil() as u64).max(rest).min(LONGEST)
        });
        share.until = Some(now + wait.unwrap_or_default() + GRACE);
        wait
    }

    /// Charges the bytes that a port has sent.
    pub(crate) fn take(&mut self, port: PortIndex, bytes: usize) {
        if let Some(share) = self.ports.get_mut(usize::from(port)) {
            share.tokens -= bytes as f64;
        }
    }

    /// Adds a port to those that compete.
    fn join(&mut self, port: PortIndex) {
        if let Some(share) = self.ports.get_mut(usize::from(port))
            && share.until.is_none()
        {
            share.until = Some(self.filled);
            self.competing.push(port);
            self.sum_up();
        }
    }

    fn sum_up(&mut self) {
        let shares = || self.competing.iter().filter_map(|port| self.ports.get(usize::from(*port)));
        let guaranteed = shares().map(|share| share.guaranteed).sum();
        let weights = shares().map(|share| share.weight).sum();
        (self.guaranteed, self.weights) = (guaranteed, weights);
    }

    /// The least time between two fillings.
    fn rest(&self) -> Duration {
        REST.saturating_mul(u32::try_from(self.competing.len()).unwrap_or(u32::MAX))
    }

    /// The rate at which a competing port's bucket refills while no other is full.
    fn rate_of(&self, port: PortIndex) -> f64 {
        let share = self.ports.get(usize::from(port));
        share.map_or(self.rate, |share| {
            share.guaranteed + (self.rate - self.guaranteed).max(0.0) * share.weight / self.weights.max(share.weight)
        })
    }

    /// Divides the bytes since the last filling.
    fn fill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.filled);
        if elapsed < self.rest() {
            return;
        }
        let elapsed = elapsed.as_nanos() as f64;
        self.filled = now;
        let mut left = self.rate * elapsed + self.retire(now);
        let Self { ports, competing, .. } = self;
        for port in competing.iter() {
            let Some(share) = ports.get_mut(usize::from(*port)) else { continue };
            let given = (share.guaranteed * elapsed).min(share.room()).min(left);
            share.tokens += given;
            left -= given;
        }
        // The others get the excess of full buckets.
        for _ in 0..TURNS {
            let open = |port: &PortIndex| ports.get(usize::from(*port)).filter(|share| share.room() > 0.0);
            let weights: f64 = competing.iter().filter_map(open).map(|share| share.weight).sum();
            if weights <= 0.0 || left < 1.0 {
                break;
            }
            let whole = left;
            for port in competing.iter() {
                let Some(share) = ports.get_mut(usize::from(*port)) else { continue };
                let given = (whole * share.weight / weights).min(share.room()).min(left);
                share.tokens += given;
                left -= given;
            }
        }
        self.spare = (self.spare + left).min(Self::most_spare(self.rate));
    }

    /// Removes ports that have not tried to send for a while and owe nothing from those that compete. Returns the bytes
    /// in their buckets.
    fn retire(&mut self, now: Instant) -> f64 {
        let Self { ports, competing, .. } = self;
        let (before, mut left) = (competing.len(), 0.0);
        competing.retain(|port| {
            let Some(share) = ports.get_mut(usize::from(*port)) else { return false };
            if share.until.is_some_and(|until| until >= now) || share.tokens < 0.0 {
                return true;
            }
            share.until = None;
            left += std::mem::take(&mut share.tokens);
            false
        });
        if competing.len() != before {
            self.sum_up();
        }
        left
    }

    /// The debt of a port, as the time in which the uplink carries it; `None` if it owes nothing.
    pub(crate) fn save(&self, port: PortIndex) -> Option<BucketState> {
        let owed = self.ports.get(usize::from(port)).map_or(0.0, |share| -share.tokens);
        (owed > 0.0).then(|| BucketState { missing: (owed / self.rate).ceil() as u64, burst: 0 })
    }

    /// Restores a debt of [`Self::save`].
    ///
    /// # Errors
    ///
    /// Fails if no frame could have caused it.
    pub(crate) fn restore(&mut self, port: PortIndex, state: BucketState) -> Result<(), StateError> {
        let owed = state.missing as f64 * self.rate;
        // The time is rounded up to a nanosecond.
        if owed > MAX_FRAME as f64 + self.rate || state.burst != 0 {
            return Err(StateError::Value("a share of an uplink"));
        }
        if let Some(share) = self.ports.get_mut(usize::from(port)) {
            share.tokens = -owed;
            self.join(port);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
