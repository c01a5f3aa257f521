//! Disks: the limits that they share, and what the host has of each.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_devices::{
    Block, BlockCounters, BlockError, BlockLatencies, BlockSize, BlockSpec, RateLimitGroup, RateLimits, ResizeError,
};

use crate::pci_host::slot::Slot;

/// The rate limits that disks share, by the ids of their groups. A group's limits begin with its first disk.
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

/// What the host has of a disk that a guest may be using.
pub(super) struct Disk {
    counters: Arc<BlockCounters>,
    latencies: Arc<BlockLatencies>,
    size: Arc<BlockSize>,
}

impl Disk {
    /// Opens what `spec` names, and makes a device of it.
    pub(super) fn open(spec: &BlockSpec, groups: &LimitGroups) -> Result<(Block, Self), BlockError> {
        let mut block = Block::open(spec.clone())?;
        if let Some(group) = spec.limit_group.as_deref().and_then(|id| groups.group(id, spec.limits)) {
            block = block.limited_by(group);
        }
        let disk = Self { counters: block.counters(), latencies: block.latencies(), size: block.size() };
        Ok((block, disk))
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counters.iter().collect()
    }

    pub(super) fn latencies(&self) -> Vec<(&'static str, u64)> {
        self.latencies.iter().collect()
    }

    /// Changes the size of the disk in `slot`, whose queues run unless the VM `is_paused`.
    pub(super) fn resize(&self, bytes: u64, slot: &Slot, is_paused: bool) -> Result<(), ResizeError> {
        if is_paused || bytes >= self.size.get() {
            return self.size.set(bytes);
        }
        // What has begun beyond the new end is completed before that is cut off.
        slot.pause();
        let resized = self.size.set(bytes);
        slot.resume().map_err(|not_resumed| ResizeError::Stopped(not_resumed.error))?;
        resized
    }
}
