//! The handlers of vCPUs' exits: ports, and addresses that are not memory.

use std::ops::Range;
use std::sync::Arc;

/// Handles guest accesses to addresses that are not memory.
pub trait MmioHandler: Send + Sync {
    /// Reads `data.len()` bytes, 1 to 8. Unassigned addresses read as all-ones.
    fn read(&self, address: u64, data: &mut [u8]);

    /// Writes `data`, 1 to 8 bytes. Unassigned addresses ignore writes.
    fn write(&self, address: u64, data: &[u8]);
}

/// Handles accesses to the ports of one device.
pub trait PortHandler: Send + Sync {
    /// Reads `data.len()` bytes, 1 to 4, from the device's port number `offset` on.
    fn read(&self, offset: u16, data: &mut [u8]);

    /// Writes `data`, 1 to 4 bytes, from the device's port number `offset` on.
    fn write(&self, offset: u16, data: &[u8]);
}

/// A device with ports of its own. It handles accesses that start at one of them.
pub struct Device {
    /// The ports.
    pub ports: Range<u16>,
    /// Handler of accesses to them.
    pub handler: Arc<dyn PortHandler>,
}
