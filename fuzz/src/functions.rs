//! PCI functions: configuration space, BARs, interrupts, the transport of virtio and their saved state.

pub mod bar_moves;
pub mod config_space;
pub mod ecam;
pub mod msix;
pub mod saved_state;
pub mod sriov;
pub mod transport;
