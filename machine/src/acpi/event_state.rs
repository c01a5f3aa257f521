//! The saved state of the generic event device and of the hot-plug registers: notifications that the guest has not read
//! yet, and releases that the machine has not handled yet.

use serde::{Deserialize, Serialize};

/// The generic event device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventDeviceState {
    /// Events that the guest has not read.
    pub events: u8,
    /// The slots of root buses with pending notifications: each segment's bus 0, then further buses of segment 0.
    pub slots: Vec<SlotsState>,
    /// The registers of vCPUs.
    pub vcpus: VcpuHotplugState,
    /// The registers of memory.
    pub memory: MemoryHotplugState,
}

/// The slots of a root bus, a bit for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotsState {
    /// The segment.
    pub segment: u16,
    /// The root bus: 0, or another one on segment 0. Older states have none other than 0.
    #[serde(default, skip_serializing_if = "is_0")]
    pub bus: u8,
    /// Slots with a new device, not read by the guest yet.
    pub plugged: u32,
    /// Slots whose device should be released, not read by the guest yet.
    pub unplugged: u32,
    /// Slots whose device the guest has released, but that is still plugged.
    pub ejected: u32,
}

fn is_0(bus: &u8) -> bool {
    *bus == 0
}

/// The registers of vCPUs: numbers in ascending order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuHotplugState {
    /// vCPUs that are present.
    pub present: Vec<u8>,
    /// vCPUs that were added, not read by the guest yet.
    pub added: Vec<u8>,
    /// vCPUs that should be released, not read by the guest yet.
    pub asked: Vec<u8>,
    /// vCPUs that should be released, without the guest's reply yet.
    pub leaving: Vec<u8>,
    /// vCPUs that the guest has released, but that still run.
    pub ejected: Vec<u8>,
}

/// The registers of memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryHotplugState {
    /// The regions that were added since the guest started: first address and end.
    pub regions: Vec<(u64, u64)>,
    /// The slots of those not read by the guest yet, a bit for each.
    pub added: u8,
}
