//! Memory slots by which vCPUs reach the memory of a device.

use std::io;

/// Memory slots of a VM for the memory of a device, one for each part ([`MemRegion::new`](super::MemRegion::new)).
/// A part without a slot is no memory for vCPUs: they read ones, and writes have no effect.
pub trait MemSlots: Send + Sync {
    /// Makes a part memory for vCPUs, unless it is.
    ///
    /// # Errors
    ///
    /// The host refuses.
    fn show(&self, part: usize) -> io::Result<()>;

    /// Takes a part from vCPUs, unless it has been taken. None reaches it when this returns.
    ///
    /// # Errors
    ///
    /// The host refuses. vCPUs reach it as before then.
    fn hide(&self, part: usize) -> io::Result<()>;
}
