//! What of the host's storage devices write, and give to another program when their guest moves there.

use virtio_devices::Holds;

use super::{Devices, Plugged};

impl Devices {
    /// What the devices write.
    pub(crate) fn holds(&self) -> Holds {
        let of = |plugged: &Plugged| Some((plugged.plan.option(), plugged.hold()?));
        Holds(self.plugged.iter().filter_map(of).collect())
    }
}
