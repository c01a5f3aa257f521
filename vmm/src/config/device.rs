//! The plan of one device of a root bus.

use std::path::Path;

use virtio_devices::{BalloonSpec, BlockSpec, MemSpec, PmemSpec, RngSpec, RtcSpec, VhostUserDeviceSpec, VsockSpec};

use crate::config::net::backend::MissingBackend;
use crate::config::net::x550::X550Plan;
use crate::config::sriov::{NetPlan, NicPlan};
use crate::pci_layout::RootBus;
use crate::vfio::VfioSpec;
use vm_api::config::mac::MacAddress;

/// Device of a root bus, with a value for each setting that was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePlan {
    /// The option that describes it, such as `--disk`.
    pub flag: &'static str,
    /// Name, unique in the VM.
    pub id: String,
    /// The PCI segment.
    pub pci_segment: u16,
    /// The device number on the root bus, 1 to 31, or 0 where no host bridge is; `None` for the lowest free one.
    pub pci_device_id: Option<u8>,
    /// True if its own function is behind the virtual IOMMU. VFs always are if the VM has one.
    pub iommu: bool,
    /// The device.
    pub kind: DeviceKind,
}

/// The kinds of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceKind {
    /// A NIC, or a PF with its VFs.
    Net(NetPlan),
    /// An Intel X550 with its VFs.
    X550(X550Plan),
    /// A disk.
    Disk(BlockSpec),
    /// The virtio console.
    Console,
    /// The entropy device.
    Rng(RngSpec),
    /// The balloon.
    Balloon(BalloonSpec),
    /// The socket device.
    Vsock(VsockSpec),
    /// A file system, a disk or another device that another process runs.
    VhostUser(VhostUserDeviceSpec),
    /// Persistent memory.
    Pmem(PmemSpec),
    /// The watchdog.
    Watchdog,
    /// The device that reports guest panics.
    Pvpanic,
    /// A memory device.
    Mem {
        /// The device.
        spec: MemSpec,
        /// The index of the part of the memory that it adds to.
        part: usize,
    },
    /// The channel by which the guest governs VFs.
    GuestChannel,
    /// The clock.
    Rtc(RtcSpec),
    /// The virtual IOMMU.
    Iommu(IommuSpec),
    /// A host device.
    Vfio(VfioSpec),
}

/// A virtual IOMMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IommuSpec {
    /// The number of bits of the addresses that it translates.
    pub address_width: u8,
    /// The segments with all devices behind the IOMMU.
    pub segments: Vec<u16>,
}

impl DevicePlan {
    /// The virtio NIC, or the virtio PF with its VFs, if the device is one.
    pub const fn net(&self) -> Option<&NetPlan> {
        match &self.kind {
            DeviceKind::Net(net) => Some(net),
            _ => None,
        }
    }

    /// The X550, if the device is one.
    pub const fn x550(&self) -> Option<&X550Plan> {
        match &self.kind {
            DeviceKind::X550(x550) => Some(x550),
            _ => None,
        }
    }

    /// The MAC addresses of its functions that the host chooses or gives.
    pub(crate) fn macs(&self) -> impl Iterator<Item = MacAddress> + '_ {
        self.nics().map(|nic| MacAddress(nic.spec.mac)).chain(self.x550().map(|x550| x550.mac))
    }

    /// The further root bus of segment 0 that it is on, if it is on one.
    pub fn root(&self) -> Option<RootBus> {
        self.net().map(|net| net.root).or_else(|| self.x550().map(|x550| x550.root)).flatten()
    }

    /// The number of the root bus that it is on, within its segment.
    pub fn root_bus(&self) -> u8 {
        self.root().map_or(0, |root| root.bus)
    }

    /// The slot that the configuration gives it: the segment, the root bus, and the device number there.
    pub(crate) fn chosen_slot(&self) -> Option<(u16, u8, u8)> {
        Some((self.pci_segment, self.root_bus(), self.pci_device_id?))
    }

    /// True if the configuration has fields for the device's id and slot
    /// ([`VmConfig::places_mut`](vm_api::config::VmConfig::places_mut)).
    pub(crate) const fn has_place(&self) -> bool {
        !matches!(
            self.kind,
            DeviceKind::Watchdog
                | DeviceKind::Pvpanic
                | DeviceKind::GuestChannel
                | DeviceKind::Mem { .. }
                | DeviceKind::Iommu(_)
        )
    }

    /// The virtual IOMMU, if the device is one.
    pub const fn iommu_spec(&self) -> Option<&IommuSpec> {
        match &self.kind {
            DeviceKind::Iommu(spec) => Some(spec),
            _ => None,
        }
    }

    /// True if the guest's memory must be shared, because a backend maps it.
    pub fn needs_shared_memory(&self) -> bool {
        match &self.kind {
            DeviceKind::Net(net) => net.functions().any(|function| function.backend.needs_shared_memory()),
            DeviceKind::VhostUser(_) => true,
            DeviceKind::X550(_)
            | DeviceKind::Disk(_)
            | DeviceKind::Console
            | DeviceKind::Rng(_)
            | DeviceKind::Balloon(_)
            | DeviceKind::Vsock(_)
            | DeviceKind::Pmem(_)
            | DeviceKind::Watchdog
            | DeviceKind::Pvpanic
            | DeviceKind::GuestChannel
            | DeviceKind::Mem { .. }
            | DeviceKind::Rtc(_)
            | DeviceKind::Iommu(_)
            | DeviceKind::Vfio(_) => false,
        }
    }

    /// True if the device may pin pages of the guest's memory, which must then stay.
    pub fn pins_memory(&self) -> bool {
        matches!(self.kind, DeviceKind::Vfio(_)) || self.nics().any(|nic| nic.backend.pins_memory())
    }

    /// Number of VFs that it reserves.
    pub fn total_vfs(&self) -> u16 {
        match &self.kind {
            DeviceKind::Net(net) => u16::try_from(net.vfs.len()).unwrap_or(u16::MAX),
            DeviceKind::X550(x550) => x550.total_vfs,
            _ => 0,
        }
    }

    /// The functions of a virtio NIC: the NIC or PF, then the VFs by index.
    pub fn nics(&self) -> impl Iterator<Item = &NicPlan> {
        self.net().into_iter().flat_map(NetPlan::functions)
    }

    /// The sockets of its vhost-user backends.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        let own = match &self.kind {
            DeviceKind::VhostUser(spec) => Some(spec.socket.as_path()),
            _ => None,
        };
        own.into_iter().chain(self.nics().filter_map(|nic| nic.backend.socket()))
    }

    /// The device with only one backend to open: that of VF `vf`, or of its own function.
    pub(crate) fn with_only(mut self, vf: Option<u16>) -> Self {
        if let DeviceKind::Net(net) = &mut self.kind {
            let wanted = vf.map_or(0, |index| usize::from(index) + 1);
            for (_, other) in net.functions_mut().enumerate().filter(|(n, _)| *n != wanted) {
                other.missing = MissingBackend::LeftOut(String::new());
            }
        }
        self
    }

    /// Option that names it: `--net id=pf0`.
    pub fn option(&self) -> String {
        format!("{} id={}", self.flag, self.id)
    }

    /// True if the device can be removed from a VM. Devices that a VM can have only once are not removable, except for
    /// the socket device: the pages in a balloon would be lost, as would the plugged blocks of a memory device.
    pub const fn is_removable(&self) -> bool {
        match self.kind {
            DeviceKind::Console
            | DeviceKind::Rng(_)
            | DeviceKind::Balloon(_)
            | DeviceKind::Watchdog
            | DeviceKind::Pvpanic
            | DeviceKind::GuestChannel
            | DeviceKind::Mem { .. }
            | DeviceKind::Rtc(_)
            | DeviceKind::Iommu(_) => false,
            DeviceKind::Net(_)
            | DeviceKind::X550(_)
            | DeviceKind::Disk(_)
            | DeviceKind::Vsock(_)
            | DeviceKind::VhostUser(_)
            | DeviceKind::Pmem(_)
            | DeviceKind::Vfio(_) => true,
        }
    }

    /// The names of its functions: its own, then those of its VFs by index.
    pub fn names(&self) -> Vec<String> {
        match &self.kind {
            DeviceKind::Net(net) => net.functions().map(|function| function.spec.id.clone()).collect(),
            DeviceKind::X550(x550) => x550.names().collect(),
            _ => vec![self.id.clone()],
        }
    }
}
