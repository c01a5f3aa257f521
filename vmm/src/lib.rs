//! The machine that devices are plugged into: configuration, lifecycle, KVM, ACPI.

pub mod config;
mod config_console;
mod config_error;
mod config_mac;
mod config_names;
mod config_net;
mod config_nic;
mod config_options;
mod config_sriov;
mod config_value;
