//! Use of the devices by the guest's drivers.

use pci::VfIndex;
use virtio_devices::{SriovStatus, Status, VirtioPci};

use super::Devices;

impl Devices {
    /// The number of functions whose drivers are up.
    pub(crate) fn drivers(&self) -> u32 {
        let of = |device: &mut dyn VirtioPci| {
            let is_up = |vf| device.function_status(vf).is_some_and(|status| status.driver.contains(Status::DRIVER_OK));
            let vfs = device.sriov_status().map_or(0, SriovStatus::num_visible);
            let functions = std::iter::once(None).chain((0..vfs).map(|index| Some(VfIndex(index))));
            functions.map(|vf| u32::from(is_up(vf))).sum::<u32>()
        };
        self.plugged.iter().filter_map(|plugged| plugged.slot.with(of)).sum()
    }
}
