//! Memory zones: `--memory-zone`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::Serialize;

/// A part of the guest's memory with its own properties.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--memory-zone")]
pub struct MemoryZoneConfig {
    /// Zone name, unique in the VM.
    #[option("id=<name>", bare, required)]
    #[schema(min_length = 1)]
    pub id: String,
    /// Size of the zone. Zones are contiguous in the given order.
    #[option("size=<bytes>[K|M|G]", required)]
    #[schema(minimum = 4096)]
    pub size: u64,
    /// File with the zone's contents, or directory for an unnamed file of the zone.
    #[option("file=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Let other processes map the zone. Required for a file's zone to contain the guest's writes.
    #[option("shared=on|off")]
    pub shared: bool,
    /// Use huge pages that the host has reserved.
    #[option("hugepages=on|off")]
    pub hugepages: bool,
    /// Size of the huge pages. By default the host's.
    #[option("hugepage_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Host NUMA node of the zone's pages. By default any.
    #[option("host_numa_node=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = "int32", maximum = 1023)]
    pub host_numa_node: Option<u32>,
    /// Memory that can be added to the zone while the guest runs, in steps of 2M or of a huge page. Only with --memory
    /// hotplug_method=virtio-mem. By default none.
    #[option("hotplug_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// Part of hotplug_size that the zone has from the start. After vm.resize-zone, the requested size.
    #[option("hotplugged_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
    /// Allocate all of the zone before the guest starts.
    #[option("prefault=on|off")]
    pub prefault: bool,
    /// Reserve swap space on the host. Only for private memory.
    #[option("reserve=on|off")]
    pub reserve: bool,
    /// Let the host merge equal pages (KSM). Memory that other processes can map is not merged.
    #[option("mergeable=on|off")]
    pub mergeable: bool,
}

impl MemoryZoneConfig {
    /// Memory that a virtio-mem device can add to the zone, in bytes; `None` if none.
    pub fn room(&self) -> Option<u64> {
        self.hotplug_size.filter(|size| *size > 0)
    }

    /// Requested size of the zone, in bytes.
    pub fn wanted(&self) -> u64 {
        self.size.saturating_add(self.hotplugged_size.unwrap_or(0))
    }
}
