//! Pages of guest memory that this process has written.
//!
//! KVM logs the writes of vCPUs but not those of this process's threads. Threads log theirs here, directly or through
//! [`vm_memory`], while a [`WriteLog`](super::write_log::WriteLog) exists. Otherwise logging costs a load and a branch.
//!
//! A writer sets a page's bit **after** writing to it. A collector takes the bit **before** it copies the page. So each
//! write is in the copy, or its bit is set again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use vm_memory::bitmap::{Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};

use super::reach::Reach;

/// The size of a page in a dirty log, in bytes: that of KVM's on x86-64 and of vhost's log.
pub const PAGE_SIZE: usize = 4096;

/// Pages in a word of a bitmap.
const WORD: usize = u64::BITS as usize;

/// The written pages of a region of guest memory, a bit for each, from the region's beginning.
///
/// The bits are allocated on first use, 32 KiB for each GiB.
#[derive(Debug, Default)]
pub struct DirtyBitmap {
    armed: AtomicBool,
    /// The number of pages.
    pages: usize,
    words: OnceLock<Box<[AtomicU64]>>,
    /// The parts of the region that devices can reach, if not all of it.
    reach: OnceLock<Arc<Reach>>,
}

impl DirtyBitmap {
    /// Limits devices' access to the region to `reach`, as long as the region is mapped.
    pub fn limit(&self, reach: &Arc<Reach>) {
        let _ = self.reach.set(Arc::clone(reach));
    }

    /// The parts of the region that devices can reach; `None` if all of it.
    pub(super) fn reach(&self) -> Option<&Reach> {
        self.reach.get().map(|reach| &**reach)
    }

    /// True if writes are logged.
    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        // Relaxed: arming ends with a barrier on all threads, before any page is copied.
        self.armed.load(Ordering::Relaxed)
    }

    /// Marks `len` bytes from `offset` as written. Bytes beyond the end are ignored.
    #[inline]
    pub(super) fn note(&self, offset: usize, len: usize) {
        if self.is_armed() {
            self.set(offset, len);
        }
    }

    #[cold]
    fn set(&self, offset: usize, len: usize) {
        let (Some(words), Some(last)) = (self.words.get(), len.checked_sub(1)) else { return };
        let first = offset / PAGE_SIZE;
        let last = (offset.saturating_add(last) / PAGE_SIZE).min(self.pages.saturating_sub(1));
        for (index, word) in words.iter().enumerate().take(last / WORD + 1).skip(first / WORD) {
            // The bits of the word that lie within the range.
            let from = first.saturating_sub(index * WORD);
            let until = (last - index * WORD).min(WORD - 1);
            let bits = (u64::MAX << from) & (u64::MAX >> (WORD - 1 - until));
            // Even if the bits are set already: this orders the write before the bit. Otherwise the bit could be taken,
            // and the page copied, before the write is visible.
            word.fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// Turns logging on, with all bits cleared. Writers may not have seen it yet.
    pub(super) fn arm(&self) {
        let words = self.words.get_or_init(|| (0..self.pages.div_ceil(WORD)).map(|_| AtomicU64::new(0)).collect());
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.armed.store(true, Ordering::SeqCst);
    }

    /// Turns logging off.
    pub(super) fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// Adds the pages written since the last call to `pages`, a bit for each from the region's beginning, and clears
    /// them here. Returns their number.
    pub(super) fn take(&self, pages: &mut [u64]) -> u64 {
        let words = self.words.get().map(|words| &**words).unwrap_or_default();
        let mut count = 0;
        for (to, word) in pages.iter_mut().zip(words) {
            if word.load(Ordering::Relaxed) != 0 {
                let taken = word.swap(0, Ordering::AcqRel);
                count += u64::from(taken.count_ones());
                *to |= taken;
            }
        }
        count
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyBitmap {
    type S = DirtySlice<'a>;
}

impl Bitmap for DirtyBitmap {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.note(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset / PAGE_SIZE;
        let word = self.words.get().and_then(|words| words.get(page / WORD));
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (page % WORD) != 0)
    }

    fn slice_at(&self, offset: usize) -> DirtySlice<'_> {
        DirtySlice { bitmap: self, start: offset }
    }
}

impl NewBitmap for DirtyBitmap {
    fn with_len(len: usize) -> Self {
        Self { pages: len.div_ceil(PAGE_SIZE), ..Self::default() }
    }
}

/// A [`DirtyBitmap`] from an offset on.
#[derive(Debug, Clone, Copy)]
pub struct DirtySlice<'a> {
    bitmap: &'a DirtyBitmap,
    start: usize,
}

impl<'a> DirtySlice<'a> {
    /// True if writes are logged.
    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        self.bitmap.is_armed()
    }

    /// All of the bitmap.
    pub fn whole(&self) -> &'a DirtyBitmap {
        self.bitmap
    }
}

impl<'a> WithBitmapSlice<'a> for DirtySlice<'_> {
    type S = Self;
}

impl BitmapSlice for DirtySlice<'_> {}

impl Bitmap for DirtySlice<'_> {
    #[inline]
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.bitmap.note(self.start.wrapping_add(offset), len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.bitmap.dirty_at(self.start.wrapping_add(offset))
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { bitmap: self.bitmap, start: self.start.wrapping_add(offset) }
    }
}
