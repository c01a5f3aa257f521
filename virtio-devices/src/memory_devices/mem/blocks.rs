//! Plugged blocks of a memory device.

use std::ops::Range;

/// The blocks in a range of guest addresses. Only the host's configuration determines their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocks {
    /// The first guest address.
    start: u64,
    /// The size of a block in bytes.
    size: u64,
    /// The number of blocks.
    count: usize,
    /// A bit for each block, the lowest bit of the first byte for the first block: set if plugged.
    plugged: Vec<u8>,
    /// The number of blocks in a part, each of which has a memory slot.
    per_part: usize,
    /// The number of plugged blocks of each part.
    parts: Vec<usize>,
    /// The number of parts with a plugged block.
    used_parts: usize,
}

impl Blocks {
    /// Creates blocks of `size` bytes in `region`, whose length is a multiple of that, in parts of `per_part` blocks.
    /// None is plugged.
    pub(super) fn new(region: &Range<u64>, size: u64, per_part: usize) -> Self {
        let (size, per_part) = (size.max(1), per_part.max(1));
        let count = usize::try_from(region.end.saturating_sub(region.start) / size).unwrap_or(0);
        let (plugged, parts) = (vec![0; count.div_ceil(8)], vec![0; count.div_ceil(per_part)]);
        Self { start: region.start, size, count, plugged, per_part, parts, used_parts: 0 }
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

    /// The `count` blocks at the guest address `address`; `None` if these are not whole blocks of the region, or
    /// `count` is 0.
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

    /// Number of plugged blocks in `range`.
    pub(super) fn plugged_in(&self, range: &Range<usize>) -> usize {
        range.clone().filter(|block| self.is_plugged(*block)).count()
    }

    /// True if the block is plugged.
    pub(super) fn is_plugged(&self, block: usize) -> bool {
        self.plugged.get(block / 8).is_some_and(|byte| byte >> (block % 8) & 1 != 0)
    }

    /// Marks the blocks in `range`, which must exist.
    pub(super) fn set(&mut self, range: Range<usize>, plugged: bool) {
        for block in range.start..range.end.min(self.count) {
            if self.is_plugged(block) == plugged {
                continue;
            }
            if let Some(byte) = self.plugged.get_mut(block / 8) {
                *byte ^= 1 << (block % 8);
            }
            self.count_in_part(block, plugged);
        }
    }

    /// Updates its part's count for a block that was plugged or unplugged.
    fn count_in_part(&mut self, block: usize, plugged: bool) {
        let Some(part) = self.parts.get_mut(block / self.per_part) else { return };
        let before = *part;
        *part = if plugged { before.saturating_add(1) } else { before.saturating_sub(1) };
        match (before, *part) {
            (0, 1) => self.used_parts = self.used_parts.saturating_add(1),
            (1, 0) => self.used_parts = self.used_parts.saturating_sub(1),
            _ => {}
        }
    }

    /// The parts of the blocks in `range`.
    pub(super) fn parts(&self, range: &Range<usize>) -> Range<usize> {
        range.start / self.per_part..range.end.div_ceil(self.per_part).min(self.parts.len())
    }

    /// The number of plugged blocks of a part.
    pub(super) fn used(&self, part: usize) -> usize {
        self.parts.get(part).copied().unwrap_or(0)
    }

    /// The blocks of a part.
    pub(super) fn of_part(&self, part: usize) -> Range<usize> {
        let start = part.saturating_mul(self.per_part);
        start.min(self.count)..start.saturating_add(self.per_part).min(self.count)
    }

    /// The size in bytes of all parts that have a plugged block, or a block in `range`.
    pub(super) fn shown_with(&self, range: &Range<usize>) -> u64 {
        let more = self.parts(range).filter(|part| self.used(*part) == 0).count();
        ((self.used_parts + more) as u64).saturating_mul(self.part_size())
    }

    /// The size of a part in bytes.
    pub(super) fn part_size(&self) -> u64 {
        (self.per_part as u64).saturating_mul(self.size)
    }

    /// A bit for each block.
    pub(super) fn bits(&self) -> &[u8] {
        &self.plugged
    }

    /// Replaces the bits; returns false and changes nothing if their number is wrong.
    pub(super) fn set_bits(&mut self, bits: &[u8]) -> bool {
        let surplus = bits.last().map_or(0, |last| match self.count % 8 {
            0 => 0,
            used => last >> used,
        });
        if bits.len() != self.plugged.len() || surplus != 0 {
            return false;
        }
        self.plugged.copy_from_slice(bits);
        self.parts.fill(0);
        self.used_parts = 0;
        for block in 0..self.count {
            if self.is_plugged(block) {
                self.count_in_part(block, true);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_of_the_region_are_found() {
        let blocks = Blocks::new(&(0x1000..0xb000), 0x1000, 1);
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
        let mut blocks = Blocks::new(&(0..10), 1, 1);
        blocks.set(3..9, true);
        blocks.set(4..5, false);
        assert_eq!((blocks.bits(), blocks.plugged()), (&[0b1110_1000, 1][..], 5));
        for bits in [&[0][..], &[0, 4], &[0, 0, 0]] {
            assert!(!blocks.set_bits(bits));
        }
        assert_eq!(blocks.plugged_in(&(0..10)), 5);
        assert!(blocks.set_bits(&[0, 3]));
        assert_eq!(blocks.plugged_in(&(7..10)), 2);
        let mut whole = Blocks::new(&(0..8), 1, 1);
        assert!(whole.set_bits(&[0xff]));
    }

    #[test]
    fn parts_with_a_plugged_block_are_counted() {
        let mut blocks = Blocks::new(&(0..100), 10, 4);
        assert_eq!((blocks.parts(&(3..5)), blocks.parts(&(8..10)), blocks.of_part(2)), (0..2, 2..3, 8..10));
        blocks.set(3..5, true);
        blocks.set(4..6, true);
        assert_eq!([0, 1, 2].map(|part| blocks.used(part)), [1, 2, 0]);
        assert_eq!((blocks.shown_with(&(6..8)), blocks.shown_with(&(7..9))), (80, 120));
        blocks.set(0..10, false);
        assert_eq!(blocks.shown_with(&(0..0)), 0);
        assert!(blocks.set_bits(&[0x81, 2]));
        assert_eq!(([0, 1, 2].map(|part| blocks.used(part)), blocks.shown_with(&(0..10))), ([1, 1, 1], 120));
    }
}
