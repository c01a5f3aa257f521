//! The wire of an interrupt pin: an irqfd that asserts an input of the IOAPIC, and an eventfd that KVM signals when the
//! guest has served the interrupt.

use std::sync::Arc;

use virtio_devices::Pin;

use crate::pci_host::wires::Tools;

/// The wire of a device's pin, if there is one.
#[derive(Default)]
pub(crate) struct PinWire(Option<Pin>);

impl PinWire {
    /// Connects the pin that the device uses, if any, to `gsi`.
    pub(crate) fn update(&mut self, wanted: Option<Pin>, gsi: u32, tools: &Tools<'_>) {
        let is_wanted = |pin: &Pin| wanted.as_ref().is_some_and(|wanted| Arc::ptr_eq(&wanted.trigger, &pin.trigger));
        if let Some(pin) = self.0.as_ref().filter(|pin| !is_wanted(pin)) {
            if let Err(error) = tools.wiring.detach_irqfd(&pin.trigger, gsi) {
                return (tools.complain)("detach an interrupt pin", &error);
            }
            self.0 = None;
        }
        if self.0.is_none()
            && let Some(pin) = wanted
        {
            // An earlier signal may have been served since, or lost with a former wire: the resample makes the device
            // repeat it.
            let _ = pin.trigger.read();
            match tools.wiring.attach_pin(&pin.trigger, &pin.resample, gsi) {
                Ok(()) => {
                    // Only a full counter fails, which is a signal.
                    let _ = pin.resample.write(1);
                    self.0 = Some(pin);
                }
                Err(error) => (tools.complain)("attach an interrupt pin", &error),
            }
        }
    }

    /// Forgets the wire of a former VM.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
