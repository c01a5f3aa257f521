//! Host storage that devices write, and hand over when their guest moves to another program.

use virtio_devices::StorageLocks;

use super::{Devices, Plugged};

impl Devices {
    /// Storage that the devices write.
    pub(crate) fn storage_locks(&self) -> StorageLocks {
        let of = |plugged: &Plugged| Some((plugged.plan.option(), plugged.storage_lock()?));
        StorageLocks(self.plugged.iter().filter_map(of).collect())
    }
}
