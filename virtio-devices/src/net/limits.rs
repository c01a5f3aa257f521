//! What a NIC may still receive and send.

use std::time::Duration;

use crate::RateLimits;
use crate::rate_limiter::RateLimitGroup;

/// The limits of a function, which all of its queue pairs share. Either direction has buckets of its own.
#[derive(Debug, Default)]
pub(crate) struct NetLimits {
    /// Of frames to the driver.
    pub receive: Limit,
    /// Of frames from the driver.
    pub transmit: Limit,
}

/// The limits of one direction, if there are any.
#[derive(Debug, Default)]
pub(crate) struct Limit(Option<RateLimitGroup>);

impl NetLimits {
    /// Full buckets.
    pub(crate) fn new(limits: RateLimits) -> Self {
        let limit = || Limit(RateLimitGroup::new(limits));
        Self { receive: limit(), transmit: limit() }
    }
}

impl Limit {
    /// How long to wait before another frame may pass; `None` if it may now.
    pub(crate) fn limited_for(&self) -> Option<Duration> {
        self.0.as_ref()?.limited_for()
    }

    /// Takes what a frame of `bytes` costs, from its destination address on; one that was dropped has none.
    pub(crate) fn take(&self, bytes: usize) {
        if let Some(group) = &self.0 {
            group.take_op();
            group.take_bytes(bytes as u64);
        }
    }
}
