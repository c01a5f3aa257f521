//! Which vDPA device a NIC uses.

use std::path::PathBuf;

/// Which vDPA device to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdpaSpec {
    /// Its path, `/dev/vhost-vdpa-N`.
    pub path: PathBuf,
    /// The Ethernet address that it is given. Without one, it keeps its own.
    pub mac: Option<[u8; 6]>,
    /// The pairs of queues that it has to run.
    pub queue_pairs: u16,
}
