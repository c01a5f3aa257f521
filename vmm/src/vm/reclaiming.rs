//! Returns pages of unplugged memory to the host from time to time.
//!
//! vCPUs and devices of this process do not reach such memory. Backends reach all of the guest's memory directly
//! (vhost-net, vhost-user), and a driver may give them memory that it has not plugged. A request in flight when its
//! memory was unplugged may write to it as well.
//!
//! Backends may write any amount. So the work is done in turns, and after each the control thread does other work for
//! as long as the turn took.

use std::time::{Duration, Instant};

use virtio_devices::GuestMap;

use crate::devices::mem_regions::MemRegions;

/// The time between two scans of all unplugged memory.
const PERIOD: Duration = Duration::from_secs(1);
/// The time after which a turn ends. The current step is finished.
const TURN: Duration = Duration::from_millis(10);
/// The most steps of a turn.
const STEPS: usize = 1024;
/// The least time between two turns.
const PAUSE: Duration = Duration::from_millis(1);

/// The next scan of unplugged memory.
#[derive(Debug)]
pub(super) struct Reclaiming {
    next: Instant,
    /// The region to continue with.
    region: usize,
    /// The block of each region to continue from.
    blocks: Vec<usize>,
}

impl Reclaiming {
    /// Schedules the first scan, of `regions` regions.
    pub(super) fn begin(regions: usize) -> Self {
        Self { next: Instant::now() + PERIOD, region: 0, blocks: vec![0; regions] }
    }

    /// Calls `reclaim` for one region after the other, from a block on, until it stops before the region's end or has
    /// scanned all regions. `reclaim` returns the block to continue from. Returns true if all regions were scanned.
    fn turn(&mut self, mut reclaim: impl FnMut(usize, usize) -> usize) -> bool {
        for _ in 0..self.blocks.len() {
            let Some(block) = self.blocks.get_mut(self.region) else { return true };
            let before = *block;
            *block = reclaim(self.region, before);
            // A region whose worker is busy makes no progress, and must wait.
            if *block != 0 && *block != before {
                return false;
            }
            self.region = (self.region + 1) % self.blocks.len();
        }
        true
    }

    /// The time until [`Self::reclaim`] has work; `None` if there are no regions.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.blocks.is_empty()).then(|| self.next.saturating_duration_since(Instant::now()))
    }

    /// Returns pages of unplugged memory to the host, if that is due. `is_filled` is false while a thread fills the
    /// memory: that thread would have to read each returned page.
    pub(super) fn reclaim(&mut self, memory: &GuestMap, regions: &MemRegions, is_filled: bool) {
        if self.wait() != Some(Duration::ZERO) {
            return;
        }
        let begun = Instant::now();
        let is_done = !is_filled
            || self.turn(|region, block| {
                let region = regions.all().nth(region);
                region.map_or(0, |region| region.reclaim(memory, block, STEPS, begun + TURN))
            });
        let now = Instant::now();
        self.next = now + if is_done { PERIOD } else { now.duration_since(begun).max(PAUSE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_ends_before_all_work_is_done_and_the_next_continues() {
        let mut reclaiming = Reclaiming::begin(3);
        let mut turn = |answers: &[usize]| {
            let (mut asked, mut answers) = (Vec::new(), answers.iter());
            let is_done = reclaiming.turn(|region, block| {
                asked.push((region, block));
                *answers.next().unwrap()
            });
            (asked, is_done)
        };
        assert_eq!(turn(&[0, 7]), (vec![(0, 0), (1, 0)], false));
        assert_eq!(turn(&[9]), (vec![(1, 7)], false));
        // The worker of this region is busy, so others are scanned.
        assert_eq!(turn(&[9, 0, 0]), (vec![(1, 9), (2, 0), (0, 0)], true));
        assert_eq!(turn(&[0, 0, 4]), (vec![(1, 9), (2, 0), (0, 0)], false));
        assert_eq!(turn(&[0, 0, 0]), (vec![(0, 4), (1, 0), (2, 0)], true));
        assert!(Reclaiming::begin(0).turn(|_, _| 1));
    }
}
