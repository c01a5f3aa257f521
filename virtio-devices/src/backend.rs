//! Where a NIC's frames come from and go to.

mod tap;

pub use tap::{InterfaceNameError, Offloads, Tap, TapError, TapQueue, TapSpec, check_interface_name, is_network_mask};
