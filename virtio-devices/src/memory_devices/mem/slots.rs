//! Memory slots through which vCPUs access the memory of a device.

use std::io;

/// Memory slots of a VM for the memory of a device, one for each part ([`MemRegion::new`](super::MemRegion::new)). A
/// part without a slot is not memory for vCPUs: they read ones, and writes have no effect.
pub trait MemSlots: Send + Sync {
    /// Makes a part accessible to vCPUs, unless it is already.
    ///
    /// # Errors
    ///
    /// The host refuses.
    fn show(&self, part: usize) -> io::Result<()>;

    /// Removes a part from vCPUs, unless it is removed already. None can access it when this returns.
    ///
    /// # Errors
    ///
    /// Fails if the host refuses. vCPUs can then access the part as before.
    fn hide(&self, part: usize) -> io::Result<()>;
}
