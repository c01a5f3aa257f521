//! A fake host IOMMU.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::GuestMap;
use vm_memory::{GuestAddress, Permissions};

use crate::vfio::error::VfioError;
use crate::vfio::memory::host_iommu::HostIommu;
use crate::vfio::piece::Piece;

/// Mappings, and the number of calls that succeed.
pub(crate) struct FakeIommu {
    /// Mappings.
    pub mapped: Mutex<Vec<Piece>>,
    /// Calls that succeed before one fails.
    pub left: Mutex<usize>,
    /// True if nothing can be unmapped.
    pub is_stuck: Mutex<bool>,
    /// True if it reports 0 bytes for each unmapped piece.
    pub miscounts: Mutex<bool>,
    /// Addresses that devices reach.
    pub reach: Mutex<Vec<RangeInclusive<u64>>>,
    /// The most mappings.
    pub most: usize,
}

impl FakeIommu {
    /// An IOMMU whose devices reach these addresses.
    pub(crate) fn new(reach: Vec<RangeInclusive<u64>>) -> Arc<Self> {
        Self::with_most(reach, 65_535)
    }

    /// As [`Self::new`], with room for `most` mappings.
    pub(crate) fn with_most(reach: Vec<RangeInclusive<u64>>, most: usize) -> Arc<Self> {
        Arc::new(Self {
            mapped: Mutex::default(),
            left: Mutex::new(usize::MAX),
            is_stuck: Mutex::default(),
            miscounts: Mutex::default(),
            reach: Mutex::new(reach),
            most,
        })
    }

    fn call(&self, error: i32) -> io::Result<()> {
        let mut left = self.left.lock();
        *left = left.checked_sub(1).ok_or_else(|| {
            *left = usize::MAX;
            io::Error::from_raw_os_error(error)
        })?;
        Ok(())
    }

    /// The addresses and sizes of the mappings, in order.
    pub(crate) fn sorted(&self) -> Vec<(u64, u64)> {
        let mut mapped: Vec<_> = self.mapped.lock().iter().map(|piece| (piece.iova, piece.size)).collect();
        mapped.sort_unstable();
        mapped
    }

    /// The address in this process that a device reaches at `iova`, and its permissions there.
    pub(crate) fn at(&self, iova: u64) -> Option<(u64, Permissions)> {
        let mapped = self.mapped.lock();
        let piece = mapped.iter().find(|piece| iova >= piece.iova && iova - piece.iova < piece.size)?;
        Some((piece.host + (iova - piece.iova), piece.access))
    }
}

impl HostIommu for FakeIommu {
    unsafe fn map(&self, piece: &Piece) -> io::Result<()> {
        self.call(libc::ENOMEM)?;
        let mut mapped = self.mapped.lock();
        let apart = |other: &Piece| piece.iova + piece.size <= other.iova || other.iova + other.size <= piece.iova;
        assert!(mapped.iter().all(apart), "overlap");
        assert_ne!(piece.access, Permissions::No);
        mapped.push(*piece);
        assert!(mapped.len() <= self.most, "the kernel refuses this");
        Ok(())
    }

    fn unmap(&self, addresses: RangeInclusive<u64>) -> io::Result<u64> {
        self.call(libc::EINVAL)?;
        if *self.is_stuck.lock() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut mapped = self.mapped.lock();
        for piece in mapped.iter().filter(|piece| addresses.contains(&piece.iova)) {
            assert!(is_mapped(piece.host), "devices reach memory that this process has no more");
        }
        let inside = |piece: &Piece| addresses.contains(&piece.iova);
        let taken: u64 = mapped.iter().filter(|piece| inside(piece)).map(|piece| piece.size).sum();
        assert_ne!(taken, 0, "not mapped");
        let whole = |piece: &Piece| addresses.contains(&(piece.iova + piece.size - 1)) == inside(piece);
        assert!(mapped.iter().all(whole), "a piece would be split");
        mapped.retain(|piece| !inside(piece));
        Ok(if *self.miscounts.lock() { 0 } else { taken })
    }

    fn reach(&self) -> Vec<RangeInclusive<u64>> {
        self.reach.lock().clone()
    }

    fn most_mappings(&self) -> usize {
        self.most
    }

    fn counted(&self) -> &'static str {
        "VmLck:"
    }

    fn attach(&self, _file: BorrowedFd<'_>) -> Result<(), VfioError> {
        self.call(libc::ENOMEM).map_err(VfioError::Map)
    }

    fn beside(self: Arc<Self>) -> Result<Arc<dyn HostIommu>, VfioError> {
        Ok(Self::with_most(self.reach(), self.most))
    }
}

/// True if this process has memory at `address`, the start of a page.
fn is_mapped(address: u64) -> bool {
    let mut resident = 0;
    // SAFETY: the kernel writes a byte for the one page, and does not read the page.
    unsafe { libc::mincore(address as *mut libc::c_void, 1, &mut resident) == 0 }
}

/// A guest's memory: addresses and sizes.
pub(crate) fn memory(ranges: &[(u64, usize)]) -> GuestMap {
    let ranges: Vec<_> = ranges.iter().map(|(start, size)| (GuestAddress(*start), *size)).collect();
    GuestMap::from_ranges(&ranges).unwrap()
}
