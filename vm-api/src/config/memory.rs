//! The guest's memory: `--memory`.

use option_derive::Options;
use serde::Serialize;

/// The guest's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options)]
#[options("--memory")]
pub struct MemoryConfig {
    /// Size of the guest's memory.
    #[option("size=<bytes>[K|M|G]", default = 512 << 20)]
    pub size: u64,
    /// Whether other processes can map the memory, as vhost-user backends do.
    #[option("shared=on|off")]
    pub shared: bool,
    /// Whether to use huge pages that the host has reserved.
    #[option("hugepages=on|off")]
    pub hugepages: bool,
    /// Size of the huge pages. By default the host's.
    #[option("hugepage_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Whether to allocate all memory before the guest starts.
    #[option("prefault=on|off")]
    pub prefault: bool,
    /// Whether the host may use transparent huge pages.
    #[option("thp=on|off", default = true)]
    pub thp: bool,
}
