//! The reference counts of an image, changed in its file in an order that never leaves a used cluster without a count.
//!
//! If the program ends in between, unused clusters may have a count: `qemu-img check` calls them leaked.

use super::blocks::Blocks;
use super::header::{Header, REFCOUNT_BLOCK, Tables};
use crate::block::error::ResizeError;

/// The most positions that a search tries.
const ATTEMPTS: usize = 1024;

/// The reference counts of an image.
pub(super) struct Refcounts<'f> {
    file: &'f Blocks<'f>,
    cluster: u64,
    tables: Tables,
}

/// Consecutive unused clusters.
struct Run {
    start: u64,
    len: u64,
    /// The refcount table entries that have no block yet. The blocks are the run's first clusters.
    new: Vec<u64>,
}

impl<'f> Refcounts<'f> {
    /// The counts of the image in `file`, which has `header`.
    pub(super) fn new(file: &'f Blocks<'f>, header: &Header) -> Self {
        Self { file, cluster: header.cluster.into(), tables: header.tables }
    }

    /// Writes `bytes`, which are whole clusters, to unused clusters at or after `end`, the end of the file, and counts
    /// one reference to each. Returns their offset.
    ///
    /// # Errors
    ///
    /// There is no room. Clusters may be leaked.
    pub(super) fn place(&self, end: u64, bytes: &[u8]) -> Result<u64, ResizeError> {
        let count = (bytes.len() as u64).div_ceil(self.cluster);
        let run = self.find(end.div_ceil(self.cluster), count)?;
        let per = self.counts_per_block();
        for (place, index) in (run.start..).zip(&run.new) {
            let mut block = vec![0; self.cluster as usize];
            self.set_all(&mut block, *index, &run);
            self.file.write(place * self.cluster, &block)?;
        }
        let place = (run.start + run.new.len() as u64) * self.cluster;
        self.file.write(place, bytes)?;
        self.file.sync()?;
        for index in run.start / per..=(run.start + run.len - 1) / per {
            if let Some(at) = self.block(index)? {
                let mut block = self.file.read(at, self.cluster as usize)?;
                self.set_all(&mut block, index, &run);
                self.file.write(at, &block)?;
            }
        }
        self.file.sync()?;
        // The first new block counts itself, and the later ones have been counted before they are linked.
        for (place, index) in (run.start..).zip(&run.new) {
            self.file.write(self.entry(*index), &(place * self.cluster).to_be_bytes())?;
        }
        self.file.sync()?;
        Ok(place)
    }

    /// Removes one reference from each cluster of the `len` bytes at `place`.
    pub(super) fn drop_references(&self, place: u64, len: u64) -> Result<(), ResizeError> {
        let per = self.counts_per_block();
        let (start, end) = (place / self.cluster, (place + len).div_ceil(self.cluster));
        for index in start / per..=end.saturating_sub(1) / per {
            let Some(at) = self.block(index)? else { continue };
            let mut block = self.file.read(at, self.cluster as usize)?;
            for cluster in start.max(index * per)..end.min((index + 1) * per) {
                let count = self.get(&block, cluster % per);
                self.set(&mut block, cluster % per, count.saturating_sub(1));
            }
            self.file.write(at, &block)?;
        }
        Ok(())
    }

    /// Finds `count` clusters, and further ones for the refcount blocks that all of them need.
    fn find(&self, from: u64, count: u64) -> Result<Run, ResizeError> {
        let per = self.counts_per_block();
        let mut start = from;
        for _ in 0..ATTEMPTS {
            let mut len = count;
            let new = loop {
                let mut new = Vec::new();
                for index in start / per..=(start + len - 1) / per {
                    if self.block(index)?.is_none() {
                        new.push(index);
                    }
                }
                if count + new.len() as u64 == len {
                    break new;
                }
                len = count + new.len() as u64;
            };
            match self.last_used(start, len)? {
                Some(used) => start = used + 1,
                None => return Ok(Run { start, len, new }),
            }
        }
        Err(ResizeError::NoRoom)
    }

    /// The last used cluster of the `len` clusters from `start`.
    fn last_used(&self, start: u64, len: u64) -> Result<Option<u64>, ResizeError> {
        let per = self.counts_per_block();
        let mut last = None;
        for index in start / per..=(start + len - 1) / per {
            let Some(at) = self.block(index)? else { continue };
            let block = self.file.read(at, self.cluster as usize)?;
            let range = start.max(index * per)..(start + len).min((index + 1) * per);
            last = range.rev().find(|cluster| self.get(&block, cluster % per) != 0).or(last);
        }
        Ok(last)
    }

    /// Offset of an entry of the refcount table.
    fn entry(&self, index: u64) -> u64 {
        self.tables.refcounts.saturating_add(index * 8)
    }

    /// Offset of the refcount block of a table entry.
    fn block(&self, index: u64) -> Result<Option<u64>, ResizeError> {
        if index >= self.tables.refcount_entries {
            return Err(ResizeError::NoRoom);
        }
        let entry = self.file.read(self.entry(index), 8)?;
        let entry = entry.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)) & REFCOUNT_BLOCK;
        Ok((entry != 0).then_some(entry))
    }

    /// Counts one reference to each cluster of `run` that block `index` covers.
    fn set_all(&self, block: &mut [u8], index: u64, run: &Run) {
        let per = self.counts_per_block();
        for cluster in run.start.max(index * per)..(run.start + run.len).min((index + 1) * per) {
            self.set(block, cluster % per, 1);
        }
    }

    fn counts_per_block(&self) -> u64 {
        (self.cluster * 8) >> self.tables.refcount_order
    }

    fn get(&self, block: &[u8], n: u64) -> u64 {
        match self.place_of(n) {
            (byte, Ok(len)) => {
                let bytes = block.get(byte..byte + len).unwrap_or_default();
                bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
            }
            (byte, Err((shift, mask))) => u64::from((block.get(byte).copied().unwrap_or(0) >> shift) & mask),
        }
    }

    fn set(&self, block: &mut [u8], n: u64, count: u64) {
        match self.place_of(n) {
            (byte, Ok(len)) => {
                let count = count.to_be_bytes();
                let bytes = block.get_mut(byte..byte + len).unwrap_or_default();
                bytes.copy_from_slice(count.get(count.len() - bytes.len()..).unwrap_or_default());
            }
            (byte, Err((shift, mask))) => {
                let bits = (count as u8 & mask) << shift;
                block.get_mut(byte).into_iter().for_each(|byte| *byte = (*byte & !(mask << shift)) | bits);
            }
        }
    }

    /// The first byte of a count, and its length; for a count of less than a byte, its shift and its mask.
    fn place_of(&self, n: u64) -> (usize, Result<usize, (u32, u8)>) {
        let bits = n << self.tables.refcount_order;
        // Within a cluster.
        let byte = (bits / 8) as usize;
        match self.tables.refcount_order {
            order @ 3.. => (byte, Ok(1 << (order - 3))),
            order => (byte, Err(((bits % 8) as u32, u8::MAX >> (8 - (1u32 << order))))),
        }
    }
}
