//! Pages of memory that is not plugged, which are given back to the host from time to time.
//!
//! vCPUs and devices of this process do not reach such memory. Backends reach all of the guest's memory by themselves
//! (vhost-net, vhost-user), and a driver may name memory there that it has not plugged. A request that was under way
//! when its memory was unplugged may write to it as well.

use std::time::{Duration, Instant};

/// The time between two looks at unplugged memory.
const PERIOD: Duration = Duration::from_secs(1);
/// The most gaps between plugged blocks of a region that are looked at at once.
pub(super) const GAPS: usize = 1024;

/// The next look at unplugged memory.
#[derive(Debug)]
pub(super) struct Reclaiming {
    next: Instant,
    /// The block of each region to continue from.
    blocks: Vec<usize>,
}

impl Reclaiming {
    /// The first look, at `regions` regions.
    pub(super) fn begin(regions: usize) -> Self {
        Self { next: Instant::now() + PERIOD, blocks: vec![0; regions] }
    }

    /// The time until the next look, if there is any region.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.blocks.is_empty()).then(|| self.next.saturating_duration_since(Instant::now()))
    }

    /// The next look is a period from now.
    pub(super) fn postpone(&mut self) {
        self.next = Instant::now() + PERIOD;
    }

    /// The block of each region to continue from.
    pub(super) fn blocks(&mut self) -> &mut [usize] {
        &mut self.blocks
    }
}
