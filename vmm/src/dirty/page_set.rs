//! Sets of guest pages, as bitmaps of memory regions.

use std::ops::Range;

use virtio_devices::{GuestMap, PAGE_SIZE};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// Pages per word.
const WORD: u64 = u64::BITS as u64;
/// Words per chunk.
const CHUNK_WORDS: usize = 16;
/// Pages per chunk: 4 MiB of memory. Bounds how much is sent for nothing if the guest writes to a chunk in flight.
pub const CHUNK_PAGES: u64 = CHUNK_WORDS as u64 * WORD;

/// A set of pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    parts: Vec<Part>,
}

/// The pages of a region, one bit each.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    /// Number of the region's first page.
    first: u64,
    /// Number of pages.
    pages: u64,
    words: Vec<u64>,
}

impl Part {
    /// Mask of the bits in word `index` that stand for pages.
    fn valid(&self, index: usize) -> u64 {
        match self.pages.saturating_sub(index as u64 * WORD) {
            0 => 0,
            left if left < WORD => u64::MAX >> (WORD - left),
            _ => u64::MAX,
        }
    }
}

/// Adjacent pages of a set in one region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the region.
    pub region: usize,
    /// Guest address of the region.
    pub region_start: u64,
    /// First page, relative to the region; a multiple of 64.
    pub first: u64,
    /// Bitmap of pages from `first` on.
    pub words: Vec<u64>,
}

impl Chunk {
    /// Number of pages that are in the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Range of the chunk in bytes, relative to its region. The region's last chunk may extend past the region's end.
    pub fn place(&self) -> Range<u64> {
        let start = self.first * PAGE_SIZE as u64;
        start..start + self.words.len() as u64 * WORD * PAGE_SIZE as u64
    }

    /// Splits the chunk into its pages inside `parts`, byte ranges relative to the region, and all others.
    pub fn split(mut self, parts: &[Range<u64>]) -> (Self, Self) {
        let page = PAGE_SIZE as u64;
        let mut inside = vec![0; self.words.len()];
        let (first, end) = (self.first, self.place().end / page);
        for part in parts {
            for number in (part.start / page).max(first)..part.end.div_ceil(page).min(end) {
                let offset = number - first;
                if let Some(word) = inside.get_mut((offset / WORD) as usize) {
                    *word |= 1 << (offset % WORD);
                }
            }
        }
        let within = self.words.iter().zip(&inside).map(|(word, inside)| word & inside).collect();
        self.words.iter_mut().zip(&inside).for_each(|(word, inside)| *word &= !inside);
        (Self { words: within, ..self.clone() }, self)
    }

    /// Returns the pages in the set as runs: guest address and length in bytes.
    pub fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let page = PAGE_SIZE as u64;
        for (index, mut word) in self.words.iter().copied().enumerate() {
            while word != 0 {
                let bit = u64::from(word.trailing_zeros());
                let len = u64::from((word >> bit).trailing_ones());
                let start = self.region_start + (self.first + index as u64 * WORD + bit) * page;
                match runs.last_mut() {
                    Some((last, bytes)) if *last + *bytes == start => *bytes += len * page,
                    _ => runs.push((start, len * page)),
                }
                // Clears the bits up to the end of this run.
                word &= u64::MAX.checked_shl((bit + len) as u32).unwrap_or(0);
            }
        }
        runs
    }
}

impl PageSet {
    /// Creates an empty set over `map`.
    pub fn none(map: &GuestMap) -> Self {
        let part = |region: &virtio_devices::GuestRegion| {
            let pages = region.len().div_ceil(PAGE_SIZE as u64);
            Part {
                first: region.start_addr().0 / PAGE_SIZE as u64,
                pages,
                words: vec![0; usize::try_from(pages.div_ceil(WORD)).unwrap_or(0)],
            }
        };
        Self { parts: map.iter().map(part).collect() }
    }

    /// Creates a set of all pages of `map`.
    pub fn all(map: &GuestMap) -> Self {
        let mut set = Self::none(map);
        for part in &mut set.parts {
            for index in 0..part.words.len() {
                let valid = part.valid(index);
                if let Some(word) = part.words.get_mut(index) {
                    *word = valid;
                }
            }
        }
        set
    }

    /// The number of pages.
    pub fn count(&self) -> u64 {
        self.parts.iter().flat_map(|part| &part.words).map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns the words of a region, for logs of the same form. Bits beyond the last page are masked later.
    pub fn words(&mut self, region: usize) -> Option<&mut [u64]> {
        self.parts.get_mut(region).map(|part| &mut *part.words)
    }

    /// Adds pages of a region from the guest address `start`, one bit each. `start` is a multiple of 64 pages from the
    /// region's beginning.
    pub fn add_region(&mut self, start: u64, bits: &[u64]) {
        let first = start / PAGE_SIZE as u64;
        for part in &mut self.parts {
            let Some(offset) = first.checked_sub(part.first).filter(|offset| *offset < part.pages) else { continue };
            let from = usize::try_from(offset / WORD).unwrap_or(usize::MAX);
            for (word, more) in part.words.iter_mut().skip(from).zip(bits) {
                *word |= more;
            }
        }
    }

    /// Adds up to 64 pages, one bit each. Bit 0 stands for page `first` of guest memory.
    pub fn add(&mut self, first: u64, bits: u64) {
        for part in &mut self.parts {
            // The position of the 64 pages in the region, which may not begin at a multiple of 64.
            let (index, shift, early) = match first.checked_sub(part.first) {
                Some(offset) => (offset / WORD, offset % WORD, 0),
                None => (0, 0, part.first - first),
            };
            if early >= WORD || index * WORD >= part.pages {
                continue;
            }
            let bits = bits >> early;
            let Ok(index) = usize::try_from(index) else { continue };
            for (index, bits) in
                [(index, bits << shift), (index + 1, bits.checked_shr((WORD - shift) as u32).unwrap_or(0))]
            {
                let valid = part.valid(index);
                if let Some(word) = part.words.get_mut(index) {
                    *word |= bits & valid;
                }
            }
        }
    }

    /// Removes and returns the next chunk with a page, from `place` on, and advances `place` past it. Returns `None` at
    /// the end, and resets `place`.
    pub fn take(&mut self, place: &mut (usize, usize)) -> Option<Chunk> {
        let (region, word) = *place;
        for (region, part) in self.parts.iter_mut().enumerate().skip(region) {
            let from = if region == place.0 { word } else { 0 };
            let Some(rest) = part.words.get(from..) else { continue };
            let Some(found) = rest.iter().position(|word| *word != 0) else { continue };
            let from = from + found;
            let until = (from + CHUNK_WORDS).min(part.words.len());
            let mut words: Vec<_> = (from..until).map(|index| part.words.get(index).copied().unwrap_or(0)).collect();
            for (offset, word) in words.iter_mut().enumerate() {
                *word &= part.valid(from + offset);
            }
            part.words.iter_mut().take(until).skip(from).for_each(|word| *word = 0);
            *place = (region, until);
            let chunk = Chunk { region, region_start: part.first * PAGE_SIZE as u64, first: from as u64 * WORD, words };
            if chunk.count() > 0 {
                return Some(chunk);
            }
            return self.take(place);
        }
        *place = (0, 0);
        None
    }
}
