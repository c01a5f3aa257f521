//! What a VM is made of: one type for each part is JSON, command line and help.
//!
//! The names are Cloud Hypervisor's. `VmConfig::plan` checks everything before anything is opened, and resolves what was left
//! out.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::config_console::{ConsoleConfig, ConsoleMode, ParseConsoleError};
pub use crate::config_error::{ConfigError, Problem};
pub use crate::config_mac::{MacAddress, ParseMacError};
pub use crate::config_net::{NetConfig, RateLimiterConfig, TokenBucketConfig, VfConfig, VhostMode};
pub use crate::config_sriov::{BackendPlan, NetPlan, NicPlan};
pub use crate::config_value::{Key, Options, help};

use crate::config_value::options;

/// A virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmConfig {
    /// The virtual CPUs.
    pub cpus: CpusConfig,
    /// The guest's memory.
    pub memory: MemoryConfig,
    /// What the guest boots.
    pub payload: PayloadConfig,
    /// The NICs, in the order of their slots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<NetConfig>,
    /// The serial port: `--serial`.
    pub serial: ConsoleConfig,
    /// The virtio console: `--console`.
    pub console: ConsoleConfig,
}

impl Default for VmConfig {
    fn default() -> Self {
        Self {
            cpus: CpusConfig::default(),
            memory: MemoryConfig::default(),
            payload: PayloadConfig::default(),
            net: Vec::new(),
            serial: ConsoleConfig::new(ConsoleMode::Null),
            console: ConsoleConfig::off(),
        }
    }
}

options! {
    /// The virtual CPUs.
    pub struct CpusConfig for "--cpus" {
        /// Number of vCPUs at boot.
        "boot" = "<number>" => boot_vcpus: u32 = 1;
        /// Largest number of vCPUs; only that of boot so far.
        "max" = "<number>" => max_vcpus: u32 = boot_vcpus;
    }
    later {
        "topology" => "CPU topologies are";
        "kvm_hyperv" => "Hyper-V enlightenments are";
        "max_phys_bits" => "a limit of the physical address width is";
        "affinity" => "pinning of vCPUs is";
        "features" => "additional CPU features are";
        "nested" => "a choice of nested virtualisation is";
        "core_scheduling" => "core scheduling is";
        "profile" => "CPU profiles are";
    }
}

options! {
    /// The guest's memory.
    pub struct MemoryConfig for "--memory" {
        /// Size of the guest's memory.
        "size" = "<bytes>[K|M|G]" => size: u64 = 512 << 20;
        /// Whether other processes can map it.
        "shared" = "on|off" => shared: bool = false;
        /// Whether it is of huge pages that the host has set aside.
        "hugepages" = "on|off" => hugepages: bool = false;
        /// Size of those pages; if it is left out, the host's default.
        "hugepage_size" = "<bytes>[K|M|G]" => hugepage_size: Option<u64> = None;
        /// Whether all of it is allocated before the guest starts.
        "prefault" = "on|off" => prefault: bool = false;
        /// Whether the host may use transparent huge pages.
        "thp" = "on|off" => thp: bool = true;
    }
    later {
        "mergeable" => "merging of equal pages is";
        "hotplug_method" | "hotplug_size" | "hotplugged_size" => "hot-plugged memory is";
        "reserve" => "reserving swap space is";
    }
}

/// What the guest boots: `--kernel`, `--initramfs`, `--cmdline`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PayloadConfig {
    /// A bzImage, or an ELF vmlinux with a PVH entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// The initial file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
}
