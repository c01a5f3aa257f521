//! The guest's memory as host devices reach it: all of it, at its own addresses, and each other's BARs.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::{GuestMap, GuestRegion};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, Permissions};

use crate::vfio::error::VfioError;
use crate::vfio::memory::address_space::{AddressSpace, pinning};
use crate::vfio::memory::bar_memory::BarMemory;
use crate::vfio::memory::host_iommu::HostIommu;
use crate::vfio::piece::Piece;

/// The guest's memory in an address space of devices. Its pages are pinned until this is dropped.
pub(crate) struct GuestMemory {
    iommu: Arc<dyn HostIommu>,
    mapped: Mutex<Mapped>,
}

struct Mapped {
    // Drop order: devices lose their mappings before this process unmaps the memory.
    space: AddressSpace,
    memory: GuestMap,
    /// Mappings of BARs.
    bars: Vec<BarMemory>,
}

/// All of `memory`, at its own addresses.
pub(crate) fn identity(memory: &GuestMap) -> Vec<Piece> {
    let piece = |region: &GuestRegion| Piece {
        iova: region.start_addr().raw_value(),
        size: region.len(),
        host: region.as_ptr() as u64,
        access: Permissions::ReadWrite,
    };
    memory.iter().map(piece).collect()
}

/// The bytes of `memory` that are not in `old`.
pub(crate) fn added(memory: &GuestMap, old: &GuestMap) -> u64 {
    let before = identity(old);
    identity(memory).iter().filter(|piece| !before.contains(piece)).map(|piece| piece.size).sum()
}

impl GuestMemory {
    /// Maps `memory` for the devices of `iommu`.
    ///
    /// # Errors
    ///
    /// Fails if the devices cannot reach it. None of it is mapped then.
    pub(crate) fn new(iommu: Arc<dyn HostIommu>, memory: &GuestMap) -> Result<Self, VfioError> {
        let space = AddressSpace::new(Arc::clone(&iommu));
        let this = Self { iommu, mapped: Mutex::new(Mapped { space, memory: GuestMap::new(), bars: Vec::new() }) };
        this.set(memory)?;
        Ok(this)
    }

    /// Attaches the devices of `file` ([`HostIommu::attach`]) to the same address space.
    ///
    /// # Errors
    ///
    /// Fails if the devices cannot reach the memory.
    pub(crate) fn attach(&self, file: BorrowedFd<'_>) -> Result<(), VfioError> {
        let mut mapped = self.mapped.lock();
        let size = added(&mapped.memory, &GuestMap::new());
        // Nothing is pinned before the first device is attached.
        pinning(mapped.space.counted(), size, || self.iommu.attach(file))?;
        mapped.space.ask_reach();
        Ok(())
    }

    /// The address space.
    pub(crate) fn iommu(&self) -> &Arc<dyn HostIommu> {
        &self.iommu
    }

    /// Maps exactly `memory` for the devices, and BARs as before.
    ///
    /// # Errors
    ///
    /// Fails if the devices cannot reach it. The former memory stays mapped then.
    pub(crate) fn set(&self, memory: &GuestMap) -> Result<(), VfioError> {
        let mut mapped = self.mapped.lock();
        let size = added(memory, &mapped.memory);
        // Memory comes last, so it replaces a BAR at the same address.
        let wanted: Vec<_> = mapped.bars.iter().map(BarMemory::piece).chain(identity(memory)).collect();
        // SAFETY: the pieces are mappings of guest memory and of BARs, to which no references are made. They stay in
        // `mapped`, or with the caller, until they are unmapped.
        pinning(mapped.space.counted(), size, || unsafe { mapped.space.set(&wanted) })?;
        mapped.memory = memory.clone();
        Ok(())
    }

    /// Maps `bar` for the devices.
    ///
    /// # Errors
    ///
    /// Fails if the devices cannot reach it.
    pub(crate) fn map_bar(&self, bar: &BarMemory) -> Result<(), VfioError> {
        let mut mapped = self.mapped.lock();
        // SAFETY: nothing in this process has a reference to a device's memory. It stays in `mapped.bars` until it is
        // unmapped.
        unsafe { mapped.space.add(&[bar.piece()]) }?;
        mapped.bars.push(bar.clone());
        Ok(())
    }

    /// Undoes [`Self::map_bar`], if that succeeded.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses. `bar` then stays mapped in this process.
    pub(crate) fn unmap_bar(&self, bar: &BarMemory) -> io::Result<()> {
        let Mapped { space, bars, .. } = &mut *self.mapped.lock();
        let Some(at) = bars.iter().position(|other| other.piece() == bar.piece()) else { return Ok(()) };
        space.take(&bar.piece())?;
        bars.remove(at);
        Ok(())
    }

    /// Memory that the devices reach.
    pub(crate) fn memory(&self) -> GuestMap {
        self.mapped.lock().memory.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use vm_memory::GuestAddress;

    use super::*;
    use crate::vfio::memory::fake_iommu::{FakeIommu as Fake, memory};

    #[test]
    fn all_guest_memory_is_identity_mapped_and_unmapped_at_the_end() {
        let fake = Fake::new(vec![0..=u64::MAX]);
        let all = memory(&[(0, 0x3000), (1 << 32, 0x1000)]);
        let guest = GuestMemory::new(fake.clone(), &all).unwrap();
        assert_eq!(fake.sorted(), [(0, 0x3000), (1 << 32, 0x1000)]);
        drop(guest);
        assert_eq!(fake.sorted(), []);
    }

    #[test]
    fn memory_that_is_added_is_mapped_and_what_stays_is_not_touched() {
        let fake = Fake::new(vec![0..=u64::MAX]);
        let few = memory(&[(0, 0x3000)]);
        let guest = GuestMemory::new(fake.clone(), &few).unwrap();
        let more = memory(&[(1 << 32, 0x2000)]);
        let grown = few
            .insert_region(Arc::new(
                more.iter()
                    .next()
                    .map(|_| GuestRegion::from_range(GuestAddress(1 << 32), 0x2000, None).unwrap())
                    .unwrap(),
            ))
            .unwrap();
        *fake.left.lock() = 1;
        guest.set(&grown).unwrap();
        assert_eq!(fake.sorted(), [(0, 0x3000), (1 << 32, 0x2000)]);
        *fake.left.lock() = usize::MAX;
        guest.set(&few).unwrap();
        assert_eq!(fake.sorted(), [(0, 0x3000)]);
    }

    #[test]
    fn a_change_that_fails_leaves_everything_as_it_was() {
        let (old, new) = (memory(&[(0, 0x3000), (1 << 32, 0x1000)]), memory(&[(0, 0x5000), (1 << 33, 0x1000)]));
        for calls in 0..3 {
            let fake = Fake::new(vec![0..=u64::MAX]);
            let guest = GuestMemory::new(fake.clone(), &old).unwrap();
            *fake.left.lock() = calls;
            assert!(guest.set(&new).is_err(), "{calls}");
            assert_eq!(fake.sorted(), [(0, 0x3000), (1 << 32, 0x1000)], "after {calls} calls");
            *fake.left.lock() = usize::MAX;
            guest.set(&new).unwrap();
            assert_eq!(fake.sorted(), [(0, 0x5000), (1 << 33, 0x1000)]);
        }
    }

    #[test]
    fn memory_beyond_a_devices_reach_is_refused_with_its_addresses() {
        let reach = vec![0..=0xfedf_ffff, 0xfef0_0000..=0xff_ffff_ffff];
        let refused = |ranges| {
            let fake = Fake::new(reach.clone());
            let error = GuestMemory::new(fake.clone(), &memory(ranges)).err().map(|error| error.to_string());
            assert!(error.is_none() || fake.sorted().is_empty());
            error
        };
        assert_eq!(refused(&[(0, 0x1000), (0xff_ffff_f000, 0x1000)]), None);
        let error = refused(&[(0, 0x1000), (0xfedf_f000, 0x2000)]).unwrap();
        assert!(error.starts_with(
            "the guest has memory at 0xfedff000 to 0xfee00fff, and the device reaches 0x0 to 0xfedfffff, 0xfef00000 to \
             0xffffffffff; give the guest less memory"
        ), "{error}");
    }

    #[test]
    fn added_memory_is_checked_against_later_devices_reach() {
        let fake = Fake::new(vec![0..=u64::MAX]);
        let guest = GuestMemory::new(fake.clone(), &memory(&[(0, 0x3000)])).unwrap();
        let device = std::fs::File::open("/dev/null").unwrap();
        *fake.left.lock() = 0;
        let error = guest.attach(device.as_fd()).unwrap_err();
        assert!(matches!(error, VfioError::Map(_)), "{error}");
        *fake.reach.lock() = vec![0..=0xffff_ffff];
        guest.attach(device.as_fd()).unwrap();
        let error = guest.set(&memory(&[(0, 0x3000), (1 << 32, 0x1000)])).unwrap_err().to_string();
        assert!(error.starts_with("the guest has memory at 0x100000000 to 0x100000fff"), "{error}");
    }

    #[test]
    fn too_low_a_limit_is_refused_with_a_number() {
        let locking = virtio_devices::Locking { needed: 512 << 20, limit: Some(8 << 20) };
        assert_eq!(
            VfioError::MemoryLock(locking).to_string(),
            "the device needs 524288 KiB of locked memory in all, and 8192 KiB are allowed; raise the limit (ulimit -l \
             524288, LimitMEMLOCK= in a systemd unit)"
        );
    }
}
