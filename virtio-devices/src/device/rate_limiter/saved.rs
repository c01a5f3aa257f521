//! Levels of buckets, in a saved state.

use std::time::{Duration, Instant};

use super::{Bucket, RateLimitGroup, RateLimiter};
use crate::frames::net_protocol::MAX_FRAME;
use crate::os::clock;
use crate::state::{BucketState, StateError};

/// The most debt that is saved for a bucket, in tokens: each user begins one operation at a time, and no NIC has more
/// users. A disk's requests can be longer than frames; debt beyond this is forgiven.
const MOST_DEBT: u64 = 256 * MAX_FRAME as u64;

impl RateLimitGroup {
    /// Levels of its buckets: that of bytes first.
    pub(crate) fn save(&self) -> Vec<BucketState> {
        let (limiter, now) = (self.0.lock(), clock::now());
        limiter.buckets().map(|bucket| bucket.save(now)).collect()
    }

    /// True if its buckets are full.
    pub(crate) fn is_full(&self) -> bool {
        let (limiter, now) = (self.0.lock(), clock::now());
        limiter.buckets().all(|bucket| bucket.save(now) == bucket.full())
    }

    /// Restores the levels from the first of `states`, and removes those from the slice.
    ///
    /// # Errors
    ///
    /// Fails if there are too few, or a level is impossible. Some buckets may then have changed.
    pub(crate) fn restore(&self, states: &mut &[BucketState]) -> Result<(), StateError> {
        let (mut limiter, now) = (self.0.lock(), clock::now());
        let RateLimiter { bandwidth, ops } = &mut *limiter;
        for bucket in bandwidth.iter_mut().chain(ops) {
            let (state, rest) = states.split_first().ok_or(StateError::Shape("rate limits"))?;
            bucket.restore(state, now)?;
            *states = rest;
        }
        Ok(())
    }
}

impl RateLimiter {
    fn buckets(&self) -> impl Iterator<Item = &Bucket> {
        [&self.bandwidth, &self.ops].into_iter().flatten()
    }
}

impl Bucket {
    fn full(&self) -> BucketState {
        BucketState { missing: 0, burst: self.limit.one_time_burst }
    }

    /// The longest possible time until it is full.
    fn most(&self) -> Duration {
        self.limit.refill.saturating_add(self.time_of(MOST_DEBT))
    }

    fn save(&self, now: Instant) -> BucketState {
        let missing = self.full_at.saturating_duration_since(now).min(self.most()).as_nanos();
        BucketState { missing: u64::try_from(missing).unwrap_or(u64::MAX), burst: self.burst }
    }

    fn restore(&mut self, state: &BucketState, now: Instant) -> Result<(), StateError> {
        let missing = Duration::from_nanos(state.missing);
        let is_possible = missing <= self.most() && state.burst <= self.limit.one_time_burst;
        let full_at = now.checked_add(missing).filter(|_| is_possible);
        self.full_at = full_at.ok_or(StateError::Value("a rate limit's bucket"))?;
        self.burst = state.burst;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::clock::testing::StoppedClock;
    use crate::{RateLimit, RateLimits};

    fn group() -> RateLimitGroup {
        let limit = |size| Some(RateLimit { size, one_time_burst: 10, refill: Duration::from_secs(1) });
        RateLimitGroup::new(RateLimits { bandwidth: limit(1000), ops: limit(5) }).unwrap()
    }

    #[test]
    fn a_bucket_is_as_full_after_a_restore_as_it_was() {
        let clock = StoppedClock::new();
        let (from, to) = (group(), group());
        assert!(from.is_full());
        from.take_bytes(3010);
        from.take_op();
        assert!(!from.is_full());
        let saved = from.save();
        assert_eq!(saved, [BucketState { missing: 3_000_000_000, burst: 0 }, BucketState { missing: 0, burst: 9 }]);
        clock.advance(Duration::from_secs(100));
        let mut rest = &saved[..];
        to.restore(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!((to.save(), to.limited_for()), (saved, Some(Duration::from_micros(2_001_000))));
    }

    #[test]
    fn the_saved_state_of_any_debt_can_be_restored() {
        let _clock = StoppedClock::new();
        let group = group();
        group.take_bytes(u64::MAX >> 20);
        let saved = group.save();
        assert_eq!(saved[0].missing, 1_000_000_000 + MOST_DEBT * 1_000_000);
        self::group().restore(&mut &saved[..]).unwrap();
    }

    #[test]
    fn a_bucket_that_no_use_leads_to_is_refused() {
        let _clock = StoppedClock::new();
        let good = BucketState { missing: 1, burst: 10 };
        for bad in [
            BucketState { missing: u64::MAX, ..good },
            BucketState { missing: 1_000_000_000 + MOST_DEBT * 1_000_000_000, ..good },
            BucketState { burst: 11, ..good },
        ] {
            assert!(matches!(group().restore(&mut &[bad, good][..]), Err(StateError::Value(_))), "{bad:?}");
            assert!(matches!(group().restore(&mut &[good, bad][..]), Err(StateError::Value(_))), "{bad:?}");
        }
        assert!(matches!(group().restore(&mut &[good][..]), Err(StateError::Shape(_))));
        group().restore(&mut &[good, good][..]).unwrap();
    }
}
