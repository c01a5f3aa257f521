//! A VM as it is planned: everything that was left out is decided, and everything that a configuration alone can have wrong has
//! been found.

use std::collections::HashMap;

use crate::config_disk::DiskPlan;
use crate::config_error::{ConfigError, Problem};
use crate::config_rng::RngPlan;
use crate::config_sriov::{NetPlan, NicPlan};

/// The devices of a VM, and nothing that has to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmPlan {
    /// The NICs.
    pub nets: Vec<NetPlan>,
    /// The NICs of `--vdpa`.
    pub vdpas: Vec<NetPlan>,
    /// The disks.
    pub disks: Vec<DiskPlan>,
    /// Whether there is a virtio console.
    pub console: bool,
    /// The entropy device.
    pub rng: RngPlan,
}

/// What the virtio console is called.
const CONSOLE: &str = "__console";

/// One device of bus 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevicePlan {
    /// A NIC, or a PF with its VFs.
    Net(NetPlan),
    /// A disk.
    Disk(DiskPlan),
    /// The virtio console.
    Console,
    /// The entropy device.
    Rng(RngPlan),
}

impl VmPlan {
    /// All devices, in the order in which slots are given: NICs first, so that their addresses do not depend on what else there
    /// is.
    pub fn devices(&self) -> Vec<DevicePlan> {
        let nets = self.nets.iter().chain(&self.vdpas).cloned().map(DevicePlan::Net);
        let disks = self.disks.iter().cloned().map(DevicePlan::Disk);
        let console = self.console.then_some(DevicePlan::Console);
        nets.chain(disks).chain(console).chain([DevicePlan::Rng(self.rng.clone())]).collect()
    }

    /// Whether a backend needs guest memory that others than this process can map.
    pub fn needs_shared_memory(&self) -> bool {
        let nets = self.nets.iter().chain(&self.vdpas);
        nets.flat_map(NetPlan::functions).any(|function| function.backend.needs_shared_memory())
    }

    /// Checks that no two devices of different kinds have one name or one slot. Those of one kind have been compared.
    pub(crate) fn check_apart(&self) -> Result<(), ConfigError> {
        let (mut names, mut slots) = (HashMap::new(), HashMap::new());
        for device in self.devices() {
            let taken = |what: String, user: String, remedy: &str| {
                Err(ConfigError::new(device.option(), Problem::InUse { what, user, remedy: remedy.to_string() }))
            };
            for name in device.names() {
                if let Some(user) = names.insert(name.clone(), device.option()) {
                    return taken(format!("the id {name}"), user, "give each device its own");
                }
            }
            if let Some(slot) = device.pci_device_id()
                && let Some(user) = slots.insert(slot, device.option())
            {
                return taken(format!("slot {slot}"), user, "give another, or leave pci_device_id out");
            }
        }
        Ok(())
    }
}

impl DevicePlan {
    /// Its name, unique in the VM.
    pub fn id(&self) -> &str {
        match self {
            Self::Net(net) => &net.id,
            Self::Disk(disk) => &disk.id,
            Self::Console => CONSOLE,
            Self::Rng(rng) => &rng.id,
        }
    }

    /// The device number on bus 0, 1 to 31; `None` for the lowest that is free.
    pub const fn pci_device_id(&self) -> Option<u8> {
        match self {
            Self::Net(net) => net.pci_device_id,
            Self::Disk(disk) => disk.pci_device_id,
            Self::Console => None,
            Self::Rng(rng) => rng.pci_device_id,
        }
    }

    /// How many VFs it reserves.
    pub fn total_vfs(&self) -> u16 {
        match self {
            Self::Net(net) => u16::try_from(net.vfs.len()).unwrap_or(u16::MAX),
            Self::Disk(_) | Self::Console | Self::Rng(_) => 0,
        }
    }

    /// Its functions, if it is a NIC: its own first, and then its VFs by index.
    pub fn nics(&self) -> impl Iterator<Item = &NicPlan> {
        let net = match self {
            Self::Net(net) => Some(net),
            Self::Disk(_) | Self::Console | Self::Rng(_) => None,
        };
        net.into_iter().flat_map(NetPlan::functions)
    }

    /// How a user would name it: `--net id=pf0`.
    pub fn option(&self) -> String {
        let option = match self {
            Self::Net(net) => net.option,
            Self::Disk(_) => "--disk",
            Self::Console => return "--console".to_string(),
            Self::Rng(_) => "--rng",
        };
        format!("{option} id={}", self.id())
    }

    /// Whether it can be removed from a VM: what every VM has cannot.
    pub const fn is_removable(&self) -> bool {
        !matches!(self, Self::Console | Self::Rng(_))
    }

    /// Its name, and those of its VFs.
    fn names(&self) -> Vec<String> {
        match self {
            Self::Net(net) => net.functions().map(|function| function.id.clone()).collect(),
            _ => vec![self.id().to_string()],
        }
    }
}
