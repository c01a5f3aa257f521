//! The memory that a vDPA device accesses: all of the guest's memory, at guest physical addresses.

use std::io;
use std::ops::RangeInclusive;

use super::error::VdpaFault;
use super::kernel::{Iotlb, Kernel};
use crate::GuestMap;
use crate::backend::mapping::Mapping;
use crate::backend::vhost_common::is_shared;

/// The parts of `memory`.
///
/// # Errors
///
/// Fails if another process could not map the memory. A device whose driver works on this process's addresses silently
/// skips such memory, and sees none of the guest's.
pub(crate) fn mappings(memory: &GuestMap) -> Result<Vec<Mapping>, VdpaFault> {
    if !is_shared(memory) {
        return Err(VdpaFault::NotShared);
    }
    Ok(Mapping::all_of(memory))
}

/// Checks that a device which can access `range` can access all of `mappings`.
///
/// # Errors
///
/// [`VdpaFault::IovaRange`].
pub(crate) fn check_reach(mappings: &[Mapping], range: RangeInclusive<u64>) -> Result<(), VdpaFault> {
    let guest = mappings.iter().map(Mapping::iova).min().zip(mappings.iter().map(Mapping::last).max());
    match guest {
        Some((first, last)) if !range.contains(&first) || !range.contains(&last) => {
            Err(VdpaFault::IovaRange { device: range, guest: first..=last })
        }
        _ => Ok(()),
    }
}

/// Maps all of `mappings` for the device. Uses a batch if the kernel supports it: without one, some drivers rebuild
/// their whole table for each part.
///
/// # Errors
///
/// Fails if the kernel refuses. Some of them may be mapped then.
pub(crate) fn map(kernel: &dyn Kernel, mappings: &[Mapping], batch: bool) -> io::Result<()> {
    let updates = || mappings.iter().try_for_each(|mapping| kernel.map(Iotlb::Update(mapping)));
    if !batch {
        return updates();
    }
    kernel.map(Iotlb::Begin)?;
    updates()?;
    kernel.map(Iotlb::End)
}

/// Changes the device's mappings: removes `gone`, and adds `came`.
///
/// # Errors
///
/// Fails if the kernel refuses. The change may be partial then; see [`change_back`].
pub(crate) fn change(kernel: &dyn Kernel, gone: &[Mapping], came: &[Mapping], batch: bool) -> io::Result<()> {
    if batch {
        kernel.map(Iotlb::Begin)?;
    }
    gone.iter().try_for_each(|mapping| kernel.map(Iotlb::Invalidate(mapping)))?;
    came.iter().try_for_each(|mapping| kernel.map(Iotlb::Update(mapping)))?;
    if batch { kernel.map(Iotlb::End) } else { Ok(()) }
}

/// Undoes a [`change`] that failed, of which any part may have been done.
///
/// # Errors
///
/// Fails if the kernel refuses. The device's mappings are unknown then.
pub(crate) fn change_back(kernel: &dyn Kernel, came: &[Mapping], gone: &[Mapping], batch: bool) -> io::Result<()> {
    // Ends a batch that was begun. Without one, the kernel returns an error.
    if batch {
        let _ = kernel.map(Iotlb::End);
        kernel.map(Iotlb::Begin)?;
    }
    // Ranges without a mapping may be unmapped, so that each part is mapped once afterwards.
    came.iter().chain(gone).try_for_each(|mapping| kernel.map(Iotlb::Invalidate(mapping)))?;
    gone.iter().try_for_each(|mapping| kernel.map(Iotlb::Update(mapping)))?;
    if batch { kernel.map(Iotlb::End) } else { Ok(()) }
}

/// Maps `mappings` again for a device that may have forgotten them. The kernel itself has not, and would refuse them as
/// known.
///
/// # Errors
///
/// Fails if the kernel refuses.
pub(crate) fn map_again(kernel: &dyn Kernel, mappings: &[Mapping], batch: bool) -> io::Result<()> {
    if batch {
        kernel.map(Iotlb::Begin)?;
    }
    for mapping in mappings {
        kernel.map(Iotlb::Invalidate(mapping))?;
        kernel.map(Iotlb::Update(mapping))?;
    }
    if batch { kernel.map(Iotlb::End) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    fn parts() -> Vec<Mapping> {
        [(0, 0xc000_0000), (1 << 32, 1 << 30)].map(|(iova, size)| Mapping::for_test(iova, size)).into()
    }

    #[test]
    fn a_device_has_to_reach_all_of_the_guests_memory() {
        assert!(check_reach(&parts(), 0..=u64::MAX).is_ok());
        assert!(check_reach(&parts(), 0..=0x1_3fff_ffff).is_ok());
        let error = check_reach(&parts(), 0..=0x1_3fff_fffe).unwrap_err().to_string();
        assert!(error.contains("0x0 to 0x13ffffffe") && error.contains("0x0 to 0x13fffffff"), "{error}");
        assert!(check_reach(&parts(), 0x1000..=u64::MAX).is_err());
    }

    #[test]
    fn memory_of_this_process_alone_is_refused() {
        let private = GuestMap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        assert!(matches!(mappings(&private), Err(VdpaFault::NotShared)));
    }
}
