//! KVM's interrupt routing table, with the GSIs of pins and of messages.

use std::io;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MSI_VALID_DEVID, KvmIrqRouting, kvm_irq_routing_entry,
};
use pci::Rid;

/// The pins of the IOAPIC, which are GSIs 0 to 23. GSIs of messages start after them.
pub const IOAPIC_PINS: u32 = 24;

/// A message that an irqfd sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsiRoute {
    /// The global system interrupt of the message, [`IOAPIC_PINS`] or more.
    pub gsi: u32,
    /// The message address.
    pub address: u64,
    /// The message data.
    pub data: u32,
    /// The routing ID of the function that sends it.
    pub requester: Rid,
}

/// The table with the pins of the PICs and of the IOAPIC, and `msi`, with the senders' routing IDs if KVM supports
/// `device_ids`.
///
/// # Errors
///
/// Fails if there are more routes than KVM can hold (4,096).
pub(super) fn table(msi: &[MsiRoute], device_ids: bool) -> io::Result<KvmIrqRouting> {
    let pins = (0..IOAPIC_PINS).flat_map(pin_routes);
    let entries: Vec<_> = pins.chain(msi.iter().map(|route| route.entry(device_ids))).collect();
    KvmIrqRouting::from_entries(&entries)
        .map_err(|_| io::Error::new(io::ErrorKind::QuotaExceeded, "more than 4,096 interrupt routes"))
}

impl MsiRoute {
    fn entry(&self, device_ids: bool) -> kvm_irq_routing_entry {
        let mut entry = kvm_irq_routing_entry { gsi: self.gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
        entry.u.msi.address_lo = (self.address & 0xffff_ffff) as u32;
        entry.u.msi.address_hi = (self.address >> 32) as u32;
        entry.u.msi.data = self.data;
        if device_ids {
            entry.flags = KVM_MSI_VALID_DEVID;
            entry.u.msi.__bindgen_anon_1.devid = u32::from(self.requester.to_bits());
        }
        entry
    }
}

/// KVM's initial routes: GSIs 0 to 15 are pins of the PICs and the IOAPIC, 16 to 23 of the IOAPIC only.
fn pin_routes(gsi: u32) -> impl Iterator<Item = kvm_irq_routing_entry> {
    let route = move |irqchip, pin| {
        let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
        entry.u.irqchip.irqchip = irqchip;
        entry.u.irqchip.pin = pin;
        entry
    };
    let pic = match gsi {
        0..8 => Some(route(KVM_IRQCHIP_PIC_MASTER, gsi)),
        8..16 => Some(route(KVM_IRQCHIP_PIC_SLAVE, gsi - 8)),
        _ => None,
    };
    pic.into_iter().chain([route(KVM_IRQCHIP_IOAPIC, gsi)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pins_are_routed_to_the_pics_and_the_ioapic() {
        let entries: Vec<_> = (0..IOAPIC_PINS).flat_map(pin_routes).collect();
        assert_eq!(entries.len(), 16 + 24);
        // SAFETY: the routes of pins have this member.
        let of = |gsi| entries.iter().filter(move |entry| entry.gsi == gsi).map(|entry| unsafe { entry.u.irqchip });
        let pins = |gsi| of(gsi).map(|entry| (entry.irqchip, entry.pin)).collect::<Vec<_>>();
        assert_eq!(pins(4), [(KVM_IRQCHIP_PIC_MASTER, 4), (KVM_IRQCHIP_IOAPIC, 4)]);
        assert_eq!(pins(9), [(KVM_IRQCHIP_PIC_SLAVE, 1), (KVM_IRQCHIP_IOAPIC, 9)]);
        assert_eq!(pins(16), [(KVM_IRQCHIP_IOAPIC, 16)]);
    }

    #[test]
    fn a_message_names_its_sender_where_kvm_takes_that() {
        let route = MsiRoute { gsi: 30, address: 0x1_fee0_0000, data: 0x41, requester: Rid::from_bits(0x0103) };
        let entry = route.entry(true);
        // SAFETY: the route of a message has these members.
        let (msi, sender) = unsafe { (entry.u.msi, entry.u.msi.__bindgen_anon_1.devid) };
        assert_eq!((entry.gsi, msi.address_hi, msi.address_lo, msi.data), (30, 1, 0xfee0_0000, 0x41));
        assert_eq!((entry.flags, sender), (KVM_MSI_VALID_DEVID, 0x0103));
        assert_eq!(route.entry(false).flags, 0);
    }

    #[test]
    fn more_routes_than_kvm_holds_are_refused() {
        let route = MsiRoute { gsi: IOAPIC_PINS, address: 0, data: 0, requester: Rid::from_bits(8) };
        let most = 4096 - 40;
        assert!(table(&vec![route; most], true).is_ok());
        assert!(table(&vec![route; most + 1], true).is_err());
    }
}
