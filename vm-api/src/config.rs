//! A VM's configuration. Each part is one type, which defines its JSON, its command line and its help.
//!
//! The names are Cloud Hypervisor's.

pub(crate) mod affinity;
pub mod console;
pub mod cpus;
pub mod device;
pub mod disk;
pub mod error;
pub mod grammar;
pub mod id;
pub mod json;
pub(crate) mod keys;
pub mod kinds;
pub mod landlock;
pub mod mac;
pub mod memory;
pub mod net;
pub mod numa;
pub mod option;
pub mod platform;
pub mod rate;
pub mod restore;
pub mod tpm;
pub mod unsupported;
pub mod value;
pub mod vdpa;
pub mod virtio;

use std::path::PathBuf;

use option_derive::Schema;
use serde::{Deserialize, Serialize};

pub use crate::config::console::debug::DebugConsoleConfig;
pub use crate::config::console::{ConsoleConfig, ConsoleMode, ParseConsoleError};
pub use crate::config::cpus::{CoreScheduling, CpuAffinity, CpuFeatures, CpuTopology, CpusConfig};
pub use crate::config::device::DeviceConfig;
pub use crate::config::disk::{DiskConfig, ImageType, LockGranularity, RateLimitGroupConfig, VirtQueueAffinity};
pub use crate::config::error::{ConfigError, Problem};
pub use crate::config::keys::Key;
pub use crate::config::landlock::{LandlockAccess, LandlockConfig};
pub use crate::config::mac::{MacAddress, MacChoice, ParseMacError};
pub use crate::config::memory::zone::MemoryZoneConfig;
pub use crate::config::memory::zone_update::ZoneUpdate;
pub use crate::config::memory::{HotplugMethod, MemoryConfig};
pub use crate::config::net::backend::BackendConfig;
pub use crate::config::net::policy::{LinkPolicy, PolicyConfig, VlanProto, Vlans};
pub use crate::config::net::switch::{Mirror, SwitchMode};
pub use crate::config::net::vf_range::VfRange;
pub use crate::config::net::vhost::{Vhost, VhostMode};
pub use crate::config::net::{NetConfig, NetVf, VfConfig};
pub use crate::config::numa::{NumaConfig, NumaDistance};
pub use crate::config::option::{Argument, Options, help};
pub use crate::config::platform::{PciSegmentConfig, PlatformConfig};
pub use crate::config::rate::{RateLimiterConfig, TokenBucketConfig};
pub use crate::config::restore::{
    MemoryRestoreMode, NoLink, OnMissingBackend, RestoreConfig, RestoredBackend, RestoredNet,
};
pub use crate::config::tpm::TpmConfig;
pub use crate::config::value::{Form, bytes};
pub use crate::config::vdpa::VdpaConfig;
pub use crate::config::virtio::balloon::BalloonConfig;
pub use crate::config::virtio::fs::FsConfig;
pub use crate::config::virtio::generic_vhost_user::{DeviceType, GenericVhostUserConfig};
pub use crate::config::virtio::pmem::PmemConfig;
pub use crate::config::virtio::rng::RngConfig;
pub use crate::config::virtio::rtc::RtcConfig;
pub use crate::config::virtio::vsock::VsockConfig;

/// A virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, default)]
#[schema(unsupported = Vm)]
pub struct VmConfig {
    /// The virtual CPUs.
    pub cpus: CpusConfig,
    /// The guest's memory.
    pub memory: MemoryConfig,
    /// Kernel or firmware that the guest boots.
    #[schema(required)]
    pub payload: PayloadConfig,
    /// Rate limits that several disks share.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rate_limit_groups: Vec<RateLimitGroupConfig>,
    /// The disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskConfig>,
    /// The NICs, in the order of their slots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net: Vec<NetConfig>,
    /// NICs that are vDPA devices of the host. Their slots follow those of the other NICs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vdpa: Vec<VdpaConfig>,
    /// The entropy device. Every VM has one.
    pub rng: RngConfig,
    /// The balloon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonConfig>,
    /// The device for connections between programs of the guest and of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// The shared file systems.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fs: Vec<FsConfig>,
    /// vhost-user devices of any type.
    #[serde(skip_serializing_if = "Vec::is_empty", alias = "generic-vhost-user")]
    pub generic_vhost_user: Vec<GenericVhostUserConfig>,
    /// Persistent memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pmem: Vec<PmemConfig>,
    /// PCI devices of the host (VFIO).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceConfig>,
    /// True if the VM has a watchdog (virtio device type 35), which resets a guest that has pinged it and then stops
    /// for more than 20 s.
    pub watchdog: bool,
    /// True if the VM has a pvpanic device, which reports a panic of the guest as the event guest:panic.
    pub pvpanic: bool,
    /// True if the VM has the device by which programs of its guest govern VFs. Also set if a NIC lets the guest do so
    /// when the VM is created. With it, such a NIC can be added later.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub guest_channel: bool,
    /// The clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtc: Option<RtcConfig>,
    /// The TPM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpm: Option<TpmConfig>,
    /// The serial port. It has no id, PCI segment, device number or IOMMU.
    #[schema(named = "SerialConfig")]
    pub serial: ConsoleConfig,
    /// The virtio console.
    pub console: ConsoleConfig,
    /// The debug console.
    pub debug_console: DebugConsoleConfig,
    /// True if the VM has a virtual IOMMU, behind which are all its VFs. Also set if its platform or a device requires
    /// one.
    pub iommu: bool,
    /// The machine as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformConfig>,
    /// Weight of each PCI segment's share of the address space for PCI memory, by default those of a default
    /// [`PciSegmentConfig`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pci_segments: Vec<PciSegmentConfig>,
    /// The NUMA nodes of the guest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub numa: Vec<NumaConfig>,
    /// True if Landlock permanently confines this program to the files that this configuration names, without TCP. The
    /// files must exist.
    pub landlock_enable: bool,
    /// Further files that the program may use, such as those of devices that are added later. Without landlock_enable,
    /// they have no effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub landlock_rules: Vec<LandlockConfig>,
}

impl Default for VmConfig {
    fn default() -> Self {
        Self {
            cpus: CpusConfig::default(),
            memory: MemoryConfig::default(),
            payload: PayloadConfig::default(),
            rate_limit_groups: Vec::new(),
            disks: Vec::new(),
            net: Vec::new(),
            vdpa: Vec::new(),
            rng: RngConfig::default(),
            balloon: None,
            vsock: None,
            fs: Vec::new(),
            generic_vhost_user: Vec::new(),
            pmem: Vec::new(),
            devices: Vec::new(),
            watchdog: false,
            pvpanic: false,
            guest_channel: false,
            rtc: None,
            tpm: None,
            serial: ConsoleConfig::new(ConsoleMode::Null),
            console: ConsoleConfig::new(ConsoleMode::Tty),
            debug_console: DebugConsoleConfig::default(),
            iommu: false,
            platform: None,
            pci_segments: Vec::new(),
            numa: Vec::new(),
            landlock_enable: false,
            landlock_rules: Vec::new(),
        }
    }
}

impl VmConfig {
    /// The ids and slots of all devices, kind by kind, in the order in which slots are assigned: that of Cloud
    /// Hypervisor, so that images find their NICs at the expected slots.
    pub fn places_mut(&mut self) -> impl Iterator<Item = Place<'_>> {
        let nets = self.net.iter_mut().map(|net| Place::new(&mut net.id, &mut net.pci_device_id));
        let vdpas = self.vdpa.iter_mut().map(|vdpa| Place::new(&mut vdpa.id, &mut vdpa.pci_device_id));
        let disks = self.disks.iter_mut().map(|disk| Place::new(&mut disk.id, &mut disk.pci_device_id));
        let console = Place::new(&mut self.console.id, &mut self.console.pci_device_id);
        let console = (self.console.mode != ConsoleMode::Off).then_some(console);
        let rng = Place::new(&mut self.rng.id, &mut self.rng.pci_device_id);
        let balloon = self.balloon.iter_mut().map(|balloon| Place::new(&mut balloon.id, &mut balloon.pci_device_id));
        let vsock = self.vsock.iter_mut().map(|vsock| Place::new(&mut vsock.id, &mut vsock.pci_device_id));
        let fs = self.fs.iter_mut().map(|fs| Place::new(&mut fs.id, &mut fs.pci_device_id));
        let generic = self.generic_vhost_user.iter_mut();
        let generic = generic.map(|device| Place::new(&mut device.id, &mut device.pci_device_id));
        let pmem = self.pmem.iter_mut().map(|pmem| Place::new(&mut pmem.id, &mut pmem.pci_device_id));
        let devices = self.devices.iter_mut();
        let devices = devices.map(|device| Place::new(&mut device.id, &mut device.pci_device_id));
        let rtc = self.rtc.iter_mut().map(|rtc| Place::new(&mut rtc.id, &mut rtc.pci_device_id));
        let first = console.into_iter().chain(disks).chain(nets).chain(std::iter::once(rng));
        first.chain(fs).chain(generic).chain(pmem).chain(vsock).chain(balloon).chain(vdpas).chain(rtc).chain(devices)
    }

    /// Removes the device called `id`, if it exists.
    pub fn remove(&mut self, id: &str) {
        self.net.retain(|net| net.id.as_deref() != Some(id));
        self.vdpa.retain(|vdpa| vdpa.id.as_deref() != Some(id));
        self.disks.retain(|disk| disk.id.as_deref() != Some(id));
        self.vsock.take_if(|vsock| vsock.id.as_deref() == Some(id));
        self.fs.retain(|fs| fs.id.as_deref() != Some(id));
        self.generic_vhost_user.retain(|device| device.id.as_deref() != Some(id));
        self.pmem.retain(|pmem| pmem.id.as_deref() != Some(id));
        self.devices.retain(|device| device.id.as_deref() != Some(id));
        for node in &mut self.numa {
            node.device_id.take_if(|device| device == id);
        }
    }
}

/// The id and the slot of a device of any kind in a configuration.
#[derive(Debug)]
pub struct Place<'a> {
    /// Name, unique in the VM.
    pub id: &'a mut Option<String>,
    /// Device number on bus 0, 0 to 31.
    pub pci_device_id: &'a mut Option<u8>,
}

impl<'a> Place<'a> {
    const fn new(id: &'a mut Option<String>, pci_device_id: &'a mut Option<u8>) -> Self {
        Self { id, pci_device_id }
    }
}

/// Kernel and its parameters, or firmware, that the guest boots.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields, default)]
#[schema(unsupported = Payload)]
pub struct PayloadConfig {
    /// A bzImage, or an ELF vmlinux with a PVH entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Firmware that boots from a disk: an ELF file with a PVH entry. It excludes kernel, and gets neither an
    /// initramfs nor a command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firmware: Option<PathBuf>,
    /// The initial file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
}

impl PayloadConfig {
    /// Checks that there is something to boot. Creating a VM does not require it.
    ///
    /// # Errors
    ///
    /// Fails if there is neither a kernel nor firmware.
    pub fn check_present(&self) -> Result<(), ConfigError> {
        if self.kernel.is_none() && self.firmware.is_none() {
            let what = "is required; give the path of a bzImage or a vmlinux, or --firmware".to_string();
            return Err(ConfigError::new("--kernel", Problem::Missing(what)));
        }
        Ok(())
    }
}
