//! Host storage that devices write, and hand over when their guest moves to another program.

use virtio_devices::Holds;

use super::{Devices, Plugged};

impl Devices {
    /// Storage that the devices write.
    pub(crate) fn holds(&self) -> Holds {
        let of = |plugged: &Plugged| Some((plugged.plan.option(), plugged.hold()?));
        Holds(self.plugged.iter().filter_map(of).collect())
    }
}
