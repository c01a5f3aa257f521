//! Pages of memory that is not plugged, which are given back to the host from time to time.
//!
//! vCPUs and devices of this process do not reach such memory. Backends reach all of the guest's memory by themselves
//! (vhost-net, vhost-user), and a driver may name memory there that it has not plugged. A request that was under way
//! when its memory was unplugged may write to it as well.
//!
//! Backends may write as much as there is. So the work is done in turns, between which the control thread does other
//! work for as long as a turn took.

use std::time::{Duration, Instant};

use virtio_devices::GuestMap;

use crate::devices::mem_regions::MemRegions;

/// The time between two looks at all unplugged memory.
const PERIOD: Duration = Duration::from_secs(1);
/// The time after which a turn ends. The step that is under way is finished.
const TURN: Duration = Duration::from_millis(10);
/// The most steps of a turn.
const STEPS: usize = 1024;
/// The least time between two turns.
const PAUSE: Duration = Duration::from_millis(1);

/// The next look at unplugged memory.
#[derive(Debug)]
pub(super) struct Reclaiming {
    next: Instant,
    /// The region to continue with.
    region: usize,
    /// The block of each region to continue from.
    blocks: Vec<usize>,
}

impl Reclaiming {
    /// The first look, at `regions` regions.
    pub(super) fn begin(regions: usize) -> Self {
        Self { next: Instant::now() + PERIOD, region: 0, blocks: vec![0; regions] }
    }

    /// Has `reclaim` work on one region after the other, from a block on, until it stops short of the region's end or
    /// was at all of them. It returns the block to continue from. True if it was at all of them.
    fn turn(&mut self, mut reclaim: impl FnMut(usize, usize) -> usize) -> bool {
        for _ in 0..self.blocks.len() {
            let Some(block) = self.blocks.get_mut(self.region) else { return true };
            let before = *block;
            *block = reclaim(self.region, before);
            // A region whose worker is at work stays where it was, and has to wait.
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

    /// Gives pages of unplugged memory back to the host, if that is due. `is_filled` is false while a thread fills the
    /// memory, which would have to read each page that is given back.
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
    fn a_turn_ends_where_there_is_more_work_and_goes_on_there() {
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
        // The worker of this one is at work: others are looked at.
        assert_eq!(turn(&[9, 0, 0]), (vec![(1, 9), (2, 0), (0, 0)], true));
        assert_eq!(turn(&[0, 0, 4]), (vec![(1, 9), (2, 0), (0, 0)], false));
        assert_eq!(turn(&[0, 0, 0]), (vec![(0, 4), (1, 0), (2, 0)], true));
        assert!(Reclaiming::begin(0).turn(|_, _| 1));
    }
}
