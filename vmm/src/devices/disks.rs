//! Disks: the limits that they share, and their state on the host.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::{
    Block, BlockCounters, BlockError, BlockLatencies, BlockSize, BlockSpec, RateLimitGroup, RateLimits, ResizeError,
    StorageLock,
};

use crate::pci_host::slot::Slot;

/// The rate limits that disks share, by the ids of their groups. A group exists from its first disk on.
#[derive(Default)]
pub(crate) struct LimitGroups(Mutex<HashMap<String, RateLimitGroup>>);

impl LimitGroups {
    fn group(&self, id: &str, limits: RateLimits) -> Option<RateLimitGroup> {
        let mut groups = self.0.lock();
        if !groups.contains_key(id) {
            groups.insert(id.to_string(), RateLimitGroup::new(limits)?);
        }
        groups.get(id).cloned()
    }
}

/// Parts of a disk that the host uses while the guest may be using the disk.
pub(super) struct Disk {
    counters: Arc<BlockCounters>,
    latencies: Arc<BlockLatencies>,
    size: Arc<BlockSize>,
    lock: StorageLock,
}

impl Disk {
    /// Opens the image that `spec` names, and makes a device of it. With `locks_later`, another program writes the
    /// image, which is locked later.
    pub(super) fn open(spec: &BlockSpec, groups: &LimitGroups, locks_later: bool) -> Result<(Block, Self), BlockError> {
        let spec_of = spec.clone();
        let mut block = if locks_later { Block::open_unlocked(spec_of) } else { Block::open(spec_of) }?;
        if let Some(group) = spec.limit_group.as_deref().and_then(|id| groups.group(id, spec.limits)) {
            block = block.limited_by(group);
        }
        let (counters, latencies) = (block.counters(), block.latencies());
        let disk = Self { counters, latencies, size: block.size(), lock: block.storage_lock() };
        Ok((block, disk))
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counters.iter().collect()
    }

    /// Image, and its lock.
    pub(super) fn storage_lock(&self) -> StorageLock {
        self.lock.clone()
    }

    pub(super) fn latencies(&self) -> Vec<(&'static str, u64)> {
        self.latencies.iter().collect()
    }

    /// Changes the size of the disk in `slot`, whose queues run unless the VM `is_paused`.
    pub(super) fn resize(&self, bytes: u64, slot: &Slot, is_paused: bool) -> Result<(), ResizeError> {
        if is_paused || bytes >= self.size.get() {
            return self.size.set(bytes);
        }
        // Requests in flight beyond the new end complete before the image is truncated.
        slot.pause();
        let resized = self.size.set(bytes);
        slot.resume().map_err(|not_resumed| ResizeError::Stopped(not_resumed.error))?;
        resized
    }
}
