//! Pages of memory that is not plugged, which are given back to the host from time to time.
//!
//! vCPUs and devices of this process do not reach such memory. Backends reach all of the guest's memory by themselves
//! (vhost-net, vhost-user), and a driver may name memory there that it has not plugged. A request that was under way
//! when its memory was unplugged may write to it as well.

use std::time::{Duration, Instant};

use vm_memory::GuestAddressSpace;

use super::Vm;

/// The time between two looks at unplugged memory.
const PERIOD: Duration = Duration::from_secs(1);
/// The most gaps between plugged blocks of a region that are looked at at once.
const GAPS: usize = 1024;

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
}

impl Vm {
    /// The time until [`Self::reclaim`] has work, if it may have any.
    pub(crate) fn wait_to_reclaim(&self) -> Option<Duration> {
        let is_reclaimed = !self.reclaiming.blocks.is_empty() && self.running.is_some() && !self.is_paused();
        is_reclaimed.then(|| self.reclaiming.next.saturating_duration_since(Instant::now()))
    }

    /// Gives pages of unplugged memory back to the host, if that is due.
    pub(crate) fn reclaim(&mut self) {
        if self.wait_to_reclaim() != Some(Duration::ZERO) {
            return;
        }
        self.reclaiming.next = Instant::now() + PERIOD;
        // The thread that fills memory would have to read of each page that is given back.
        if self.ram.filling().is_some_and(|progress| !progress.is_done()) {
            return;
        }
        let memory = self.ram.memory().memory();
        for (region, block) in self.mem_regions.all().zip(&mut self.reclaiming.blocks) {
            *block = region.reclaim(&memory, *block, GAPS);
        }
    }
}
