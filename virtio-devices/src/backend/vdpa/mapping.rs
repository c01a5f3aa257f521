//! The guest's memory as a vDPA device sees it: at the guest's own addresses.

use std::io;
use std::ops::RangeInclusive;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::error::VdpaFault;
use super::kernel::{Iotlb, Kernel};
use crate::backend::vhost_common::is_shared;

/// A part of the guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mapping {
    /// Where the device sees it: its guest physical address.
    pub iova: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Where this process has it.
    pub host: u64,
}

impl Mapping {
    fn last(&self) -> u64 {
        self.iova + (self.size - 1)
    }
}

/// The parts of `memory`.
///
/// # Errors
///
/// When another process could not map it. A device whose driver works on this process's addresses leaves such memory out without a
/// word, and sees none of the guest's.
pub fn mappings(memory: &GuestMemoryMmap) -> Result<Vec<Mapping>, VdpaFault> {
    if !is_shared(memory) {
        return Err(VdpaFault::NotShared);
    }
    let mapping = |region: &<GuestMemoryMmap as GuestMemoryBackend>::R| Mapping {
        iova: region.start_addr().raw_value(),
        size: region.len(),
        host: region.as_ptr() as u64,
    };
    Ok(memory.iter().map(mapping).collect())
}

/// Checks that a device which reaches `range` reaches all of `mappings`.
///
/// # Errors
///
/// [`VdpaFault::IovaRange`].
pub fn check_reach(mappings: &[Mapping], range: RangeInclusive<u64>) -> Result<(), VdpaFault> {
    let guest = mappings.iter().map(|mapping| mapping.iova).min().zip(mappings.iter().map(Mapping::last).max());
    match guest {
        Some((first, last)) if !range.contains(&first) || !range.contains(&last) => {
            Err(VdpaFault::IovaRange { device: range, guest: first..=last })
        }
        _ => Ok(()),
    }
}

/// Lets the device reach all of `mappings`. In a batch, if the kernel knows batches: without, some drivers make all of their table
/// anew for each part.
///
/// # Errors
///
/// When the kernel does not do it. It then knows a part of them.
pub fn map(kernel: &dyn Kernel, mappings: &[Mapping], batch: bool) -> io::Result<()> {
    let updates = || mappings.iter().try_for_each(|mapping| kernel.map(Iotlb::Update(mapping)));
    if !batch {
        return updates();
    }
    kernel.map(Iotlb::Begin)?;
    updates()?;
    kernel.map(Iotlb::End)
}

/// Lets a device that may have forgotten them reach `mappings` again. The kernel itself has not, and would refuse them as known.
///
/// # Errors
///
/// When the kernel does not do it.
pub fn map_again(kernel: &dyn Kernel, mappings: &[Mapping], batch: bool) -> io::Result<()> {
    if batch {
        kernel.map(Iotlb::Begin)?;
    }
    for mapping in mappings {
        kernel.map(Iotlb::Invalidate(mapping))?;
        kernel.map(Iotlb::Update(mapping))?;
    }
    if batch { kernel.map(Iotlb::End) } else { Ok(()) }
}

/// How much memory this process may pin, and how much it needs to, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Locking {
    /// What it has pinned, with the guest's memory once more.
    pub needed: u64,
    /// What it may pin; without a limit as much as it likes.
    pub limit: Option<u64>,
}

impl Locking {
    /// What it takes to pin all of `mappings`, for one more device: each device's pages count. Raises the limit as far as this
    /// process may.
    pub fn reserve(mappings: &[Mapping]) -> Self {
        let size: u64 = mappings.iter().map(|mapping| mapping.size).sum();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let needed = size.saturating_add(pinned(&status));
        let given = getrlimit(Resource::Memlock);
        if given.current.is_some_and(|limit| limit < needed) {
            // Where this is forbidden, the device's driver may not pin at all.
            let _ = setrlimit(Resource::Memlock, Rlimit { current: given.maximum, maximum: given.maximum });
        }
        Self { needed, limit: getrlimit(Resource::Memlock).current }
    }

    /// Whether the limit is too low.
    pub fn falls_short(&self) -> bool {
        self.limit.is_some_and(|limit| limit < self.needed)
    }
}

/// What a process has pinned, in bytes, by its `/proc/self/status`.
fn pinned(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kibibytes.unwrap_or(0_u64).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    fn parts() -> Vec<Mapping> {
        [(0, 0xc000_0000), (1 << 32, 1 << 30)].map(|(iova, size)| Mapping { iova, size, host: 0x7f00_0000_0000 }).into()
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
        let private = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        assert!(matches!(mappings(&private), Err(VdpaFault::NotShared)));
    }

    #[test]
    fn what_is_pinned_is_read_in_kibibytes() {
        assert_eq!(pinned("VmLck:\t       0 kB\nVmPin:\t  262144 kB\nVmHWM:\t 1 kB\n"), 256 << 20);
        assert_eq!(pinned(""), 0);
    }

    #[test]
    fn a_limit_falls_short_of_more_than_it_allows() {
        let locking = |needed, limit| Locking { needed, limit }.falls_short();
        assert!(!locking(1, None) && !locking(8, Some(8)) && locking(9, Some(8)));
    }
}
