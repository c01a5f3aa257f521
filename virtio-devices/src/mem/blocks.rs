//! Which blocks of a memory device are plugged.

use std::ops::Range;

/// The blocks in a range of guest addresses. Their number follows from the host's configuration alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocks {
    /// The first guest address.
    start: u64,
    /// The size of a block in bytes.
    size: u64,
    /// The number of blocks.
    count: usize,
    /// A bit for each block, the lowest bit of the first byte for the first block: set if it is plugged.
    plugged: Vec<u8>,
}

impl Blocks {
    /// Blocks of `size` bytes in `region`, whose length is a multiple of that. None is plugged.
    pub(super) fn new(region: &Range<u64>, size: u64) -> Self {
        let size = size.max(1);
        let count = usize::try_from(region.end.saturating_sub(region.start) / size).unwrap_or(0);
        Self { start: region.start, size, count, plugged: vec![0; count.div_ceil(8)] }
    }

    /// The first guest address.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// The size of a block in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// The size of all blocks in bytes.
    pub(super) fn len(&self) -> u64 {
        self.count as u64 * self.size
    }

    /// The number of blocks.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The size of the plugged blocks in bytes.
    pub(super) fn plugged(&self) -> u64 {
        self.plugged.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>() * self.size
    }

    /// The `count` blocks from the guest address `address` on; `None` if they are not blocks, or none.
    pub(super) fn find(&self, address: u64, count: u16) -> Option<Range<usize>> {
        let offset = address.checked_sub(self.start)?;
        if count == 0 || !offset.is_multiple_of(self.size) {
            return None;
        }
        let first = usize::try_from(offset / self.size).ok()?;
        let last = first.checked_add(count.into())?;
        (last <= self.count).then_some(first..last)
    }

    /// The guest addresses of the blocks in `range`.
    pub(super) fn addresses(&self, range: &Range<usize>) -> Range<u64> {
        let address = |block: usize| self.start.saturating_add((block as u64).saturating_mul(self.size));
        address(range.start)..address(range.end)
    }

    /// How many of the blocks in `range` are plugged.
    pub(super) fn plugged_in(&self, range: &Range<usize>) -> usize {
        range.clone().filter(|block| self.is_plugged(*block)).count()
    }

    fn is_plugged(&self, block: usize) -> bool {
        self.plugged.get(block / 8).is_some_and(|byte| byte >> (block % 8) & 1 != 0)
    }

    /// Marks the blocks in `range`, which are there.
    pub(super) fn set(&mut self, range: Range<usize>, plugged: bool) {
        for block in range.start..range.end.min(self.count) {
            if let Some(byte) = self.plugged.get_mut(block / 8) {
                let bit = 1 << (block % 8);
                if plugged { *byte |= bit } else { *byte &= !bit }
            }
        }
    }

    /// A bit for each block.
    pub(super) fn bits(&self) -> &[u8] {
        &self.plugged
    }

    /// Takes a bit for each block; `false`, and nothing has changed, if there is another number of them.
    pub(super) fn set_bits(&mut self, bits: &[u8]) -> bool {
        let surplus = bits.last().map_or(0, |last| match self.count % 8 {
            0 => 0,
            used => last >> used,
        });
        if bits.len() != self.plugged.len() || surplus != 0 {
            return false;
        }
        self.plugged.copy_from_slice(bits);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_of_the_region_are_found() {
        let blocks = Blocks::new(&(0x1000..0xb000), 0x1000);
        assert_eq!((blocks.count(), blocks.len()), (10, 0xa000));
        assert_eq!(blocks.find(0x1000, 10), Some(0..10));
        assert_eq!(blocks.find(0x3000, 1), Some(2..3));
        assert_eq!(blocks.addresses(&(2..4)), 0x3000..0x5000);
        for (address, count) in
            [(0x1000, 0), (0x1000, 11), (0x1800, 1), (0, 1), (0xb000, 1), (u64::MAX - 0xfff, 1), (0xa000, u16::MAX)]
        {
            assert_eq!(blocks.find(address, count), None, "{address:#x} {count}");
        }
    }

    #[test]
    fn bits_of_another_number_of_blocks_are_not_taken() {
        let mut blocks = Blocks::new(&(0..10), 1);
        blocks.set(3..9, true);
        blocks.set(4..5, false);
        assert_eq!((blocks.bits(), blocks.plugged()), (&[0b1110_1000, 1][..], 5));
        for bits in [&[0][..], &[0, 4], &[0, 0, 0]] {
            assert!(!blocks.set_bits(bits));
        }
        assert_eq!(blocks.plugged_in(&(0..10)), 5);
        assert!(blocks.set_bits(&[0, 3]));
        assert_eq!(blocks.plugged_in(&(7..10)), 2);
        let mut whole = Blocks::new(&(0..8), 1);
        assert!(whole.set_bits(&[0xff]));
    }
}
