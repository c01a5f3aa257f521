//! Rate limits: token buckets.
//!
//! A bucket holds `size` tokens and refills evenly, from empty to full in `refill`. An operation takes its tokens when
//! it begins, even if there are too few; the bucket is then in debt and must refill first. So the mean rate holds for
//! operations of any size, and any size can pass.

mod saved;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::os::clock;

/// A limit that refills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// The tokens of a full bucket, 1 or more.
    pub size: u64,
    /// A one-time burst of additional tokens, which are taken first.
    pub one_time_burst: u64,
    /// Time in which an empty bucket fills; above 0.
    pub refill: Duration,
}

/// The limits of a device. Unlimited by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Of bytes.
    pub bandwidth: Option<RateLimit>,
    /// Of operations.
    pub ops: Option<RateLimit>,
}

/// Token buckets of a device. There is no clock: the caller passes the time.
#[derive(Debug)]
pub struct RateLimiter {
    bandwidth: Option<Bucket>,
    ops: Option<Bucket>,
}

/// Limits shared by several devices and all of their queues. Clones share the same limits.
#[derive(Debug, Clone)]
pub struct RateLimitGroup(Arc<Mutex<RateLimiter>>);

impl RateLimitGroup {
    /// Creates full buckets. `None` if nothing is limited.
    pub fn new(limits: RateLimits) -> Option<Self> {
        RateLimiter::new(limits, clock::now()).map(|limiter| Self(Arc::new(Mutex::new(limiter))))
    }

    /// Time until an operation may begin; `None` if it may now.
    pub(crate) fn limited_for(&self) -> Option<Duration> {
        let wait = self.0.lock().wait(clock::now());
        (!wait.is_zero()).then_some(wait)
    }

    /// True if `ops` operations may begin at once, without a debt.
    pub(crate) fn allows(&self, ops: u32) -> bool {
        self.0.lock().allows(ops, clock::now())
    }

    /// True if operations are limited.
    pub(crate) fn counts_ops(&self) -> bool {
        self.0.lock().ops.is_some()
    }

    /// Takes the tokens of an operation.
    pub(crate) fn take_op(&self) {
        self.take_ops(1);
    }

    /// Takes the tokens of `ops` operations.
    pub(crate) fn take_ops(&self, ops: u32) {
        self.0.lock().take_ops(ops, clock::now());
    }

    /// Takes the tokens of a transfer of `bytes`.
    pub(crate) fn take_bytes(&self, bytes: u64) {
        self.0.lock().take_bytes(bytes, clock::now());
    }
}

#[derive(Debug)]
struct Bucket {
    limit: RateLimit,
    /// Rest of the one-time burst.
    burst: u64,
    /// Time at which the bucket is full; represents its level.
    full_at: Instant,
}

impl RateLimiter {
    /// Creates full buckets, at the time `now`. `None` if nothing is limited.
    pub fn new(limits: RateLimits, now: Instant) -> Option<Self> {
        let bucket = |limit: RateLimit| Bucket { limit, burst: limit.one_time_burst, full_at: now };
        let RateLimits { bandwidth, ops } = limits;
        (bandwidth.is_some() || ops.is_some()).then(|| Self { bandwidth: bandwidth.map(bucket), ops: ops.map(bucket) })
    }

    /// Creates full buckets that limit only operations, at the time `now`.
    pub fn of_ops(limit: RateLimit, now: Instant) -> Self {
        Self { bandwidth: None, ops: Some(Bucket { limit, burst: limit.one_time_burst, full_at: now }) }
    }

    /// Time from `now` until an operation may begin; zero if it may now.
    pub fn wait(&self, now: Instant) -> Duration {
        let buckets = [&self.bandwidth, &self.ops].into_iter().flatten();
        buckets.map(|bucket| bucket.wait(now)).max().unwrap_or_default()
    }

    /// True if `ops` operations may begin at once, without a debt.
    pub(crate) fn allows(&self, ops: u32, now: Instant) -> bool {
        self.ops.as_ref().is_none_or(|bucket| bucket.has(ops.into(), now))
    }

    /// Takes the tokens of an operation.
    pub fn take_op(&mut self, now: Instant) {
        self.take_ops(1, now);
    }

    /// Takes the tokens of `ops` operations.
    pub(crate) fn take_ops(&mut self, ops: u32, now: Instant) {
        self.ops.iter_mut().for_each(|bucket| bucket.take(ops.into(), now));
    }

    /// Takes the tokens of a transfer of `bytes`.
    pub(crate) fn take_bytes(&mut self, bytes: u64, now: Instant) {
        self.bandwidth.iter_mut().for_each(|bucket| bucket.take(bytes, now));
    }
}

impl Bucket {
    /// Time to refill `tokens`, rounded down to nanoseconds.
    fn time_of(&self, tokens: u64) -> Duration {
        let nanos =
            u128::from(tokens).saturating_mul(self.limit.refill.as_nanos()) / u128::from(self.limit.size.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Waits for a whole token.
    fn wait(&self, now: Instant) -> Duration {
        if self.burst > 0 {
            return Duration::ZERO;
        }
        let missing = self.full_at.saturating_duration_since(now);
        missing.saturating_add(self.time_of(1)).saturating_sub(self.limit.refill)
    }

    /// True if `tokens` tokens are available; never beyond the bucket's size.
    fn has(&self, tokens: u64, now: Instant) -> bool {
        let missing = self.full_at.saturating_duration_since(now);
        let needed = self.time_of(tokens.saturating_sub(self.burst));
        missing.saturating_add(needed) <= self.limit.refill
    }

    fn take(&mut self, tokens: u64, now: Instant) {
        let of_burst = tokens.min(self.burst);
        self.burst -= of_burst;
        let full_at = self.full_at.max(now);
        // Ignores a time beyond the clock's range.
        self.full_at = full_at.checked_add(self.time_of(tokens - of_burst)).unwrap_or(full_at);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn limit(size: u64, one_time_burst: u64, refill: Duration) -> Option<RateLimit> {
        Some(RateLimit { size, one_time_burst, refill })
    }

    fn ops(limit: Option<RateLimit>, now: Instant) -> RateLimiter {
        RateLimiter::new(RateLimits { ops: limit, bandwidth: None }, now).unwrap()
    }

    /// Number of operations that pass at `now`.
    fn let_through(limiter: &mut RateLimiter, now: Instant) -> u64 {
        let mut count = 0;
        while limiter.wait(now).is_zero() {
            limiter.take_op(now);
            count += 1;
        }
        count
    }

    #[test]
    fn a_device_without_limits_has_no_limiter() {
        assert!(RateLimiter::new(RateLimits::default(), Instant::now()).is_none());
    }

    #[test]
    fn full_bucket_passes_its_size_then_one_per_refilled_token() {
        let start = Instant::now();
        let mut limiter = ops(limit(10, 0, ms(1000)), start);
        assert_eq!(let_through(&mut limiter, start), 10);
        assert_eq!(limiter.wait(start), ms(100));
        assert_eq!(let_through(&mut limiter, start + ms(99)), 0);
        assert_eq!(limiter.wait(start + ms(99)), ms(1));
        assert_eq!(let_through(&mut limiter, start + ms(100)), 1);
        assert_eq!(let_through(&mut limiter, start + ms(350)), 2);
        assert_eq!(let_through(&mut limiter, start + ms(400)), 1, "half a token was kept");
    }

    #[test]
    fn a_bucket_is_never_more_than_full() {
        let start = Instant::now();
        let mut limiter = ops(limit(10, 0, ms(1000)), start);
        assert_eq!(let_through(&mut limiter, start + ms(1_000_000)), 10);
        assert_eq!(let_through(&mut limiter, start + ms(2_000_000)), 10);
    }

    #[test]
    fn the_one_time_burst_is_taken_first_and_comes_once() {
        let start = Instant::now();
        let mut limiter = ops(limit(10, 5, ms(1000)), start);
        assert_eq!(let_through(&mut limiter, start), 15);
        assert_eq!(let_through(&mut limiter, start + ms(5000)), 10);
    }

    #[test]
    fn request_larger_than_the_bucket_passes_and_is_paid_back() {
        let start = Instant::now();
        let limits = RateLimits { bandwidth: limit(1000, 500, ms(1000)), ops: None };
        let mut limiter = RateLimiter::new(limits, start).unwrap();
        limiter.take_bytes(4500, start);
        // 500 of the burst, 1000 of the bucket; 3000 are missing, and one must be available.
        assert_eq!(limiter.wait(start), ms(3001));
        assert_eq!(limiter.wait(start + ms(3000)), ms(1));
        assert!(limiter.wait(start + ms(3001)).is_zero());
    }

    #[test]
    fn several_at_once_are_allowed_if_the_bucket_has_them() {
        let start = Instant::now();
        let mut limiter = ops(limit(10, 2, ms(1000)), start);
        assert_eq!([1, 10, 12, 13, u32::MAX].map(|n| limiter.allows(n, start)), [true, true, true, false, false]);
        limiter.take_ops(5, start);
        assert_eq!([7, 8].map(|n| limiter.allows(n, start)), [true, false]);
        assert_eq!([7, 8].map(|n| limiter.allows(n, start + ms(100))), [true, true]);
        limiter.take_ops(100, start);
        assert!(!limiter.allows(1, start + ms(9000)) && limiter.allows(1, start + ms(9500)), "a debt is paid first");
        let bytes = RateLimits { bandwidth: limit(1, 0, ms(1000)), ops: None };
        assert!(RateLimiter::new(bytes, start).unwrap().allows(u32::MAX, start));
    }

    #[test]
    fn both_limits_hold() {
        let start = Instant::now();
        let limits = RateLimits { bandwidth: limit(100, 0, ms(1000)), ops: limit(2, 0, ms(1000)) };
        let mut limiter = RateLimiter::new(limits, start).unwrap();
        limiter.take_op(start);
        limiter.take_bytes(100, start);
        assert_eq!(limiter.wait(start), ms(10), "for a byte");
        limiter.take_op(start);
        assert_eq!(limiter.wait(start), ms(500), "for an operation, which takes longer");
    }

    #[test]
    fn no_limit_overflows() {
        let start = Instant::now();
        for refill in [Duration::from_nanos(1), ms(u64::MAX), Duration::MAX] {
            for size in [1, u64::MAX] {
                let limits = RateLimits { bandwidth: limit(size, u64::MAX, refill), ops: None };
                let mut limiter = RateLimiter::new(limits, start).unwrap();
                for _ in 0..4 {
                    limiter.take_bytes(u64::MAX, start);
                }
                let _ = limiter.wait(start + ms(1));
            }
        }
    }

    proptest! {
        /// For any operations, the total in any time is at most the bucket, its burst, the refill, and one request
        /// beyond.
        #[test]
        fn the_mean_is_kept(
            size in 1_u64..100_000,
            burst in 0_u64..1_000,
            refill in 1_u64..10_000,
            requests in prop::collection::vec((0_u64..200_000, 0_u64..500), 1..200),
        ) {
            let start = Instant::now();
            let limits = RateLimits { bandwidth: limit(size, burst, ms(refill)), ops: None };
            let mut limiter = RateLimiter::new(limits, start).unwrap();
            let (mut elapsed, mut passed) = (0, 0);
            for (bytes, pause) in requests {
                elapsed += pause;
                let now = start + ms(elapsed);
                let refilled = u128::from(elapsed) * u128::from(size) / u128::from(refill);
                if limiter.wait(now).is_zero() {
                    // Each earlier request may have been charged a nanosecond too little.
                    let slack = 2 + 200 * u128::from(size) / (u128::from(refill) * 1_000_000);
                    prop_assert!(passed < u128::from(size + burst) + refilled + slack);
                    limiter.take_bytes(bytes, now);
                    passed += u128::from(bytes);
                }
            }
        }
    }
}
