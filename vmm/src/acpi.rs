//! ACPI: the tables that describe the machine, and the registers that report changes to a running guest.

pub(crate) mod bridge;
pub mod event_state;
pub mod ged;
pub(crate) mod hotplug;
pub(crate) mod memory_devices;
pub mod memory_hotplug;
pub mod numa;
pub(crate) mod oem;
mod pins;
pub(crate) mod processors;
pub mod tables;
pub mod vcpu_hotplug;
pub mod viot;
