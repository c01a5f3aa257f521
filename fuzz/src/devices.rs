//! Devices as their drivers and backends see them.

pub mod balloon;
pub mod block;
pub mod console;
pub mod event_device;
pub mod guest_channel;
pub mod mem;
pub mod net_ctrl;
pub mod net_queue;
pub mod policy;
pub mod qcow2_open;
pub mod rng;
pub mod switch;
pub mod vhost_user;
pub mod viommu;
pub mod vsock;
pub mod x550;
