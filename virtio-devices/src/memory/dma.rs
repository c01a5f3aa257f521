//! Guest memory as a function accesses it: by guest physical addresses, or through an IOMMU.

use std::cell::Cell;
use std::fmt;
use std::iter::FusedIterator;
use std::sync::Arc;

use parking_lot::RwLockReadGuard;
use vm_memory::bitmap::{BS, Bitmap};
use vm_memory::guest_memory::{Error, GuestMemorySliceIterator, Result as MemoryResult};
use vm_memory::{
    Address, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryBackend, GuestMemoryLoadGuard, GuestMemoryRegion,
    MemoryRegionAddress, Permissions, VolatileSlice,
};

use super::dirty::{DirtyBitmap, DirtySlice};
use super::follow::{DmaFollower, DmaMapping, NotFollowed};
use super::known::Known;
use super::map::{GuestMap, Memory};
use crate::memory::effort::{self, Span};

/// Translation of a function's addresses by an IOMMU.
pub trait Translate: Send + Sync {
    /// Begins a pass. Until the guard is dropped, no translated page is taken away: an unmap, a detach or a reset of
    /// the IOMMU waits for that. Does not wait for a waiting writer, so that a thread may be in several passes.
    fn begin(&self) -> RwLockReadGuard<'_, ()>;

    /// True if addresses are guest physical ones now. Does not change during a pass.
    fn is_bypassed(&self) -> bool;

    /// Translates the first piece of `len` bytes, at least 1, at `address`, for `access`: its guest physical address,
    /// and its length from 1 to `len`. `None` if it is not mapped, or not for this access; the IOMMU reports that.
    fn translate(&self, address: u64, len: u64, access: Permissions) -> Option<(u64, u64)>;

    /// The mapping of `address`, for `access`; in bypass [`DmaMapping::IDENTITY`]. As [`Self::translate`] otherwise.
    fn mapping(&self, address: u64, access: Permissions) -> Option<DmaMapping>;

    /// Notifies only `follower` of all changes from now on, and first of the present mappings. With `None`, no follower
    /// is notified once this has returned. Must not be called during a pass, or by a follower.
    ///
    /// # Errors
    ///
    /// [`NotFollowed`] if the follower cannot take the present mappings. It gets no further notifications then.
    fn follow(&self, follower: Option<Arc<dyn DmaFollower>>) -> Result<(), NotFollowed>;
}

/// The addresses that a function uses, and the guest memory behind them.
#[derive(Clone)]
pub struct DmaSpace {
    memory: Memory,
    iommu: Option<Arc<dyn Translate>>,
}

impl DmaSpace {
    /// Creates a space whose addresses `iommu` translates.
    pub fn translated(memory: Memory, iommu: Arc<dyn Translate>) -> Self {
        Self { memory, iommu: Some(iommu) }
    }

    /// The guest's memory by guest physical addresses.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The present map of guest physical addresses. Only for untranslated addresses: those of a backend that has the
    /// map, and of devices that handle physical memory.
    pub fn map(&self) -> GuestMemoryLoadGuard<GuestMap> {
        self.memory.memory()
    }

    /// True if an IOMMU translates addresses, now or later.
    pub fn has_iommu(&self) -> bool {
        self.iommu.is_some()
    }

    /// The IOMMU that the function is behind, if any.
    pub fn iommu(&self) -> Option<&Arc<dyn Translate>> {
        self.iommu.as_ref()
    }

    /// Begins a pass: the addresses stay as they are until the pass is dropped. A worker drops it before it waits.
    pub fn pass(&self) -> DmaPass<'_> {
        let (pass, iommu) = match &self.iommu {
            None => (None, None),
            Some(iommu) => {
                let pass = iommu.begin();
                (Some(pass), (!iommu.is_bypassed()).then(|| Arc::clone(iommu)))
            }
        };
        DmaPass { view: DmaView::new(self.memory.memory(), iommu), _pass: pass, _span: Span::new() }
    }
}

impl From<Memory> for DmaSpace {
    fn from(memory: Memory) -> Self {
        Self { memory, iommu: None }
    }
}

impl From<GuestMap> for DmaSpace {
    fn from(map: GuestMap) -> Self {
        Memory::new(map).into()
    }
}

impl fmt::Debug for DmaSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaSpace").field("translated", &self.iommu.is_some()).finish_non_exhaustive()
    }
}

/// A pass of a worker over its queues. While it exists, the [view](DmaView) does not change.
pub struct DmaPass<'s> {
    view: DmaView,
    _pass: Option<RwLockReadGuard<'s, ()>>,
    _span: Span,
}

impl std::ops::Deref for DmaPass<'_> {
    type Target = DmaView;

    fn deref(&self) -> &DmaView {
        &self.view
    }
}

/// Guest memory by the addresses of a function, in one [pass](DmaPass) of its worker. Writes through it are marked in
/// the map's dirty bitmap.
pub struct DmaView {
    map: GuestMemoryLoadGuard<GuestMap>,
    iommu: Option<Arc<dyn Translate>>,
    /// The region of `map` that was looked up last: rings and buffers are mostly in the same one. It lives as long as
    /// the map, and is looked up again after blocks of it were unplugged: a disk's view may live as long as the map.
    known: Cell<Known>,
}

impl DmaView {
    fn new(map: GuestMemoryLoadGuard<GuestMap>, iommu: Option<Arc<dyn Translate>>) -> Self {
        Self { map, iommu, known: Cell::new(Known::NONE) }
    }

    /// A view of `map` by guest physical addresses.
    pub fn identity(map: &GuestMap) -> Self {
        Self::new(Memory::new(map.clone()).memory(), None)
    }

    /// The map, by guest physical addresses: for queries about memory, not for the device's DMA.
    pub fn map(&self) -> &GuestMap {
        &self.map
    }

    /// True if addresses are translated.
    pub fn is_translated(&self) -> bool {
        self.iommu.is_some()
    }

    /// True if another view is of the same map, and both use guest physical addresses.
    pub fn is_same(&self, other: &Self) -> bool {
        std::ptr::eq(self.map(), other.map()) && !self.is_translated() && !other.is_translated()
    }

    /// True if writes are logged now. Read it only after a write: logging may begin before the next one.
    #[inline]
    pub fn is_logged(&self) -> bool {
        // All regions are logged, or none, so the first is enough.
        self.map.iter().next().is_some_and(|region| region.bitmap().is_armed())
    }

    /// Marks `len` bytes at `host` as written, after a system call or a raw access that bypassed this view. `host` is
    /// the address of a slice of the view, or an address within.
    #[inline]
    pub fn note_written(&self, host: *const u8, len: usize) {
        if self.is_logged() {
            self.note_host(host, len);
        }
    }

    #[cold]
    fn note_host(&self, host: *const u8, len: usize) {
        for region in self.map.iter() {
            let offset = (host as usize).wrapping_sub(region.as_ptr() as usize);
            if offset < region.size() {
                region.bitmap().mark_dirty(offset, len);
            }
        }
    }
}

impl fmt::Debug for DmaView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaView").field("translated", &self.is_translated()).finish_non_exhaustive()
    }
}

impl GuestMemory for DmaView {
    type PhysicalMemory = GuestMap;
    type Bitmap = DirtyBitmap;

    fn check_range(&self, address: GuestAddress, len: usize, access: Permissions) -> bool {
        self.slices(address, len, access).all(|slice| slice.is_ok())
    }

    fn get_slices<'a>(
        &'a self,
        address: GuestAddress,
        len: usize,
        access: Permissions,
    ) -> MemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, DirtyBitmap>>> {
        Ok(self.slices(address, len, access))
    }

    fn physical_memory(&self) -> Option<&GuestMap> {
        (!self.is_translated()).then(|| self.map())
    }
}

impl DmaView {
    /// The first piece of `len` bytes, at least 1, at `address`: as many as lie in one mapping. `None` if there is no
    /// memory, or not for this access.
    #[inline]
    pub(crate) fn piece(
        &self,
        address: u64,
        len: usize,
        access: Permissions,
    ) -> Option<VolatileSlice<'_, DirtySlice<'_>>> {
        match self.whole(address, len) {
            Some(slice) => Some(slice),
            None => self.first_piece(address, len, access),
        }
    }

    #[cold]
    fn first_piece(&self, address: u64, len: usize, access: Permissions) -> Option<VolatileSlice<'_, DirtySlice<'_>>> {
        self.slices(GuestAddress(address), len, access).next()?.ok()
    }

    /// The `len` bytes, at least 1, at `address`, if that is a guest physical address and they lie in one region.
    /// Serves almost all accesses; if `None`, use [`GuestMemory::get_slices`].
    #[inline]
    pub(crate) fn whole(&self, address: u64, len: usize) -> Option<VolatileSlice<'_, DirtySlice<'_>>> {
        let (known, offset) = self.find(address, len)?;
        // SAFETY: the range lies in a region of the map, which this holds, and with it the region's memory and bitmap.
        unsafe {
            let bitmap = known.bitmap.as_ref()?.slice_at(known.offset.wrapping_add(offset));
            Some(VolatileSlice::with_bitmap(known.host.wrapping_add(offset), len, bitmap, None))
        }
    }

    /// Address at which the bytes of [`Self::whole`] are mapped, valid as long as the view. They belong to the guest
    /// until unplugged. Writers must call [`Self::note_written`].
    #[inline]
    pub(crate) fn host(&self, address: u64, len: usize) -> Option<*mut u8> {
        let (known, offset) = self.find(address, len)?;
        Some(known.host.wrapping_add(offset))
    }

    /// The region of the `len` bytes, at least 1, at the guest physical `address`, and their offset in it.
    #[inline]
    fn find(&self, address: u64, len: usize) -> Option<(Known, usize)> {
        let mut known = self.known.get();
        // SAFETY: the view holds the map, the only one that it looks up addresses in.
        if !known.contains(address, len) || unsafe { known.is_stale() } {
            known = self.look_up(address, len)?;
        }
        // A region is mapped, so an offset in it fits a usize.
        Some((known, address.wrapping_sub(known.start) as usize))
    }

    /// The region of the `len` bytes, at least 1, at the guest physical `address`.
    #[cold]
    fn look_up(&self, address: u64, len: usize) -> Option<Known> {
        if self.is_translated() {
            return None;
        }
        let known = Known::of(self.map(), address).filter(|known| known.contains(address, len))?;
        self.known.set(known);
        Some(known)
    }

    #[inline]
    fn slices(&self, address: GuestAddress, len: usize, access: Permissions) -> Slices<'_> {
        match &self.iommu {
            None => match self.whole(address.0, len) {
                Some(slice) => Slices::Whole(Some(slice)),
                None => Slices::Physical(Physical { map: self.map(), address: Some(address), rest: len }),
            },
            Some(iommu) => {
                Slices::Translated(Translated { map: &self.map, iommu, address, rest: len, access, piece: None })
            }
        }
    }
}

type Slice<'v> = MemoryResult<VolatileSlice<'v, DirtySlice<'v>>>;

/// The pieces of a range of guest physical addresses, as far as devices can reach them.
struct Physical<'v> {
    map: &'v GuestMap,
    /// The address of the rest; `None` beyond the last address.
    address: Option<GuestAddress>,
    rest: usize,
}

impl<'v> Iterator for Physical<'v> {
    type Item = Slice<'v>;

    fn next(&mut self) -> Option<Slice<'v>> {
        if self.rest == 0 {
            return None;
        }
        let slice = self.piece();
        if slice.is_err() {
            self.rest = 0;
        }
        Some(slice)
    }
}

impl<'v> Physical<'v> {
    /// The next piece. The rest must not be empty.
    fn piece(&mut self) -> Slice<'v> {
        let address = self.address.ok_or(Error::GuestAddressOverflow)?;
        let unmapped = || Error::InvalidGuestAddress(address);
        let known = Known::of(self.map, address.0).ok_or_else(unmapped)?;
        let region = self.map.find_region(address).ok_or_else(unmapped)?;
        let left = known.start.saturating_add(known.len).checked_sub(address.0).ok_or_else(unmapped)?;
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(self.rest);
        let slice = region.get_slice(MemoryRegionAddress(address.0 - region.start_addr().0), len)?;
        self.rest -= len;
        self.address = address.checked_add(len as u64);
        Ok(slice)
    }
}

/// The pieces of a range of addresses.
enum Slices<'v> {
    /// A single piece.
    Whole(Option<VolatileSlice<'v, DirtySlice<'v>>>),
    Physical(Physical<'v>),
    Translated(Translated<'v>),
}

impl<'v> Iterator for Slices<'v> {
    type Item = Slice<'v>;

    #[inline]
    fn next(&mut self) -> Option<Slice<'v>> {
        match self {
            Self::Whole(slice) => slice.take().map(Ok),
            Self::Physical(slices) => slices.next(),
            Self::Translated(slices) => slices.next(),
        }
    }
}

impl FusedIterator for Slices<'_> {}
impl<'v> GuestMemorySliceIterator<'v, DirtySlice<'v>> for Slices<'v> {}

/// The pieces of a range of addresses that an IOMMU translates.
struct Translated<'v> {
    map: &'v GuestMap,
    iommu: &'v Arc<dyn Translate>,
    /// First address that has not been translated yet.
    address: GuestAddress,
    rest: usize,
    access: Permissions,
    /// The range translated last; it may lie in several regions.
    piece: Option<Physical<'v>>,
}

impl<'v> Translated<'v> {
    fn next(&mut self) -> Option<Slice<'v>> {
        if let Some(slice) = self.piece.as_mut().and_then(Iterator::next) {
            if slice.is_err() {
                // The IOMMU maps an address without memory.
                self.rest = 0;
            }
            return Some(slice);
        }
        if self.rest == 0 {
            return None;
        }
        let address = self.address;
        match self.translate() {
            Some(piece) => self.piece.insert(piece).next(),
            None => {
                (self.rest, self.piece) = (0, None);
                Some(Err(Error::InvalidGuestAddress(address)))
            }
        }
    }

    /// Translates the next piece, which is not empty.
    fn translate(&mut self) -> Option<Physical<'v>> {
        let rest = u64::try_from(self.rest).ok()?;
        // A range cannot wrap around the address space.
        self.address.0.checked_add(rest - 1)?;
        effort::translation();
        let (physical, len) = self.iommu.translate(self.address.0, rest, self.access)?;
        if !(1..=rest).contains(&len) {
            return None;
        }
        // At most `rest`, which is a usize.
        let len = usize::try_from(len).ok()?;
        self.rest -= len;
        self.address = GuestAddress(self.address.0.wrapping_add(len as u64));
        Some(Physical { map: self.map, address: Some(GuestAddress(physical)), rest: len })
    }
}
