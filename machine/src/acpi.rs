//! ACPI: the tables that describe the machine, and the registers that report changes to a running guest.

mod bridge;
pub mod event_state;
pub mod ged;
mod hotplug;
mod memory_devices;
pub mod memory_hotplug;
pub mod numa;
mod oem;
mod pins;
mod processors;
pub mod tables;
pub mod vcpu_hotplug;
mod vcpus;
pub mod viot;
