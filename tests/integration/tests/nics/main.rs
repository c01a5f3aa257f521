//! NICs, their switch, and what moves their frames.

mod backends;
#[path = "../../../../virtio-devices/src/testing/driver_queue.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "a rig of virtio-devices, whose own tests use the rest"
)]
mod driver;
mod nic;
mod peers;
mod switch;
mod translated;
mod vdpa;

use virtio_devices::GuestMap;
