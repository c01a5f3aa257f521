//! The translations that the kernel's vhost caches for a function behind an IOMMU.
//!
//! The kernel has room for 2,048 ranges (`max_iotlb_entries` of its module `vhost`), and evicts the oldest when there
//! are more. It asks for those it lacks. So a missing translation is harmless, and a wrong one is not.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use log::warn;
use vhost::vhost_kern::net::Net;
use vm_memory::Permissions;

use super::iotlb::{self, Miss};
use crate::GuestMap;
use crate::backend::mapping::Mapping;
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};

/// The most mappings that are sent when there is a new set of them. The kernel asks for the rest.
const PRELOADED: usize = 1024;

/// The kernel's devices of one function.
pub(super) struct Kernels {
    /// A device for each pair of queues.
    devices: Vec<Arc<Net<Arc<GuestMap>>>>,
    /// The guest's memory.
    memory: ArcSwap<GuestMap>,
    /// The number of invalidations that the kernel did not accept.
    failures: AtomicU64,
}

impl Kernels {
    /// A follower for `devices`, which have no translations yet.
    pub(super) fn new(devices: Vec<Arc<Net<Arc<GuestMap>>>>, memory: &GuestMap) -> Arc<Self> {
        Arc::new(Self { devices, memory: ArcSwap::from_pointee(memory.clone()), failures: AtomicU64::new(0) })
    }

    /// Sets the guest's memory; the kernel needs its translations again.
    pub(super) fn set_memory(&self, memory: &GuestMap) {
        self.memory.store(Arc::new(memory.clone()));
    }

    fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        // SAFETY: the device is open as long as it is borrowed.
        self.devices.iter().map(|device| unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) })
    }

    /// Sends a mapping. The kernel asks for what is missing, so that a failure is not an error.
    fn tell(&self, mapping: DmaMapping) {
        for part in Mapping::of(mapping, &self.memory.load()) {
            self.fds().for_each(|device| drop(iotlb::update(device, &part)));
        }
    }

    fn forget(&self, first: u64, last: u64) {
        for device in self.fds() {
            // The kernel checks nothing but the message's length and kind, which are right.
            let Err(error) = iotlb::invalidate(device, first, last) else { continue };
            // Logged at powers of two, so that a driver cannot fill the log.
            let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
            if failures.is_power_of_two() {
                warn!("vhost-net does not forget what was unmapped ({failures} so far): {error}; please report this");
            }
        }
    }

    /// Answers a miss of `device`. Returns true if its function may access that address.
    pub(super) fn answer(&self, device: BorrowedFd<'_>, miss: Miss, iommu: &dyn Translate) -> bool {
        // Sent within the pass: a mapping that is removed in the meantime is invalidated afterwards.
        let _pass = iommu.begin();
        let Some(mapping) = iommu.mapping(miss.address, miss.access) else { return false };
        let memory = self.memory.load();
        let mut parts = Mapping::of(mapping, &memory);
        let part = parts.find(|part| (part.iova()..=part.last()).contains(&miss.address));
        part.is_some_and(|part| iotlb::update(device, &part).is_ok())
    }

    /// Sends the translations of `len` bytes at `address`, which the kernel is about to use, as far as they are mapped.
    pub(super) fn preload(&self, (address, len): (u64, u64), access: Permissions, iommu: &dyn Translate) {
        let _pass = iommu.begin();
        if iommu.is_bypassed() {
            // The kernel has the identity mapping.
            return;
        }
        let (mut next, last) = (Some(address), address.saturating_add(len.saturating_sub(1)));
        while let Some(address) = next.filter(|address| *address <= last) {
            let Some(mapping) = iommu.mapping(address, access) else { return };
            self.tell(mapping);
            next = mapping.last.checked_add(1);
        }
    }
}

impl DmaFollower for Kernels {
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed> {
        self.tell(mapping);
        Ok(())
    }

    fn unmapped(&self, mappings: &[DmaMapping]) {
        if let (Some(first), Some(last)) = (mappings.first(), mappings.last()) {
            self.forget(first.first, last.last);
        }
    }

    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed> {
        self.forget(0, u64::MAX);
        match reach {
            DmaReach::Nothing => {}
            DmaReach::Everything => self.tell(DmaMapping::IDENTITY),
            DmaReach::Mapped(mappings) => mappings.take(PRELOADED).for_each(|mapping| self.tell(mapping)),
        }
        Ok(())
    }
}
