//! Properties of the machine beyond its devices: `--platform` and `--pci-segment`. The strings of `--platform` are
//! those of SMBIOS (`DSP0134`), which identify the machine to the guest.

use std::os::fd::RawFd;

use option_derive::{Options, Schema};
use serde::Serialize;

/// The machine as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--platform")]
#[schema(unsupported = Platform)]
pub struct PlatformConfig {
    /// Number of PCI segments, 1 to 96. Each after the first has one bus, with room for 31 devices and no VFs.
    #[option("num_pci_segments=<number>", default = 1)]
    #[schema(minimum = 1, maximum = 96)]
    pub num_pci_segments: u16,
    /// Add a virtual IOMMU even if no device has iommu=on. All VFs of a VM with an IOMMU are behind it.
    #[option("iommu=on|off")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub iommu: bool,
    /// PCI segments whose devices are all behind the virtual IOMMU, hot-plugged ones too. Each of them must have
    /// iommu=on.
    #[option("iommu_segments=[<number>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub iommu_segments: Vec<u16>,
    /// Width of the addresses that the virtual IOMMU translates, in bits, 32 to 64.
    #[option("iommu_address_width=<bits>", default = 64, alias = "iommu_address_width_bits")]
    #[serde(rename = "iommu_address_width_bits")]
    #[schema(minimum = 32, maximum = 64)]
    pub iommu_address_width: u8,
    /// Descriptor of an open /dev/iommu, through which devices of the host (--device) are mapped to guest memory.
    /// Implies iommufd=on.
    #[option("iommufd_fd=<number>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 3, maximum = 2_147_483_647)]
    pub iommufd_fd: Option<RawFd>,
    /// Open devices of the host one by one, through iommufd, instead of by IOMMU group. By default on if
    /// there is an iommufd_fd, and otherwise off.
    #[option("iommufd=on|off", default_from = iommufd_fd.is_some())]
    pub iommufd: bool,
    /// Let devices of the host (--device) reach each other's BARs at the guest's addresses (peer-to-peer), if the
    /// host's IOMMU allows that.
    #[option("vfio_p2p_dma=on|off", default = true)]
    pub vfio_p2p_dma: bool,
    /// Provide a kernel with all hardware of older PCs: the ports of configuration space, an MP table, the ACPI timer
    /// and the clock at port 70h. By default Linux gets the parts needed by words of its command line, such as
    /// acpi=off; on is for kernels without CONFIG_PCI_MMCONFIG, CONFIG_ACPI or CONFIG_KVM_GUEST. Firmware always has
    /// it.
    #[option("legacy_hardware=on|off")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub legacy_hardware: bool,
    /// Manufacturer of the system. By default Cloud Hypervisor.
    #[option("system_manufacturer=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_manufacturer: Option<String>,
    /// Product name of the system. By default cloud-hypervisor.
    #[option("system_product_name=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_product_name: Option<String>,
    /// Version of the system.
    #[option("system_version=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_version: Option<String>,
    /// Serial number of the system. The older name of this key is serial_number.
    #[option("system_serial_number=<text>", alias = "serial_number")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_serial_number: Option<String>,
    /// UUID of the system, 32 hexadecimal digits with or without hyphens. The older name of this key is uuid.
    #[option("system_uuid=<uuid>", alias = "uuid")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_uuid: Option<String>,
    /// SKU number of the system.
    #[option("system_sku_number=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_sku_number: Option<String>,
    /// Family of the system.
    #[option("system_family=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_family: Option<String>,
    /// Strings for programs in the guest, such as credentials for systemd: at most 255.
    #[option("oem_strings=[<text>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 255, items(min_length = 1))]
    pub oem_strings: Vec<String>,
    /// Asset tag of the chassis.
    #[option("chassis_asset_tag=<text>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chassis_asset_tag: Option<String>,
}

/// Relative share of a PCI segment in the address space for PCI memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--pci-segment")]
pub struct PciSegmentConfig {
    /// Number of the segment.
    #[option("pci_segment=<number>")]
    #[schema(maximum = 95)]
    pub pci_segment: u16,
    /// Weight of its share of the addresses below 4 GiB, 1 or more.
    #[option("mmio32_aperture_weight=<number>", default = 1)]
    #[schema(minimum = 1)]
    pub mmio32_aperture_weight: u32,
    /// Weight of its share of the addresses above 4 GiB, 1 or more.
    #[option("mmio64_aperture_weight=<number>", default = 1)]
    #[schema(minimum = 1)]
    pub mmio64_aperture_weight: u32,
}
