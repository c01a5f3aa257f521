//! The PCI host: the devices on the bus as vCPUs see them, and the VM's services for the device in each slot.

pub(crate) mod assign_bars;
pub(crate) mod bus;
pub(crate) mod config_pages;
pub(crate) mod device_memory;
pub(crate) mod device_watch;
pub(crate) mod failure_watch;
pub(crate) mod irq_routes;
pub(crate) mod memory_slots;
pub(crate) mod mmio;
pub(crate) mod pin_wire;
pub(crate) mod policy_watch;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod recording_vm;
mod refused_writes;
pub(crate) mod shown_pages;
pub(crate) mod slot;
pub(crate) mod wires;
pub(crate) mod wiring;
