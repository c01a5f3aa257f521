//! Virtio devices other than NICs and disks.

pub mod balloon;
pub mod fs;
pub mod generic_vhost_user;
pub mod pmem;
pub mod rng;
pub mod rtc;
pub mod vsock;
