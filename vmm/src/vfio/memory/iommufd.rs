//! The host's IOMMU through iommufd (`Documentation/userspace-api/iommufd.rst`): one file, with any number of address
//! spaces, to which devices are attached one by one.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::passed_fd;
use crate::vfio::error::VfioError;
use crate::vfio::kernel::{ioctl, iommufd_ioctl as calls};
use crate::vfio::memory::host_iommu::{HostIommu, USUAL_LIMIT};
use crate::vfio::piece::Piece;

/// The file through which iommufds are opened.
const IOMMUFD: &str = "/dev/iommu";

/// An iommufd.
#[derive(Debug)]
pub(crate) struct Iommufd {
    file: OwnedFd,
}

impl Iommufd {
    /// The iommufd that this process was given as the descriptor `given`, or else a new one.
    ///
    /// # Errors
    ///
    /// Fails if the host has no iommufd, or the descriptor is not one.
    pub(crate) fn open(given: Option<RawFd>) -> Result<Self, VfioError> {
        match given {
            Some(fd) => passed_fd::duplicate(fd).map(|file| Self { file }).ok_or(VfioError::NotIommufd),
            None => Self::at(Path::new(IOMMUFD)),
        }
    }

    fn at(path: &Path) -> Result<Self, VfioError> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|error| VfioError::OpenIommufd { path: path.into(), error })?;
        Ok(Self { file: file.into() })
    }

    /// File of the iommufd.
    pub(crate) const fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Binds `device` to this iommufd, until its file is closed.
    ///
    /// # Errors
    ///
    /// Fails with the kernel's error.
    pub(crate) fn bind(&self, device: &OwnedFd) -> io::Result<()> {
        ioctl::bind(device, self.file.as_raw_fd())
    }

    /// An address space of its own, without devices and mappings.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is not an iommufd, or the kernel lacks memory.
    pub(crate) fn space(self: &Arc<Self>) -> Result<Ioas, VfioError> {
        Ioas::new(self, None)
    }
}

/// An address space of an iommufd.
pub(crate) struct Ioas {
    iommufd: Arc<Iommufd>,
    id: u32,
    /// Address space from which mappings are copied, if it has the same memory.
    source: Option<Arc<Self>>,
    /// Mappings that can be copied, by their address in this process.
    mapped: Mutex<BTreeMap<u64, Piece>>,
}

impl Ioas {
    fn new(iommufd: &Arc<Iommufd>, source: Option<Arc<Self>>) -> Result<Self, VfioError> {
        let id = calls::alloc(&iommufd.file).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOTTY) => VfioError::NotIommufd,
            _ => VfioError::of("get an address space of iommufd")(error),
        })?;
        Ok(Self { iommufd: Arc::clone(iommufd), id, source, mapped: Mutex::default() })
    }

    /// The devices' address of the memory of `piece`, if this address space maps all of it in one mapping.
    fn iova_of(&self, piece: &Piece) -> Option<u64> {
        place(&self.mapped.lock(), piece)
    }
}

/// The devices' address of the memory of `piece`, if it is a part of one of `mapped`, which are keyed by address in
/// this process.
fn place(mapped: &BTreeMap<u64, Piece>, piece: &Piece) -> Option<u64> {
    let (_, whole) = mapped.range(..=piece.host).next_back()?;
    let offset = piece.host - whole.host;
    let end = offset.checked_add(piece.size)?;
    (end <= whole.size && whole.access.allow(piece.access)).then(|| whole.iova.checked_add(offset)).flatten()
}

impl HostIommu for Ioas {
    unsafe fn map(&self, piece: &Piece) -> io::Result<()> {
        let source = self.source.as_ref().and_then(|source| Some((source.id, source.iova_of(piece)?)));
        match source {
            Some(source) => calls::copy(&self.iommufd.file, self.id, piece, source)?,
            // SAFETY: the caller upholds this function's contract, which is that of the call.
            None => unsafe { calls::map(&self.iommufd.file, self.id, piece) }?,
        }
        if self.source.is_none() {
            self.mapped.lock().insert(piece.host, *piece);
        }
        Ok(())
    }

    fn unmap(&self, addresses: RangeInclusive<u64>) -> io::Result<u64> {
        // A piece that cannot be unmapped as a whole is not copied again either.
        self.mapped.lock().retain(|_, piece| !addresses.contains(&piece.iova));
        calls::unmap(&self.iommufd.file, self.id, addresses)
    }

    fn reach(&self) -> Vec<RangeInclusive<u64>> {
        // A kernel that does not report the ranges refuses addresses when it maps.
        calls::ranges(&self.iommufd.file, self.id).unwrap_or_else(|_| vec![0..=u64::MAX])
    }

    fn most_mappings(&self) -> usize {
        // iommufd has no limit. Without one, a guest could cause as many system calls as all its domains have mappings,
        // once for each device that it attaches, while others wait.
        USUAL_LIMIT
    }

    fn counted(&self) -> &'static str {
        "VmPin:"
    }

    fn attach(&self, device: BorrowedFd<'_>) -> Result<(), VfioError> {
        ioctl::attach(&device, self.id).map_err(|error| match error.raw_os_error() {
            Some(libc::EADDRINUSE) => VfioError::Reserved,
            // Mapped memory is pinned when the first device is attached.
            Some(libc::ENOMEM) => VfioError::Map(error),
            _ => VfioError::of("attach the device to its address space")(error),
        })
    }

    fn beside(self: Arc<Self>) -> Result<Arc<dyn HostIommu>, VfioError> {
        Ok(Arc::new(Self::new(&Arc::clone(&self.iommufd), Some(self))?))
    }
}

impl Drop for Ioas {
    fn drop(&mut self) {
        // The sender of the iommufd still has it open, so closing it here does not destroy the address space.
        if let Err(error) = calls::destroy(&self.iommufd.file, self.id) {
            log::warn!("an IOMMU address space for devices of the host was not freed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use vm_memory::Permissions;

    use super::*;

    #[test]
    fn a_host_without_iommufd_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let error = Iommufd::at(&folder.path().join("iommu")).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "iommu: No such file or directory (os error 2); load the module iommufd (Linux 6.6 or later with \
             CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV), or leave iommufd out of --platform"
            ),
            "{error}"
        );
    }

    #[test]
    fn a_descriptor_that_is_no_iommufd_is_refused() {
        let other = File::open("/dev/null").unwrap();
        let error = |fd| Iommufd::open(Some(fd)).and_then(|iommufd| Arc::new(iommufd).space()).err().unwrap();
        for fd in [other.as_raw_fd(), 1 << 20] {
            assert_eq!(error(fd).to_string(), "--platform iommufd_fd=: not an iommufd; open /dev/iommu and pass that");
        }
    }

    #[test]
    fn a_device_has_no_more_mappings_by_iommufd_than_by_a_container() {
        let iommufd = Arc::new(Iommufd { file: File::open("/dev/null").unwrap().into() });
        let ioas = Ioas { iommufd, id: 0, source: None, mapped: Mutex::default() };
        assert_eq!(ioas.most_mappings(), 65_535);
        let error = VfioError::TooManyMappings(ioas.most_mappings()).to_string();
        assert!(error.ends_with("larger pages, or without iommufd raise vfio_iommu_type1.dma_entry_limit"), "{error}");
    }

    #[test]
    fn copy_source_mapping_covers_the_piece_and_allows_its_access() {
        let piece = |iova, size, host, access| Piece { iova, size, host, access };
        let mapped = [
            piece(0, 0x4000, 0x10_0000, Permissions::ReadWrite),
            piece(1 << 32, 0x2000, 0x10_4000, Permissions::ReadWrite),
            piece(2 << 32, 0x2000, 0x20_0000, Permissions::Read),
        ];
        let mapped = mapped.map(|piece| (piece.host, piece)).into();
        let at = |host, size, access| place(&mapped, &piece(0x7000, size, host, access));
        assert_eq!(at(0x10_0000, 0x4000, Permissions::ReadWrite), Some(0));
        assert_eq!(at(0x10_5000, 0x1000, Permissions::Read), Some((1 << 32) + 0x1000));
        assert_eq!(at(0x10_3000, 0x2000, Permissions::Read), None, "two mappings");
        assert_eq!(at(0x20_1000, 0x1000, Permissions::Read), Some((2 << 32) + 0x1000));
        assert_eq!(at(0x20_0000, 0x1000, Permissions::ReadWrite), None, "read-only");
        assert_eq!((at(0xf_f000, 0x1000, Permissions::Read), at(0x30_0000, 1, Permissions::Read)), (None, None));
    }
}
