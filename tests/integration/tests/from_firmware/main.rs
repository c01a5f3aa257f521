//! Guests that start from firmware.

mod firmware;
mod firmware_again;
mod hypervisor_fw;
