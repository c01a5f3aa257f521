//! The vDPA device of a NIC.

use std::path::PathBuf;

/// The vDPA device to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdpaSpec {
    /// The path, `/dev/vhost-vdpa-N`.
    pub path: PathBuf,
    /// The Ethernet address to set. Without one, the device keeps its own.
    pub mac: Option<[u8; 6]>,
    /// The pairs of queues that the device must run.
    pub queue_pairs: u16,
}
