//! What a VM consists of: everything left out has been decided, and every mistake that the configuration alone reveals
//! has been found.

use std::collections::HashMap;

use crate::config::disk::DiskPlan;
use crate::config::machine;
use crate::config::rng::RngPlan;
use crate::config_sriov::{self, NetPlan, NicPlan};
use vm_api::config::VmConfig;
use vm_api::config::console::ConsoleMode;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::mac::MacAddress;

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

/// The id of the virtio console.
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
    /// Checks everything that can be checked without opening anything, except for a missing kernel, and decides what
    /// was left out.
    ///
    /// MAC addresses that were left out are drawn anew by each call; [`PlannedVm`] keeps them.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn of(config: &VmConfig) -> Result<Self, ConfigError> {
        machine::check(config)?;
        let vcpus = config.cpus.boot_vcpus;
        let mut nets = config_sriov::plan(&config.net, &config.vdpa, vcpus)?;
        let vdpas = nets.split_off(config.net.len());
        let plan = Self {
            nets,
            vdpas,
            disks: DiskPlan::of(&config.disks, vcpus)?,
            console: config.console.mode != ConsoleMode::Off,
            rng: RngPlan::of(&config.rng)?,
        };
        plan.check_apart()?;
        Ok(plan)
    }

    /// All devices, in the order in which they are given slots: NICs first, so that their addresses do not depend on
    /// other devices.
    pub fn devices(&self) -> Vec<DevicePlan> {
        let nets = self.nets.iter().chain(&self.vdpas).cloned().map(DevicePlan::Net);
        let disks = self.disks.iter().cloned().map(DevicePlan::Disk);
        let console = self.console.then_some(DevicePlan::Console);
        nets.chain(disks).chain(console).chain([DevicePlan::Rng(self.rng.clone())]).collect()
    }

    /// Whether the guest's memory must be shared, because a backend maps it.
    pub fn needs_shared_memory(&self) -> bool {
        let nets = self.nets.iter().chain(&self.vdpas);
        nets.flat_map(NetPlan::functions).any(|function| function.backend.needs_shared_memory())
    }

    /// Checks that devices of different kinds share no name and no slot. Those of the same kind have been compared.
    fn check_apart(&self) -> Result<(), ConfigError> {
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

    /// Writes into `config` what was left out and decided here: ids, MAC addresses and, where they follow from a NIC's
    /// position, names of taps.
    fn fill_in(&self, config: &mut VmConfig) {
        for (net, plan) in config.net.iter_mut().zip(&self.nets) {
            net.id = Some(plan.id().to_string());
            if plan.pf.backend.has_own_mac() {
                let vfs = (0..).zip(&plan.vfs).filter(|(_, vf)| !vf.backend.has_own_mac());
                vfs.for_each(|(index, vf)| net.vf_mut(index).mac = Some(MacAddress(vf.spec.mac)));
            } else {
                net.mac = Some(MacAddress(plan.pf.spec.mac));
            }
            if let Some(tap) = plan.pf.backend.tap_name() {
                net.tap = Some(tap.to_string());
            }
        }
        for (vdpa, plan) in config.vdpa.iter_mut().zip(&self.vdpas) {
            vdpa.id = Some(plan.id().to_string());
        }
        for (disk, plan) in config.disks.iter_mut().zip(&self.disks) {
            disk.id = Some(plan.spec.id.clone());
        }
        config.rng.id = Some(self.rng.spec.id.clone());
    }
}

/// A VM's configuration with everything filled in that was left out, and its plan. It is planned once; further devices
/// are planned on a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedVm {
    config: VmConfig,
    plan: VmPlan,
}

impl PlannedVm {
    /// Plans `config`.
    ///
    /// # Errors
    ///
    /// As [`VmPlan::of`].
    pub fn new(mut config: VmConfig) -> Result<Self, ConfigError> {
        let plan = VmPlan::of(&config)?;
        plan.fill_in(&mut config);
        Ok(Self { config, plan })
    }

    /// The configuration.
    pub const fn config(&self) -> &VmConfig {
        &self.config
    }

    /// The plan.
    pub const fn plan(&self) -> &VmPlan {
        &self.plan
    }

    /// Notes that the device called `id` is in slot `device` of bus 0, where it is again at the next start.
    pub fn set_slot(&mut self, id: &str, device: u8) {
        self.config.set_slot(id, device);
        let VmPlan { nets, vdpas, disks, rng, console: _ } = &mut self.plan;
        for net in nets.iter_mut().chain(vdpas).filter(|net| net.id() == id) {
            net.pci_device_id = Some(device);
        }
        for disk in disks.iter_mut().filter(|disk| disk.spec.id == id) {
            disk.pci_device_id = Some(device);
        }
        if rng.spec.id == id {
            rng.pci_device_id = Some(device);
        }
    }

    /// Removes the device called `id`, if there is one.
    pub fn remove(&mut self, id: &str) {
        self.config.remove(id);
        self.plan.nets.retain(|net| net.id() != id);
        self.plan.vdpas.retain(|net| net.id() != id);
        self.plan.disks.retain(|disk| disk.spec.id != id);
    }
}

impl DevicePlan {
    /// Its name, unique in the VM.
    pub fn id(&self) -> &str {
        match self {
            Self::Net(net) => net.id(),
            Self::Disk(disk) => &disk.spec.id,
            Self::Console => CONSOLE,
            Self::Rng(rng) => &rng.spec.id,
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

    /// The functions of a NIC: the NIC or PF, then the VFs by index.
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

    /// Whether it can be removed from a VM. The devices of every VM cannot.
    pub const fn is_removable(&self) -> bool {
        !matches!(self, Self::Console | Self::Rng(_))
    }

    /// Its name, and those of its VFs.
    fn names(&self) -> Vec<String> {
        match self {
            Self::Net(net) => net.functions().map(|function| function.spec.id.clone()).collect(),
            _ => vec![self.id().to_string()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_what_would_be_planned_again() {
        let mut config = VmConfig::default();
        for net in ["sriov_vfs=2", "id=b,tap=t", "id=c,sriov_vfs=1"] {
            config.net.push(net.parse().unwrap());
        }
        config.disks.push("path=/a".parse().unwrap());
        config.disks.push("path=/b".parse().unwrap());
        let mut vm = PlannedVm::new(config).unwrap();
        let again = |vm: &PlannedVm| PlannedVm::new(vm.config().clone()).unwrap();
        assert_eq!(again(&vm), vm);
        for (device, id) in [(7, "b"), (9, "_disk1"), (3, "__rng"), (4, "_net0")] {
            vm.set_slot(id, device);
        }
        assert_eq!(again(&vm), vm);
        assert_eq!(vm.plan().nets[0].pci_device_id, Some(4));
        vm.remove("_net0");
        vm.remove("_disk1");
        assert_eq!((vm.plan().nets.len(), vm.plan().disks.len()), (2, 1));
        assert_eq!(again(&vm), vm);
    }

    #[test]
    fn an_address_that_was_drawn_is_kept_though_the_configuration_cannot_hold_it() {
        let mut config = VmConfig::default();
        config.vdpa.push("path=/d".parse().unwrap());
        let vm = PlannedVm::new(config).unwrap();
        assert!(vm.plan().vdpas[0].pf.backend.has_own_mac());
        assert_ne!(VmPlan::of(vm.config()).unwrap().vdpas[0].pf.spec.mac, vm.plan().vdpas[0].pf.spec.mac);
    }
}
