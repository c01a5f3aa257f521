//! The machine that devices are plugged into: configuration, lifecycle, KVM, ACPI.

pub mod config;
mod config_console;
mod config_disk;
mod config_error;
mod config_mac;
mod config_names;
mod config_net;
mod config_nic;
mod config_options;
mod config_sriov;
mod config_value;
mod config_vdpa;

pub mod acpi;
pub mod api;
pub mod arch;
pub mod boot;
pub mod console;
pub mod cpu;
mod error;
pub mod kvm;
mod kvm_error;
pub mod memory;
mod open_files;
pub mod pio;
mod terminal;
mod vm;

pub use error::Error;
pub use vm::run;

mod config_pages;
mod devices;
mod firmware;
mod interrupt;
mod mmio;
mod slot;

/// The machine that devices are plugged into, without a VM: for fuzz targets.
#[cfg(feature = "testing")]
pub mod testing {
    pub use crate::config_pages::{PAGE, Shown};
    pub use crate::firmware::{Apertures, NoRoom, place_bars};
    pub use crate::interrupt::Wiring;
    pub use crate::mmio::MmioMap;
    pub use crate::slot::{Machine, Slot};
}
