//! An address space of host devices: pieces of this process's memory, at the devices' addresses.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

use virtio_devices::Locking;

use crate::vfio::error::VfioError;
use crate::vfio::memory::host_iommu::HostIommu;
use crate::vfio::piece::Piece;

/// Memory that devices reach. Dropping it unmaps all of it.
pub(crate) struct AddressSpace {
    iommu: Arc<dyn HostIommu>,
    reach: Vec<RangeInclusive<u64>>,
    most: usize,
    /// Pieces by their first addresses, disjoint.
    mapped: BTreeMap<u64, Piece>,
    /// True once a mismatch with the kernel's mappings was logged.
    is_miscounted: bool,
}

impl AddressSpace {
    /// The empty address space of `iommu`.
    pub(crate) fn new(iommu: Arc<dyn HostIommu>) -> Self {
        let (reach, most) = (iommu.reach(), iommu.most_mappings());
        Self { iommu, reach, most, mapped: BTreeMap::new(), is_miscounted: false }
    }

    /// Field of a process's status in which the kernel counts pinned memory.
    pub(crate) fn counted(&self) -> &'static str {
        self.iommu.counted()
    }

    /// Reads the reachable addresses again, after a device was attached.
    pub(crate) fn ask_reach(&mut self) {
        self.reach = self.iommu.reach();
    }

    /// The most pieces that can be mapped.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Maps exactly the pieces `wanted`, which are disjoint. Pieces that stay are not touched.
    ///
    /// # Safety
    ///
    /// Until they are unmapped, the pieces must be mappings without a Rust reference in this process.
    ///
    /// # Errors
    ///
    /// Fails if the pieces cannot be mapped. The former pieces are mapped then.
    pub(crate) unsafe fn set(&mut self, wanted: &[Piece]) -> Result<(), VfioError> {
        let new: BTreeMap<_, _> = wanted.iter().map(|piece| (piece.iova, *piece)).collect();
        let gone: Vec<_> = self.mapped.values().filter(|piece| new.get(&piece.iova) != Some(piece)).copied().collect();
        let came: Vec<_> = new.into_values().filter(|piece| self.mapped.get(&piece.iova) != Some(piece)).collect();
        self.check(&came, gone.len())?;
        if gone.len() == self.mapped.len() {
            self.clear().map_err(VfioError::Map)?;
        }
        for (done, piece) in gone.iter().enumerate() {
            if let Err(error) = self.unmap(*piece) {
                // SAFETY: these pieces were mapped until now, for which the caller at that time made this promise.
                unsafe { self.put_back(gone.get(..done).unwrap_or_default()) };
                return Err(VfioError::Map(error));
            }
        }
        // SAFETY: the caller upholds this function's contract.
        unsafe { self.add_checked(&came) }.inspect_err(|_| {
            // SAFETY: as above.
            unsafe { self.put_back(&gone) };
        })
    }

    /// Maps `pieces` in addition to the present ones, with which they do not overlap.
    ///
    /// # Safety
    ///
    /// As [`Self::set`].
    ///
    /// # Errors
    ///
    /// Fails if the pieces cannot be mapped. None of them is mapped then.
    pub(crate) unsafe fn add(&mut self, pieces: &[Piece]) -> Result<(), VfioError> {
        self.check(pieces, 0)?;
        // SAFETY: the caller upholds this function's contract.
        unsafe { self.add_checked(pieces) }
    }

    /// Unmaps all pieces from the address `first` to `last`. No piece may be partly inside.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn remove(&mut self, first: u64, last: u64) -> io::Result<()> {
        let inside: Vec<_> = self.mapped.range(first..=last).map(|(_, piece)| *piece).collect();
        let (Some(lowest), Some(highest)) = (inside.first(), inside.last()) else { return Ok(()) };
        let bytes = inside.iter().fold(0_u64, |bytes, piece| bytes.saturating_add(piece.size));
        self.take_back(lowest.iova..=highest.last(), bytes)?;
        for piece in inside {
            self.mapped.remove(&piece.iova);
        }
        Ok(())
    }

    /// Unmaps `piece`, if exactly this piece is mapped.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn take(&mut self, piece: &Piece) -> io::Result<()> {
        if self.mapped.get(&piece.iova) == Some(piece) { self.unmap(*piece) } else { Ok(()) }
    }

    /// Unmaps everything.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        self.remove(0, u64::MAX)
    }

    fn check(&self, came: &[Piece], gone: usize) -> Result<(), VfioError> {
        if self.mapped.len().saturating_sub(gone).saturating_add(came.len()) > self.most {
            return Err(VfioError::TooManyMappings(self.most));
        }
        for piece in came {
            let addresses = piece.iova..=piece.last();
            let fits =
                |range: &RangeInclusive<u64>| range.contains(addresses.start()) && range.contains(addresses.end());
            if !self.reach.iter().any(fits) {
                return Err(VfioError::Unreachable { memory: addresses, reach: self.reach.clone() });
            }
        }
        Ok(())
    }

    unsafe fn add_checked(&mut self, pieces: &[Piece]) -> Result<(), VfioError> {
        for (done, piece) in pieces.iter().enumerate() {
            // SAFETY: the caller upholds this function's contract.
            if let Err(error) = unsafe { self.map(*piece) } {
                for piece in pieces.get(..done).unwrap_or_default() {
                    // Undoes a mapping that was just made.
                    let _ = self.unmap(*piece);
                }
                return Err(VfioError::Map(error));
            }
        }
        Ok(())
    }

    unsafe fn put_back(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            // SAFETY: the caller upholds this function's contract.
            if let Err(error) = unsafe { self.map(*piece) } {
                log::error!("devices of the host have lost the guest's memory at {:#x}: {error}", piece.iova);
            }
        }
    }

    unsafe fn map(&mut self, piece: Piece) -> io::Result<()> {
        // SAFETY: the caller upholds this function's contract.
        unsafe { self.iommu.map(&piece) }?;
        self.mapped.insert(piece.iova, piece);
        Ok(())
    }

    fn unmap(&mut self, piece: Piece) -> io::Result<()> {
        if self.mapped.contains_key(&piece.iova) {
            self.take_back(piece.iova..=piece.last(), piece.size)?;
            self.mapped.remove(&piece.iova);
        }
        Ok(())
    }

    /// Unmaps everything at these addresses, where `bytes` bytes should be mapped. Nothing is mapped there afterwards,
    /// even if the kernel's count differs.
    fn take_back(&mut self, addresses: RangeInclusive<u64>, bytes: u64) -> io::Result<()> {
        let (first, last) = (*addresses.start(), *addresses.end());
        let taken = self.iommu.unmap(addresses)?;
        // Logged once: a guest may cause it again and again.
        if taken != bytes && !std::mem::replace(&mut self.is_miscounted, true) {
            log::warn!(
                "the host's kernel had {taken} bytes mapped for a device from {first:#x} to {last:#x}, where {bytes} \
                 were to be; nothing is mapped there now"
            );
        }
        Ok(())
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        // If the kernel does not unmap a piece now, it does when the address space is closed.
        let _ = self.clear();
    }
}

/// Makes a `change` that pins at most `size` bytes more. First raises the limit on pinned memory, counted in the status
/// field `counted`, as far as this process may.
///
/// # Errors
///
/// Fails as `change` does; if it lacks memory because the limit is too low, with the numbers.
pub(crate) fn pinning(
    counted: &str,
    size: u64,
    change: impl FnOnce() -> Result<(), VfioError>,
) -> Result<(), VfioError> {
    let locking = Locking::reserve(size, counted);
    change().map_err(|error| match error {
        VfioError::Map(error) if error.raw_os_error() == Some(libc::ENOMEM) && locking.falls_short() => {
            VfioError::MemoryLock(locking)
        }
        error => error,
    })
}
