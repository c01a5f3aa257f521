//! The host's IOMMU: the mappings of this process's memory for host devices. This file has the type 1 IOMMU of groups,
//! `iommufd` the other one.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use crate::vfio::error::VfioError;
use crate::vfio::kernel::{info, ioctl};
use crate::vfio::piece::Piece;

/// An address space of devices.
///
/// Devices of one VM that reach all of its memory share one. A device behind a virtual IOMMU gets its own, which the
/// virtual IOMMU fills.
pub(crate) trait HostIommu: Send + Sync {
    /// Maps `piece` for the devices.
    ///
    /// # Safety
    ///
    /// Until it is unmapped, or the address space is closed, the piece must be a mapping without a Rust reference in
    /// this process.
    ///
    /// # Errors
    ///
    /// Fails if the addresses are mapped already, the devices cannot reach them, or the limit on pinned memory is too
    /// low.
    unsafe fn map(&self, piece: &Piece) -> io::Result<()>;

    /// Unmaps all pieces at these addresses, as wholes. When this returns, no device reaches anything there. Returns
    /// the number of bytes that were mapped.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses. Devices may still reach the pieces.
    fn unmap(&self, addresses: RangeInclusive<u64>) -> io::Result<u64>;

    /// The addresses that the devices can use.
    fn reach(&self) -> Vec<RangeInclusive<u64>>;

    /// The most pieces that an empty address space can have. Each is a system call, also on a vCPU whose driver
    /// attaches the device to a domain with that many mappings.
    fn most_mappings(&self) -> usize;

    /// Field of a process's status in which the kernel counts pinned memory.
    fn counted(&self) -> &'static str;

    /// Attaches the devices of `file` to this address space: a group, with all its devices, until it is closed; or with
    /// iommufd one device, until it is detached.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    fn attach(&self, file: BorrowedFd<'_>) -> Result<(), VfioError>;

    /// Another address space, without devices and mappings. Memory mapped in both is pinned once, if the kernel
    /// supports that.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    fn beside(self: Arc<Self>) -> Result<Arc<dyn HostIommu>, VfioError>;
}

/// The file through which containers are opened.
const CONTAINER: &str = "/dev/vfio/vfio";

/// Number of mappings that an address space can have, if the kernel does not report it.
pub(crate) const USUAL_LIMIT: usize = 65_535;

/// VFIO's container with the type 1 IOMMU.
#[derive(Debug)]
pub(crate) struct Type1 {
    container: File,
}

impl Type1 {
    /// An address space of its own, without devices.
    ///
    /// # Errors
    ///
    /// Fails if the host has no VFIO, or not with the type 1 IOMMU.
    pub(crate) fn open() -> Result<Self, VfioError> {
        let path = Path::new(CONTAINER);
        let container = OpenOptions::new().read(true).write(true).open(path);
        let container = container.map_err(|error| VfioError::Open { path: path.into(), error })?;
        if !ioctl::is_type1(&container) {
            return Err(VfioError::NoType1);
        }
        Ok(Self { container })
    }
}

impl HostIommu for Type1 {
    unsafe fn map(&self, piece: &Piece) -> io::Result<()> {
        // SAFETY: the caller upholds this function's contract, which is that of the call.
        unsafe { ioctl::map(&self.container, piece) }
    }

    fn unmap(&self, addresses: RangeInclusive<u64>) -> io::Result<u64> {
        ioctl::unmap(&self.container, addresses)
    }

    fn reach(&self) -> Vec<RangeInclusive<u64>> {
        let said = ioctl::iommu_info(&self.container).ok().and_then(|info| info::reachable(&info));
        // A kernel that does not report the ranges refuses addresses when it maps.
        said.unwrap_or_else(|| vec![0..=u64::MAX])
    }

    fn most_mappings(&self) -> usize {
        let said = ioctl::iommu_info(&self.container).ok().and_then(|info| info::mappings_left(&info));
        // A kernel before 5.10 does not report it. This is its limit (`vfio_iommu_type1.dma_entry_limit`).
        said.map_or(USUAL_LIMIT, |left| left as usize)
    }

    fn counted(&self) -> &'static str {
        "VmLck:"
    }

    fn beside(self: Arc<Self>) -> Result<Arc<dyn HostIommu>, VfioError> {
        Ok(Arc::new(Self::open()?))
    }

    fn attach(&self, group: BorrowedFd<'_>) -> Result<(), VfioError> {
        ioctl::set_container(&group, self.container.as_raw_fd()).map_err(VfioError::of("attach its group"))?;
        match ioctl::set_type1(&self.container) {
            Ok(()) => Ok(()),
            // The container has this IOMMU since its first group.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(VfioError::NoRemapping("vfio_iommu_type1")),
            Err(error) => Err(VfioError::of("use the host's IOMMU")(error)),
        }
    }
}
