//! The policy of a NIC in force: what its workers read for each batch of frames, and how the host replaces it.

mod limits;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use self::limits::{Limit, of_frames, of_rate};
use super::counters::Counter;
use crate::RateLimits;
use crate::frames::policy::{Cause, Holder, Policy, Replaced, Retired};
use crate::state::{BucketsState, StateError};

/// A policy, with its buckets.
#[derive(Debug)]
pub(crate) struct Enforced {
    /// The policy.
    pub policy: Policy,
    /// True if sent frames are checked.
    pub checks_sent: bool,
    /// True if received frames are checked.
    pub checks_received: bool,
    /// True if there may be frames that the guest must never see.
    pub may_hide: bool,
    /// The number of the policy among the function's policies, from 0.
    pub number: u64,
    /// The receive limit.
    pub receive: Limit,
    /// The transmit limit.
    pub transmit: Limit,
    /// The limit of frames to groups.
    pub storm: Limit,
    limits: RateLimits,
    /// The part of the transmit limit that `limits` has.
    of_limits: Limit,
    /// The part of it that is the policy's rate.
    of_rate: Limit,
}

impl Enforced {
    /// Creates a policy. Buckets are full, except those of `before` whose limits are the same, and that of a rate in
    /// the place of another: a guest that changes its rate gains nothing by it.
    fn new(policy: Policy, limits: RateLimits, before: Option<&Self>) -> Self {
        let same = before.filter(|before| before.limits == limits);
        let receive = same.map_or_else(|| Limit::new(&[limits]), |before| before.receive.clone());
        let of_limits = same.map_or_else(|| Limit::new(&[limits]), |before| before.of_limits.clone());
        let before_rate = before.and_then(|before| Some((before.policy.max_tx_rate?, &before.of_rate)));
        let of_rate = match (policy.max_tx_rate, before_rate) {
            (Some(rate), Some((same, before))) if same == rate => before.clone(),
            (Some(rate), Some((_, before))) => Limit::of_rate_after(rate, before),
            (rate, _) => Limit::new(&rate.map(of_rate).into_iter().collect::<Vec<_>>()),
        };
        let transmit = of_limits.and(&of_rate);
        let same = before.filter(|before| before.policy.storm == policy.storm);
        let storm: Vec<_> = policy.storm.map(of_frames).into_iter().collect();
        let storm = same.map_or_else(|| Limit::new(&storm), |before| before.storm.clone());
        let (checks_sent, checks_received) = (policy.checks_sent(), policy.checks_received());
        let may_hide = checks_received || !policy.trusted;
        let number = before.map_or(0, |before| before.number.wrapping_add(1));
        Self {
            checks_sent,
            checks_received,
            may_hide,
            number,
            receive,
            transmit,
            storm,
            policy,
            limits,
            of_limits,
            of_rate,
        }
    }
}

impl Enforced {
    /// The state of its buckets, without the debt of a switch's port.
    pub(crate) fn save(&self) -> BucketsState {
        let Self { receive, transmit, storm, .. } = self;
        if [receive, transmit, storm].iter().all(|limit| limit.is_full()) {
            return BucketsState::default();
        }
        let (receive, transmit, storm) = (receive.save(), transmit.save(), storm.save());
        BucketsState { receive, transmit, storm, uplink: None }
    }

    /// Sets the levels of its buckets, which are full, from `state`.
    ///
    /// # Errors
    ///
    /// Fails if the state is for other limits, or impossible.
    pub(crate) fn restore(&self, state: &BucketsState) -> Result<(), StateError> {
        if state.are_full() {
            return Ok(());
        }
        self.receive.restore(&state.receive)?;
        self.transmit.restore(&state.transmit)?;
        self.storm.restore(&state.storm)
    }
}

/// An action of the driver that concerns its function's policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyNotice {
    /// The driver has changed its address.
    AddressChanged {
        /// The new address.
        mac: [u8; 6],
    },
    /// The driver sent a frame from an address that is not its own: for the first time, or twice as often as at the
    /// last notice.
    Spoofed {
        /// The number of such frames so far.
        frames: u64,
    },
}

/// A callback for notices, on a worker's thread, which must not wait.
pub type PolicyObserver = Box<dyn Fn(PolicyNotice) + Send>;

/// The policy of a function, which outlives its resets.
pub(crate) struct PolicyCell {
    current: ArcSwap<Enforced>,
    retired: Retired,
    spoofed: AtomicU64,
    observer: Mutex<Option<PolicyObserver>>,
}

impl PolicyCell {
    /// A policy with full buckets.
    pub(crate) fn new(policy: Policy, limits: RateLimits) -> Self {
        let current = ArcSwap::from_pointee(Enforced::new(policy, limits, None));
        Self { current, retired: Retired::new(Holder::Nic), spoofed: AtomicU64::new(0), observer: Mutex::new(None) }
    }

    /// The policy for a batch of frames. The caller drops it after the batch.
    pub(crate) fn load(&self) -> Guard<Arc<Enforced>> {
        self.current.load()
    }

    /// Replaces the policy for all batches that begin from now on.
    pub(crate) fn replace(&self, policy: Policy, limits: RateLimits) -> Replaced {
        let next = Enforced::new(policy, limits, Some(&self.current.load()));
        self.retired.retire(self.current.swap(Arc::new(next)))
    }

    /// Calls `observer` on each notice from now on.
    pub(crate) fn observe(&self, observer: PolicyObserver) {
        *self.observer.lock() = Some(observer);
    }

    /// Records that the driver has changed its address.
    pub(crate) fn note_address(&self, mac: [u8; 6]) {
        self.notify(PolicyNotice::AddressChanged { mac });
    }

    /// Records a dropped frame.
    pub(crate) fn note(&self, reason: Counter) {
        if reason != Counter::TxSpoofedMac {
            return;
        }
        let frames = self.spoofed.fetch_add(1, Ordering::Relaxed) + 1;
        if frames.is_power_of_two() {
            self.notify(PolicyNotice::Spoofed { frames });
        }
    }

    fn notify(&self, notice: PolicyNotice) {
        if let Some(observer) = &*self.observer.lock() {
            observer(notice);
        }
    }
}

impl fmt::Debug for PolicyCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyCell").field("current", &*self.current.load()).finish_non_exhaustive()
    }
}

impl From<Cause> for Counter {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::SpoofedAddress => Self::TxSpoofedMac,
            Cause::BadVlan => Self::TxBadVlan,
            Cause::ReservedGroup => Self::TxReservedGroup,
            Cause::OtherVlan => Self::RxVlanFiltered,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::RateLimit;

    fn cell(policy: Policy) -> PolicyCell {
        PolicyCell::new(policy, RateLimits::default())
    }

    #[test]
    fn a_policy_is_replaced_when_the_batches_of_before_are_over() {
        let cell = cell(Policy::default());
        cell.replace(Policy::default(), RateLimits::default()).wait().unwrap();
        thread::scope(|scope| {
            let batch = cell.load();
            let replaced = cell.replace(Policy { spoof_check: true, ..Policy::default() }, RateLimits::default());
            assert!(cell.load().checks_sent && !batch.checks_sent);
            let waiting = scope.spawn(|| replaced.wait());
            thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            drop(batch);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_change_of_something_else_refills_no_bucket() {
        let limit = RateLimit { size: 1, one_time_burst: 0, refill: Duration::from_secs(3600) };
        let limits = RateLimits { ops: Some(limit), bandwidth: None };
        let policy = Policy { storm: NonZeroU32::new(1), max_tx_rate: NonZeroU32::new(1), ..Policy::default() };
        let cell = PolicyCell::new(policy.clone(), limits);
        let empty = || {
            let now = cell.load();
            [&now.receive, &now.transmit, &now.storm].map(|limit| limit.limited_for().is_some())
        };
        assert_eq!(empty(), [false; 3]);
        {
            let now = cell.load();
            [&now.receive, &now.transmit, &now.storm]
                .iter()
                .for_each(|limit| (0..2).for_each(|_| limit.take(1 << 20, 1)));
        }
        assert_eq!(empty(), [true; 3]);
        cell.replace(Policy { spoof_check: true, ..policy.clone() }, limits).wait().unwrap();
        assert_eq!(empty(), [true; 3]);
        cell.replace(Policy { storm: None, ..policy.clone() }, limits).wait().unwrap();
        assert_eq!(empty(), [true, true, false]);
        cell.replace(Policy { max_tx_rate: None, ..policy }, RateLimits::default()).wait().unwrap();
        assert_eq!(empty(), [false; 3]);
    }

    #[test]
    fn spoofed_frames_are_told_at_their_doublings() {
        let (cell, (tell, told)) = (cell(Policy::default()), channel());
        cell.observe(Box::new(move |notice| tell.send(notice).unwrap()));
        (0..9).for_each(|_| cell.note(Counter::TxSpoofedMac));
        cell.note(Counter::TxBadVlan);
        cell.note_address([2; 6]);
        let spoofed = |frames| PolicyNotice::Spoofed { frames };
        let expected = [spoofed(1), spoofed(2), spoofed(4), spoofed(8), PolicyNotice::AddressChanged { mac: [2; 6] }];
        assert_eq!(told.try_iter().collect::<Vec<_>>(), expected);
    }
}
