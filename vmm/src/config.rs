//! What a VM is made of: one type for each part is JSON, command line and help.
//!
//! The names are Cloud Hypervisor's. `VmConfig::plan` checks everything before anything is opened, and resolves what was left
//! out.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::config_console::{ConsoleConfig, ConsoleMode, ParseConsoleError};
pub use crate::config_disk::{DiskConfig, DiskPlan, ImageType};
pub use crate::config_error::{ConfigError, Problem};
pub use crate::config_mac::{MacAddress, ParseMacError};
pub use crate::config_net::{NetConfig, NetVf, VfConfig};
pub use crate::config_plan::{DevicePlan, VmPlan};
pub use crate::config_rate::{RateLimiterConfig, TokenBucketConfig};
pub use crate::config_rng::{RngConfig, RngPlan};
pub use crate::config_sriov::{BackendPlan, NetPlan, NicPlan};
pub use crate::config_value::{Key, Options, help};
pub use crate::config_vdpa::VdpaConfig;
pub use crate::config_vhost::{Vhost, VhostMode};

use crate::config_sriov;
use crate::config_value::{Value, options};

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
    /// The disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskConfig>,
    /// The NICs, in the order of their slots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<NetConfig>,
    /// NICs that are a vDPA device of the host each, in the order of their slots, which follow those of the other NICs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vdpa: Vec<VdpaConfig>,
    /// The entropy device.
    pub rng: RngConfig,
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
            disks: Vec::new(),
            net: Vec::new(),
            vdpa: Vec::new(),
            rng: RngConfig::default(),
            serial: ConsoleConfig::new(ConsoleMode::Null),
            console: ConsoleConfig::off(),
        }
    }
}

impl VmConfig {
    /// Checks everything that can be checked without opening anything, but for a kernel that is missing, and decides what was left
    /// out.
    ///
    /// A MAC address that was left out is another one with each call, until [`Self::resolve`] has filled it in.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn plan(&self) -> Result<VmPlan, ConfigError> {
        self.cpus.check()?;
        self.memory.check()?;
        self.payload.check()?;
        self.serial.check_serial()?;
        self.console.check_console(&self.serial)?;
        let mut nets = config_sriov::plan(&self.net, &self.vdpa, self.cpus.boot_vcpus)?;
        let vdpas = nets.split_off(self.net.len());
        let plan = VmPlan {
            nets,
            vdpas,
            disks: DiskPlan::of(&self.disks, self.cpus.boot_vcpus)?,
            console: self.console.mode != ConsoleMode::Off,
            rng: self.rng.plan()?,
        };
        plan.check_apart()?;
        Ok(plan)
    }

    /// Fills in what was left out and decided by the plan: ids, MAC addresses and, where they follow from the position of a NIC,
    /// names of taps. What is planned of the result is `plan`, also when there are further devices, but for MAC addresses that their
    /// backends know better.
    pub fn resolve(&mut self, plan: &VmPlan) {
        for (net, plan) in self.net.iter_mut().zip(&plan.nets) {
            net.id = Some(plan.id.clone());
            match &plan.pf.backend {
                backend if backend.has_own_mac() => net.keep_vf_macs(plan),
                _ => net.mac = Some(MacAddress(plan.pf.mac)),
            }
            if let BackendPlan::Tap { name: Some(name), .. } = &plan.pf.backend {
                net.tap = Some(name.clone());
            }
        }
        for (vdpa, plan) in self.vdpa.iter_mut().zip(&plan.vdpas) {
            vdpa.id = Some(plan.id.clone());
        }
        for (disk, plan) in self.disks.iter_mut().zip(&plan.disks) {
            disk.id = Some(plan.id.clone());
        }
        self.rng.id = Some(plan.rng.id.clone());
    }

    /// Notes that the device called `id` is in slot `device` of bus 0.
    pub fn set_slot(&mut self, id: &str, device: u8) {
        let nets = self.net.iter_mut().map(|net| (&net.id, &mut net.pci_device_id));
        let disks = self.disks.iter_mut().map(|disk| (&disk.id, &mut disk.pci_device_id));
        let vdpas = self.vdpa.iter_mut().map(|vdpa| (&vdpa.id, &mut vdpa.pci_device_id));
        let rng = (&self.rng.id, &mut self.rng.pci_device_id);
        for (name, slot) in nets.chain(vdpas).chain(disks).chain([rng]) {
            if name.as_deref() == Some(id) {
                *slot = Some(device);
            }
        }
    }

    /// Removes the device called `id`, if there is one.
    pub fn remove(&mut self, id: &str) {
        self.net.retain(|net| net.id.as_deref() != Some(id));
        self.vdpa.retain(|vdpa| vdpa.id.as_deref() != Some(id));
        self.disks.retain(|disk| disk.id.as_deref() != Some(id));
    }
}

options! {
    /// The virtual CPUs.
    pub struct CpusConfig for "--cpus" {
        /// Number of vCPUs at boot.
        "boot" = "<number>" => boot_vcpus: u32 = 1;
        /// Largest number of vCPUs, which are added and removed while the guest runs; if it is left out, those at boot.
        "max" = "<number>" => max_vcpus: u32 = boot_vcpus, derived;
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

/// The most vCPUs: an APIC ID is a byte, 255 addresses all of them, and the I/O APIC has one too.
const MOST_VCPUS: u32 = 254;

impl CpusConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let Self { boot_vcpus: boot, max_vcpus: max } = *self;
        let fail = |what: String, problem| Err(ConfigError::new(format!("--cpus {what}"), problem));
        if boot == 0 {
            return fail("boot=0".to_string(), Problem::Value("a VM needs a vCPU; give 1 or more".to_string()));
        }
        for (key, value) in [("boot", boot), ("max", max)] {
            if value > MOST_VCPUS {
                let what = format!("a VM has at most {MOST_VCPUS} vCPUs; give fewer");
                return fail(format!("{key}={value}"), Problem::Limit(what));
            }
        }
        if max < boot {
            let what = format!("fewer at most than at boot; give max={boot} or more, or leave it out");
            return fail(format!("boot={boot},max={max}"), Problem::Conflict(what));
        }
        Ok(())
    }
}

/// The most memory: 46 bits of address, less what is above it.
const MOST_MEMORY: u64 = 1 << 45;
/// The unit of memory, in bytes: a page.
const PAGE: u64 = 4096;

impl MemoryConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let fail = |key: &str, value: u64, problem| {
            let value = Value::print(&value).unwrap_or_default();
            Err(ConfigError::new(format!("--memory {key}={value}"), problem))
        };
        if self.size == 0 {
            return fail("size", 0, Problem::Value("a VM needs memory; give a size, as 512M".to_string()));
        }
        if self.size > MOST_MEMORY {
            let what = format!("more than a guest can address; give at most {}G", MOST_MEMORY >> 30);
            return fail("size", self.size, Problem::Limit(what));
        }
        if let Some(page) = self.hugepage_size {
            if !self.hugepages {
                return fail("hugepage_size", page, Problem::Missing("needs hugepages=on; add it".to_string()));
            }
            if !page.is_power_of_two() || page <= PAGE {
                return fail(
                    "hugepage_size",
                    page,
                    Problem::Value("not the size of a huge page; 2M and 1G are".to_string()),
                );
            }
        }
        let page = self.hugepage_size.unwrap_or(PAGE);
        if !self.size.is_multiple_of(page) {
            let what = format!("not a whole number of pages of {} KiB; round it up", page >> 10);
            return fail("size", self.size, Problem::Conflict(what));
        }
        Ok(())
    }
}

impl PayloadConfig {
    /// Checks that there is something to boot, which a VM that is only created need not have.
    ///
    /// # Errors
    ///
    /// When there is no kernel.
    pub fn check_present(&self) -> Result<(), ConfigError> {
        if self.kernel.is_none() {
            let what = "has to be given: the path of a bzImage or of a vmlinux".to_string();
            return Err(ConfigError::new("--kernel", Problem::Missing(what)));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), ConfigError> {
        if let Some(cmdline) = self.cmdline.as_ref().filter(|cmdline| cmdline.contains('\0')) {
            let what = "a NUL ends a kernel's command line; leave it out".to_string();
            return Err(ConfigError::new(format!("--cmdline {cmdline}"), Problem::Value(what)));
        }
        Ok(())
    }
}
