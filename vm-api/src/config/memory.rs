//! The guest's memory: `--memory`.

pub mod zone;
pub mod zone_update;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::memory::zone::MemoryZoneConfig;
use crate::config::value::Value;

/// The guest's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--memory")]
pub struct MemoryConfig {
    /// Size of the guest's memory at boot. After vm.resize, the requested size.
    #[option("size=<bytes>[K|M|G]", bare, default = 512 << 20)]
    pub size: u64,
    /// Let other processes map the memory, as vhost-user backends do.
    #[option("shared=on|off")]
    pub shared: bool,
    /// Use huge pages that the host has reserved.
    #[option("hugepages=on|off")]
    pub hugepages: bool,
    /// Size of the huge pages. By default the host's.
    #[option("hugepage_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Allocate all memory before the guest starts.
    #[option("prefault=on|off")]
    pub prefault: bool,
    /// Let the host use transparent huge pages.
    #[option("thp=on|off", default = true)]
    pub thp: bool,
    /// Let the host merge equal pages (KSM). Memory that other processes can map is not merged.
    #[option("mergeable=on|off")]
    pub mergeable: bool,
    /// Reserve swap space on the host, so that the guest cannot run out of it later. Only for private memory.
    #[option("reserve=on|off")]
    pub reserve: bool,
    /// Include the memory in core dumps of this program.
    #[option("dump=on|off")]
    pub dump: bool,
    /// Method of adding memory while the guest runs. Only virtio-mem can also remove it.
    #[option("hotplug_method=acpi|virtio-mem", default = HotplugMethod::Acpi)]
    pub hotplug_method: HotplugMethod,
    /// Memory that can be added while the guest runs: with acpi in steps of 128M, at most 8 of them; with virtio-mem in
    /// steps of 2M or of a huge page. By default none.
    #[option("hotplug_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_size: Option<u64>,
    /// Part of hotplug_size that the guest has from the start. Only with virtio-mem. After vm.resize, the requested
    /// size.
    #[option("hotplugged_size=<bytes>[K|M|G]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplugged_size: Option<u64>,
    /// The zones of the memory (--memory-zone on the command line). With zones, the size is 0, mergeable applies to all
    /// of them, and shared, hugepages, prefault and reserve are set per zone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 7)]
    pub zones: Vec<MemoryZoneConfig>,
}

impl MemoryConfig {
    /// The unit in which memory is added while the guest runs, in bytes.
    pub const STEP: u64 = 128 << 20;

    /// Size of the memory without that of virtio-mem devices, in bytes.
    pub fn total(&self) -> u64 {
        self.parts().iter().fold(0, |sum, part| sum.saturating_add(part.size))
    }

    /// Requested size of the memory, including virtio-mem devices, in bytes.
    pub fn wanted(&self) -> u64 {
        self.parts().iter().fold(0, |sum, part| sum.saturating_add(part.wanted()))
    }

    /// The zones, or if there are none, a single one with these settings. Of these settings, only `mergeable` also
    /// applies to zones.
    pub fn parts(&self) -> Vec<MemoryZoneConfig> {
        if !self.zones.is_empty() {
            let part = |zone: &MemoryZoneConfig| MemoryZoneConfig {
                mergeable: zone.mergeable || self.mergeable,
                ..zone.clone()
            };
            return self.zones.iter().map(part).collect();
        }
        let by_device = |size: Option<u64>| size.filter(|_| self.hotplug_method == HotplugMethod::VirtioMem);
        vec![MemoryZoneConfig {
            id: String::new(),
            size: self.size,
            file: None,
            shared: self.shared,
            hugepages: self.hugepages,
            hugepage_size: self.hugepage_size,
            host_numa_node: None,
            hotplug_size: by_device(self.hotplug_size),
            hotplugged_size: by_device(self.hotplugged_size),
            prefault: self.prefault,
            reserve: self.reserve,
            mergeable: self.mergeable,
        }]
    }

    /// Memory that ACPI can add while the guest runs, in bytes; `None` if none.
    pub fn room(&self) -> Option<u64> {
        self.hotplug_size.filter(|size| *size > 0 && self.hotplug_method == HotplugMethod::Acpi)
    }
}

/// Method of adding memory while the guest runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[schema(shows_default)]
pub enum HotplugMethod {
    /// ACPI memory devices, which cannot be removed.
    #[default]
    Acpi,
    /// A virtio-mem device.
    VirtioMem,
}

impl Value for HotplugMethod {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "acpi" => Ok(Self::Acpi),
            "virtio-mem" => Ok(Self::VirtioMem),
            _ => Err("give acpi or virtio-mem".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Acpi => "acpi".to_string(),
            Self::VirtioMem => "virtio-mem".to_string(),
        })
    }
}
