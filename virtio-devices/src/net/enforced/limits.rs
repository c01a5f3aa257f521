//! The rate limits of a NIC.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::device::rate_limiter::RateLimitGroup;
use crate::frames::net_protocol::MAX_FRAME;
use crate::state::{BucketState, StateError};
use crate::{RateLimit, RateLimits};

/// The bytes per second of one Mbit/s.
const BYTES_PER_MBIT: u64 = 1_000_000 / 8;
/// The least capacity of a bucket for bits per second: one segment of 64 KiB more than the longest frame, so that the
/// wait for a frame is never longer than the frame takes.
const LEAST_BUCKET: u64 = (64 << 10) + MAX_FRAME as u64;

/// The limits of one direction, if there are any. All queue pairs of a function share them; clones are the same limits.
#[derive(Debug, Clone, Default)]
pub(crate) struct Limit(Vec<RateLimitGroup>);

impl Limit {
    /// Full buckets for each of `limits` that has a limit.
    pub(crate) fn new(limits: &[RateLimits]) -> Self {
        Self(limits.iter().filter_map(|limits| RateLimitGroup::new(*limits)).collect())
    }

    /// The limit of `mbits` Mbit/s in the place of `before`. Its bucket is empty, and the time to wait before another
    /// frame may pass stays.
    pub(crate) fn of_rate_after(mbits: NonZeroU32, before: &Self) -> Self {
        let rate = of_rate(mbits);
        let limit = Self::new(&[rate]);
        if let Some(RateLimit { size, refill, .. }) = rate.bandwidth {
            let owed = before.limited_for().unwrap_or_default().as_nanos();
            let owed = u128::from(size).saturating_mul(owed) / refill.as_nanos().max(1);
            let bytes = u64::try_from(owed).unwrap_or(u64::MAX).saturating_add(size);
            limit.0.iter().for_each(|group| group.take_bytes(bytes));
        }
        limit
    }

    /// Both limits together.
    pub(crate) fn and(&self, other: &Self) -> Self {
        Self([self, other].into_iter().flat_map(|limit| limit.0.clone()).collect())
    }

    /// The time to wait before another frame may pass; `None` if it may now.
    pub(crate) fn limited_for(&self) -> Option<Duration> {
        self.0.iter().filter_map(RateLimitGroup::limited_for).max()
    }

    /// True if all buckets are full.
    pub(crate) fn is_full(&self) -> bool {
        self.0.iter().all(RateLimitGroup::is_full)
    }

    /// The levels of all buckets.
    pub(crate) fn save(&self) -> Vec<BucketState> {
        self.0.iter().flat_map(RateLimitGroup::save).collect()
    }

    /// Sets the levels of all buckets.
    ///
    /// # Errors
    ///
    /// Fails if the number of states differs, or no use of a bucket leads to one of them.
    pub(crate) fn restore(&self, mut states: &[BucketState]) -> Result<(), StateError> {
        self.0.iter().try_for_each(|group| group.restore(&mut states))?;
        if states.is_empty() { Ok(()) } else { Err(StateError::Shape("rate limits")) }
    }

    /// True if `packets` may pass at once, without a debt.
    pub(crate) fn allows(&self, packets: u32) -> bool {
        self.0.iter().all(|group| group.allows(packets))
    }

    /// True if packets are limited, and not only bytes.
    pub(crate) fn counts_packets(&self) -> bool {
        self.0.iter().any(RateLimitGroup::counts_ops)
    }

    /// Charges a frame of `bytes`, from its destination address on, that becomes `packets`. A dropped frame has no
    /// bytes and is one packet.
    pub(crate) fn take(&self, bytes: usize, packets: u32) {
        for group in &self.0 {
            group.take_ops(packets);
            group.take_bytes(bytes as u64);
        }
    }
}

/// The limit of `mbits` Mbit/s: 10 ms of it at once, or more if that is less than a few frames.
pub(crate) fn of_rate(mbits: NonZeroU32) -> RateLimits {
    let second = u64::from(mbits.get()) * BYTES_PER_MBIT;
    let size = (second / 100).max(LEAST_BUCKET);
    let nanos = u128::from(size) * 1_000_000_000 / u128::from(second);
    let refill = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    RateLimits { bandwidth: Some(RateLimit { size, one_time_burst: 0, refill }), ops: None }
}

/// The limit of `frames` frames a second.
pub(crate) fn of_frames(frames: NonZeroU32) -> RateLimits {
    let limit = RateLimit { size: frames.get().into(), one_time_burst: 0, refill: Duration::from_secs(1) };
    RateLimits { bandwidth: None, ops: Some(limit) }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::device::rate_limiter::RateLimiter;

    /// In virtual time: a sender that always has frames, and waits for the returned times.
    #[test]
    fn a_rate_is_kept_within_2_percent_whatever_the_frames() {
        for mbits in [10, 100, 1_000, 10_000] {
            for frame in [60, 1_514, MAX_FRAME as u64] {
                let start = Instant::now();
                let mut limiter = RateLimiter::new(of_rate(NonZeroU32::new(mbits).unwrap()), start).unwrap();
                let (mut now, mut of_second) = (start, [0_u64; 2]);
                while let Some(sent) = of_second.get_mut((now - start).as_secs() as usize) {
                    limiter.take_bytes(frame, now);
                    *sent += frame;
                    now += limiter.wait(now);
                }
                // The first second has what the bucket held.
                let last = of_second[1];
                let expected = u64::from(mbits) * BYTES_PER_MBIT;
                assert!(last.abs_diff(expected) * 50 <= expected, "{mbits} {frame}: {last}");
            }
        }
    }

    #[test]
    fn a_changed_rate_begins_empty_and_keeps_the_debt() {
        let rate = |mbits| NonZeroU32::new(mbits).unwrap();
        let before = Limit::new(&[of_rate(rate(1))]);
        assert!(!Limit::of_rate_after(rate(2), &before).is_full(), "the debt of none");
        before.take(1_000_000, 1);
        let most = before.limited_for().unwrap();
        let faster = Limit::of_rate_after(rate(1_000), &before).limited_for().unwrap();
        let least = before.limited_for().unwrap();
        assert!(least <= faster + Duration::from_millis(1) && faster <= most, "{least:?} {faster:?} {most:?}");
    }

    #[test]
    fn a_bucket_holds_10_ms_or_a_few_frames() {
        let limit = |mbits| of_rate(NonZeroU32::new(mbits).unwrap()).bandwidth.unwrap();
        assert_eq!((limit(10_000).size, limit(10_000).refill), (12_500_000, Duration::from_millis(10)));
        assert_eq!(limit(1).size, 64 * 1024 + MAX_FRAME as u64);
        assert!(limit(u32::MAX).refill >= Duration::from_millis(9));
    }
}
