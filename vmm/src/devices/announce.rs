//! Announcements of functions at a new place in the network.

use pci::VfIndex;
use virtio_devices::HostNic;

use super::Devices;

/// A network function: its device's id, and the index of the VF; `None` for the device's own function.
pub(crate) type NetFunction = (String, Option<VfIndex>);

/// Announces a function: through its driver, or with frames of this program if the driver cannot.
fn announce(port: &mut dyn HostNic) {
    if !port.announce() {
        port.announce_here();
    }
}

impl Devices {
    /// Asks the drivers of all network functions to announce their addresses (`virtio 1.4 §5.1.6.5.4`), after a guest
    /// has moved here and before its vCPUs run. A driver without that feature does not, nor does a VF without a driver.
    /// Returns the functions whose links are down, whose announcements would be lost.
    ///
    /// A function whose link was down at the source is not announced in this round either: Linux announces before it
    /// re-reads the link. Later rounds cover it.
    pub fn announce(&self) -> Vec<NetFunction> {
        let mut late = Vec::new();
        self.each_function(|id, vf, port| {
            if !port.announce() && !port.link_up() {
                late.push((id.to_string(), vf));
            }
        });
        late
    }

    /// Announces all network functions once more.
    pub fn announce_again(&self) {
        self.each_function(|_, _, port| announce(port));
    }

    /// Announces one function.
    pub fn announce_function(&self, (id, vf): &NetFunction) {
        self.with_port(id, *vf, announce);
    }

    /// True if the function's link is up; `None` if the function does not exist.
    pub fn is_link_up(&self, (id, vf): &NetFunction) -> Option<bool> {
        self.with_port(id, *vf, |port| port.link_up())
    }

    fn with_port<T>(&self, id: &str, vf: Option<VfIndex>, visit: impl FnOnce(&mut dyn HostNic) -> T) -> Option<T> {
        self.find(id)?.slot.with(|device| device.host_nic(vf).map(visit))?
    }

    fn each_function(&self, mut visit: impl FnMut(&str, Option<VfIndex>, &mut dyn HostNic)) {
        for plugged in &self.plugged {
            for n in 0..plugged.plan.nics().count() {
                let vf = n.checked_sub(1).and_then(|vf| u16::try_from(vf).ok()).map(VfIndex);
                plugged.slot.with(|device| device.host_nic(vf).map(|port| visit(&plugged.plan.id, vf, port)));
            }
        }
    }
}
