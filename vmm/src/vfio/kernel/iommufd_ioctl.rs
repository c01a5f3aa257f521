//! The system calls of iommufd (`linux/iommufd.h`). The structures come from iommufd-bindings.

use std::io;
use std::mem::size_of;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::os::raw::c_ulong;

use iommufd_bindings::{
    IOMMUFD_CMD_DESTROY, IOMMUFD_CMD_IOAS_ALLOC, IOMMUFD_CMD_IOAS_COPY, IOMMUFD_CMD_IOAS_IOVA_RANGES,
    IOMMUFD_CMD_IOAS_MAP, IOMMUFD_CMD_IOAS_UNMAP, IOMMUFD_TYPE, iommu_destroy, iommu_ioas_alloc, iommu_ioas_copy,
    iommu_ioas_iova_ranges, iommu_ioas_map, iommu_ioas_unmap, iommu_iova_range,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITEABLE,
};
use vm_memory::Permissions;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

use crate::vfio::kernel::ioctl::{checked, size_of_u32};
use crate::vfio::piece::Piece;

const fn number(command: u32) -> c_ulong {
    (IOMMUFD_TYPE as c_ulong) << 8 | command as c_ulong
}

/// The most ranges that are requested: no IOMMU has so many holes.
const MOST: usize = 4096;

/// Creates an address space without mappings, and returns its number.
pub(crate) fn alloc(iommufd: &impl AsRawFd) -> io::Result<u32> {
    let mut alloc = iommu_ioas_alloc { size: size_of_u32::<iommu_ioas_alloc>(), flags: 0, out_ioas_id: 0 };
    // SAFETY: the kernel reads and writes only the structure, whose size it is given.
    checked(unsafe { ioctl_with_mut_ref(iommufd, number(IOMMUFD_CMD_IOAS_ALLOC), &mut alloc) })?;
    Ok(alloc.out_ioas_id)
}

/// Destroys the object number `id`, which must be unused.
pub(crate) fn destroy(iommufd: &impl AsRawFd, id: u32) -> io::Result<()> {
    let destroy = iommu_destroy { size: size_of_u32::<iommu_destroy>(), id };
    // SAFETY: the kernel reads only the structure, whose size it is given.
    checked(unsafe { ioctl_with_ref(iommufd, number(IOMMUFD_CMD_DESTROY), &destroy) }).map(drop)
}

/// The addresses that all devices of the address space `ioas` can use.
pub(crate) fn ranges(iommufd: &impl AsRawFd, ioas: u32) -> io::Result<Vec<RangeInclusive<u64>>> {
    let mut ranges = vec![iommu_iova_range { start: 0, last: 0 }; 16];
    loop {
        let mut ask = iommu_ioas_iova_ranges {
            size: size_of_u32::<iommu_ioas_iova_ranges>(),
            ioas_id: ioas,
            num_iovas: u32::try_from(ranges.len()).map_err(io::Error::other)?,
            __reserved: 0,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            out_iova_alignment: 0,
        };
        // SAFETY: the kernel writes only the structure, whose size it is given, and at most as many ranges as fit into
        // `ranges`.
        let asked = checked(unsafe { ioctl_with_mut_ref(iommufd, number(IOMMUFD_CMD_IOAS_IOVA_RANGES), &mut ask) });
        let there = ask.num_iovas as usize;
        match asked {
            Ok(_) => {
                return Ok(ranges.iter().take(there).map(|range| range.start..=range.last).collect());
            }
            // The kernel has returned the number of ranges.
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && there > ranges.len() && there <= MOST => {
                ranges.resize(there, iommu_iova_range { start: 0, last: 0 });
            }
            Err(error) => return Err(error),
        }
    }
}

const fn flags(access: Permissions) -> u32 {
    match access {
        Permissions::No => FIXED_IOVA,
        Permissions::Read => FIXED_IOVA | READABLE,
        Permissions::Write => FIXED_IOVA | WRITEABLE,
        Permissions::ReadWrite => FIXED_IOVA | READABLE | WRITEABLE,
    }
}

/// Maps `piece` for the devices of the address space `ioas`.
///
/// # Safety
///
/// Until [`unmap`] has returned, or the address space is destroyed, the piece must be a mapping without a Rust
/// reference in this process.
pub(crate) unsafe fn map(iommufd: &impl AsRawFd, ioas: u32, piece: &Piece) -> io::Result<()> {
    let map = iommu_ioas_map {
        size: size_of_u32::<iommu_ioas_map>(),
        flags: flags(piece.access),
        ioas_id: ioas,
        __reserved: 0,
        user_va: piece.host,
        length: piece.size,
        iova: piece.iova,
    };
    // SAFETY: the kernel reads the structure; the caller promises that the memory may be written to.
    checked(unsafe { ioctl_with_ref(iommufd, number(IOMMUFD_CMD_IOAS_MAP), &map) }).map(drop)
}

/// Maps `piece` for the devices of the address space `ioas` as a copy of the mapping at `source_iova` of `source`. The
/// memory is pinned only once.
pub(crate) fn copy(
    iommufd: &impl AsRawFd,
    ioas: u32,
    piece: &Piece,
    (source, source_iova): (u32, u64),
) -> io::Result<()> {
    let copy = iommu_ioas_copy {
        size: size_of_u32::<iommu_ioas_copy>(),
        flags: flags(piece.access),
        dst_ioas_id: ioas,
        src_ioas_id: source,
        length: piece.size,
        dst_iova: piece.iova,
        src_iova: source_iova,
    };
    // SAFETY: the kernel reads the structure. The caller that mapped the source upholds the contract of [`map`].
    checked(unsafe { ioctl_with_ref(iommufd, number(IOMMUFD_CMD_IOAS_COPY), &copy) }).map(drop)
}

/// Unmaps the pieces at these addresses for the devices of the address space `ioas`; each must have been mapped as a
/// whole. Returns the number of bytes that were mapped.
pub(crate) fn unmap(iommufd: &impl AsRawFd, ioas: u32, addresses: RangeInclusive<u64>) -> io::Result<u64> {
    let iova = *addresses.start();
    // The size of all 2^64 addresses does not fit. No IOMMU has so many.
    let length = (addresses.end() - iova).checked_add(1).ok_or(io::ErrorKind::InvalidInput)?;
    let mut unmap = iommu_ioas_unmap { size: size_of_u32::<iommu_ioas_unmap>(), ioas_id: ioas, iova, length };
    // SAFETY: the kernel reads and writes only the structure, whose size it is given.
    checked(unsafe { ioctl_with_mut_ref(iommufd, number(IOMMUFD_CMD_IOAS_UNMAP), &mut unmap) })?;
    Ok(unmap.length)
}

// The sizes of Linux 6.2, the first kernel with iommufd (`iommufd_ioctl_ops`).
const _: () = assert!(size_of::<iommu_ioas_map>() == 40 && size_of::<iommu_ioas_copy>() == 40);
