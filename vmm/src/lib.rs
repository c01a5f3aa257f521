//! The machine that devices are plugged into: configuration, lifecycle, KVM, ACPI.

pub mod config;
mod config_console;
mod config_disk;
mod config_error;
mod config_json;
mod config_later;
mod config_mac;
mod config_names;
mod config_net;
mod config_nic;
mod config_options;
mod config_plan;
mod config_rate;
mod config_rng;
mod config_sriov;
mod config_value;
mod config_vdpa;
mod config_vhost;

pub mod acpi;
mod acpi_hotplug;
mod acpi_processors;
pub mod api;
pub mod arch;
mod backends;
pub mod boot;
mod bus;
pub mod console;
pub mod console_end;
mod control;
pub mod cpu;
mod error;
pub mod event_device;
mod event_monitor;
mod events;
mod failure;
mod gate;
mod instance;
pub mod kvm;
mod kvm_error;
mod kvm_routes;
pub mod memory;
mod metrics;
mod nic_counters;
mod open_files;
pub mod pio;
pub mod processors;
#[cfg(any(test, feature = "testing"))]
mod recording_vm;
mod resize;
mod signals;
mod terminal;
mod vm;
mod vm_info;
mod vmm;

pub use error::Error;
pub use event_monitor::{EventMonitor, MonitorError};
pub use vmm::{Options, run};

mod config_pages;
mod device_events;
mod devices;
mod doorbell_slots;
mod firmware;
mod interrupt;
mod mmio;
mod slot;
mod wires;

/// The machine that devices are plugged into, without a VM: for fuzz targets.
#[cfg(feature = "testing")]
pub mod testing {
    pub use crate::config_pages::{PAGE, Shown};
    pub use crate::firmware::{Apertures, NoRoom, place_bars};
    pub use crate::interrupt::Wiring;
    pub use crate::mmio::MmioMap;
    pub use crate::recording_vm::{Record, RecordingVm, Refuse};
    pub use crate::slot::{Machine, Slot};
}
