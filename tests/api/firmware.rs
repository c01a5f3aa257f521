//! Guests that boot through firmware, and firmware given as a kernel.

mod as_firmware;
pub(crate) mod hypervisor_fw;
