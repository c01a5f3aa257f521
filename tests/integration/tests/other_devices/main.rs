//! Devices other than NICs, and their addition and removal.

mod devices;
mod hotplug;
mod shared;
mod storage;
mod tpm;
mod vsock;
