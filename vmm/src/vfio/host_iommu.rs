//! The host's IOMMU: which of this process's memory a device of the host reaches, and at which addresses. Here is that
//! of groups; `iommufd` has the other.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use crate::vfio::error::VfioError;
use crate::vfio::piece::Piece;
use crate::vfio::{info, ioctl};

/// An address space of devices.
///
/// Devices of one VM that reach all of its memory share one. A device behind a virtual IOMMU gets one of its own, which
/// the virtual IOMMU fills.
pub(crate) trait HostIommu: Send + Sync {
    /// Lets the devices reach `piece`.
    ///
    /// # Safety
    ///
    /// Until it is unmapped, or the address space is gone, it must be a mapping of which nothing in this process has a
    /// Rust reference.
    ///
    /// # Errors
    ///
    /// Fails if something is there already, the devices cannot have these addresses, or too little memory may be
    /// pinned.
    unsafe fn map(&self, piece: &Piece) -> io::Result<()>;

    /// Takes back all pieces at these addresses, as wholes. When this returns, no device reaches anything there.
    /// Returns how many bytes that were.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses. Devices may still reach them.
    fn unmap(&self, addresses: RangeInclusive<u64>) -> io::Result<u64>;

    /// The addresses that the devices can have.
    fn reach(&self) -> Vec<RangeInclusive<u64>>;

    /// The most pieces that can be mapped, where nothing is mapped yet. Each is a system call, also of a vCPU whose
    /// driver attaches the device to a domain that has as many.
    fn most_mappings(&self) -> usize;

    /// Field of a process's status in which the kernel counts pinned memory.
    fn counted(&self) -> &'static str;

    /// Lets the devices of `file` have this address space: a group, with all its devices, until it is closed; or by
    /// iommufd one device, until it is detached.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    fn attach(&self, file: BorrowedFd<'_>) -> Result<(), VfioError>;

    /// Another address space, without devices and mappings. What is mapped in both is pinned once, if the kernel can do
    /// that.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    fn beside(self: Arc<Self>) -> Result<Arc<dyn HostIommu>, VfioError>;
}

/// The file of all containers.
const CONTAINER: &str = "/dev/vfio/vfio";

/// Number of mappings that an address space can have, unless the kernel reports it.
pub(super) const USUAL_LIMIT: usize = 65_535;

/// VFIO's container with the type 1 IOMMU.
#[derive(Debug)]
pub(super) struct Type1 {
    container: File,
}

impl Type1 {
    /// An address space of its own, without devices.
    ///
    /// # Errors
    ///
    /// Fails if the host has no VFIO, or not of this kind.
    pub(super) fn open() -> Result<Self, VfioError> {
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
        // SAFETY: the caller promises what this function asks for, and that is what the call needs.
        unsafe { ioctl::map(&self.container, piece) }
    }

    fn unmap(&self, addresses: RangeInclusive<u64>) -> io::Result<u64> {
        ioctl::unmap(&self.container, addresses)
    }

    fn reach(&self) -> Vec<RangeInclusive<u64>> {
        let said = ioctl::iommu_info(&self.container).ok().and_then(|info| info::reachable(&info));
        // A kernel that does not say refuses when it maps.
        said.unwrap_or_else(|| vec![0..=u64::MAX])
    }

    fn most_mappings(&self) -> usize {
        let said = ioctl::iommu_info(&self.container).ok().and_then(|info| info::mappings_left(&info));
        // A kernel before 5.10 does not say. This is its limit (`vfio_iommu_type1.dma_entry_limit`).
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
            // It is one already, since its first group.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(VfioError::NoRemapping("vfio_iommu_type1")),
            Err(error) => Err(VfioError::of("use the host's IOMMU")(error)),
        }
    }
}
