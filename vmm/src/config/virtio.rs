//! Virtio devices other than NICs and disks: rules and plans.

pub(crate) mod balloon;
pub(crate) mod mem;
pub(crate) mod pmem;
pub(crate) mod rng;
pub(crate) mod vhost_user;
pub(crate) mod vsock;
