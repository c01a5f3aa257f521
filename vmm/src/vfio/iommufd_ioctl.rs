//! The system calls of iommufd (`linux/iommufd.h`). The structures are iommufd-bindings'.

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

use crate::vfio::ioctl::{checked, size_of_u32};
use crate::vfio::piece::Piece;

const fn number(command: u32) -> c_ulong {
    (IOMMUFD_TYPE as c_ulong) << 8 | command as c_ulong
}

/// The most ranges that are asked for: no IOMMU has so many holes.
const MOST: usize = 4096;

/// A new address space without mappings: its number.
pub(super) fn alloc(iommufd: &impl AsRawFd) -> io::Result<u32> {
    let mut alloc = iommu_ioas_alloc { size: size_of_u32::<iommu_ioas_alloc>(), flags: 0, out_ioas_id: 0 };
    // SAFETY: the kernel reads and writes no more than the structure, whose size it is told.
    checked(unsafe { ioctl_with_mut_ref(iommufd, number(IOMMUFD_CMD_IOAS_ALLOC), &mut alloc) })?;
    Ok(alloc.out_ioas_id)
}

/// Ends the object number `id`, which nothing may use any more.
pub(super) fn destroy(iommufd: &impl AsRawFd, id: u32) -> io::Result<()> {
    let destroy = iommu_destroy { size: size_of_u32::<iommu_destroy>(), id };
    // SAFETY: the kernel reads no more than the structure, whose size it is told.
    checked(unsafe { ioctl_with_ref(iommufd, number(IOMMUFD_CMD_DESTROY), &destroy) }).map(drop)
}

/// The addresses that all devices of the address space `ioas` can have.
pub(super) fn ranges(iommufd: &impl AsRawFd, ioas: u32) -> io::Result<Vec<RangeInclusive<u64>>> {
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
        // SAFETY: the kernel writes no more than the structure, whose size it is told, and as many ranges as it is
        // told that there is room for.
        let asked = checked(unsafe { ioctl_with_mut_ref(iommufd, number(IOMMUFD_CMD_IOAS_IOVA_RANGES), &mut ask) });
        let there = ask.num_iovas as usize;
        match asked {
            Ok(_) => {
                return Ok(ranges.iter().take(there).map(|range| range.start..=range.last).collect());
            }
            // It has said how many there are.
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

/// Lets devices of the address space `ioas` reach `piece`.
///
/// # Safety
///
/// Until [`unmap`] has taken it back, or the address space is gone, it must be a mapping of which nothing in this
/// process has a Rust reference.
pub(super) unsafe fn map(iommufd: &impl AsRawFd, ioas: u32, piece: &Piece) -> io::Result<()> {
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

/// Lets devices of the address space `ioas` reach `piece`, which devices of `source` reach at `source_iova`. What is
/// pinned for both is pinned once.
pub(super) fn copy(
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
    // SAFETY: the kernel reads the structure. Whoever has mapped the source has promised what a mapping needs.
    checked(unsafe { ioctl_with_ref(iommufd, number(IOMMUFD_CMD_IOAS_COPY), &copy) }).map(drop)
}

/// Takes what is mapped at these addresses from devices of the address space `ioas`: pieces that have been mapped as
/// wholes. Returns how many bytes that were.
pub(super) fn unmap(iommufd: &impl AsRawFd, ioas: u32, addresses: RangeInclusive<u64>) -> io::Result<u64> {
    let iova = *addresses.start();
    // All 2^64 addresses have no size. No IOMMU has so many.
    let length = (addresses.end() - iova).checked_add(1).ok_or(io::ErrorKind::InvalidInput)?;
    let mut unmap = iommu_ioas_unmap { size: size_of_u32::<iommu_ioas_unmap>(), ioas_id: ioas, iova, length };
    // SAFETY: the kernel reads and writes no more than the structure, whose size it is told.
    checked(unsafe { ioctl_with_mut_ref(iommufd, number(IOMMUFD_CMD_IOAS_UNMAP), &mut unmap) })?;
    Ok(unmap.length)
}

// What the kernel has known of each since 6.2, when there was iommufd (`iommufd_ioctl_ops`).
const _: () = assert!(size_of::<iommu_ioas_map>() == 40 && size_of::<iommu_ioas_copy>() == 40);
