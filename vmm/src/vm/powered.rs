//! KVM's VM, from one power-on or reset to the next, and what is wired to it.

use std::sync::Arc;

use crate::acpi::ged::GenericEventDevice;
use crate::kvm;
use crate::pci_host::bus::Bus;
use crate::serial::SerialPort;
use crate::vfio::VfioHost;

/// A KVM VM with the guest's memory and devices attached. Dropping it detaches and resets the devices.
pub(super) struct Powered {
    /// The VM.
    pub vm: Arc<kvm::Vm>,
    /// Bus of its devices.
    pub bus: Arc<Bus>,
    /// The devices of the host.
    pub vfio: Arc<VfioHost>,
    /// The serial port, if there is one.
    pub serial: Option<Arc<SerialPort>>,
    /// The event device.
    pub ged: Arc<GenericEventDevice>,
}

impl Drop for Powered {
    fn drop(&mut self) {
        self.bus.detach();
        self.vfio.known_files().detach();
        // Closing the VM removes all irqfds at once.
        self.ged.reset();
        self.serial.iter().for_each(|serial| serial.reset());
    }
}
