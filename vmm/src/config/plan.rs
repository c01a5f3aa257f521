//! Plan of a VM: each setting that was left out has a value, and every mistake that the configuration alone reveals has
//! been found.

use std::collections::{HashMap, HashSet};

use crate::arch::x86_64::smbios;
use crate::config::device::{DeviceKind, DevicePlan, IommuSpec};
use crate::config::numa::NumaNode;
use crate::config::root_buses::RootBuses;
use crate::config::sriov::{self, AnyNic, NetPlan, NicPlan};
use crate::config::virtio::{balloon, mem, pmem, rng, vhost_user, vsock};
use crate::config::{
    console, disk, guest_channel, iommu, json_names, machine, memory, numa, on_off, rtc, segments, vfio,
};
use crate::pci_layout::{RootBus, Weights};
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::mac::MacAddress;
use vm_api::config::option::Options as _;
use vm_api::config::vdpa::VdpaConfig;
use vm_api::config::{
    DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, MemoryConfig, PlatformConfig, PmemConfig, VmConfig,
    VsockConfig,
};

/// The devices of a VM, the guest's tables, and no open resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmPlan {
    /// All devices, in the order in which they get slots: that of Cloud Hypervisor, with other kinds last.
    pub devices: Vec<DevicePlan>,
    /// The SMBIOS tables.
    pub smbios: Vec<u8>,
    /// Weight of each PCI segment in the addresses, by number.
    pub segments: Vec<Weights>,
    /// Further root buses of segment 0, by ascending numbers.
    pub roots: Vec<RootBus>,
    /// The NUMA nodes, by number; none if the machine is one.
    pub numa: Vec<NumaNode>,
    /// Settings that are accepted but have no effect or another one: a line for the log about each.
    pub warnings: Vec<String>,
}

impl VmPlan {
    /// Checks everything that can be checked without opening anything, except for a missing kernel, and chooses the
    /// values that were left out.
    ///
    /// MAC addresses that were left out are drawn again by each call; [`PlannedVm`] keeps them.
    ///
    /// # Errors
    ///
    /// Fails with the first mistake.
    pub fn of(config: &VmConfig) -> Result<Self, ConfigError> {
        Self::of_expanded(sriov::expanded(config)?.as_ref().unwrap_or(config))
    }

    /// As [`Self::of`], for a configuration without ranges of VFs.
    fn of_expanded(config: &VmConfig) -> Result<Self, ConfigError> {
        machine::check(config)?;
        let mut warnings = machine::warnings(config);
        let segments = segments::plan(config)?;
        let count = u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let vcpus = config.cpus.boot_vcpus;
        let nets = config.net.iter().map(|net| ("--net", net.pci_segment, net.pci_device_id, net.iommu));
        let vdpas =
            config.vdpa.iter().map(|vdpa| (VdpaConfig::OPTION, vdpa.pci_segment, vdpa.pci_device_id, vdpa.iommu));
        let ids = config.ids();
        let numa = numa::plan(config, count, &mut warnings)?;
        let roots = RootBuses::plan(&config.net, &config.numa, count)?;
        let plans = sriov::plan(&config.net, &config.vdpa, &ids, vcpus, (count, &roots))?;
        let device = |(nic, (flag, pci_segment, pci_device_id, iommu)): (AnyNic, _)| DevicePlan {
            flag,
            id: nic.id().to_string(),
            pci_segment,
            pci_device_id,
            iommu,
            kind: match nic {
                AnyNic::Virtio(net) => DeviceKind::Net(net),
                AnyNic::X550(x550) => DeviceKind::X550(x550),
            },
        };
        let mut nics: Vec<_> = plans.into_iter().zip(nets.chain(vdpas)).map(device).collect();
        let vdpas = nics.split_off(config.net.len());
        let of_host = vfio::plan(&config.devices, ids.of::<DeviceConfig>(), config.platform.as_ref())?;
        let mut devices = Vec::from_iter(console::plan(&config.console)?);
        devices.extend(disk::plan(
            &config.disks,
            ids.of::<DiskConfig>(),
            &config.rate_limit_groups,
            vcpus,
            &mut warnings,
        )?);
        devices.extend(nics);
        devices.push(rng::plan(&config.rng)?);
        devices.extend(vhost_user::plan_fs(&config.fs, ids.of::<FsConfig>(), vcpus)?);
        devices.extend(vhost_user::plan_generic(&config.generic_vhost_user, ids.of::<GenericVhostUserConfig>())?);
        devices.extend(pmem::plan(&config.pmem, ids.of::<PmemConfig>())?);
        devices.extend(vsock::plan(config.vsock.as_ref(), ids.of::<VsockConfig>())?);
        devices.extend(mem::plan(&config.memory, &numa));
        if let Some(balloon) = &config.balloon {
            devices.push(balloon::plan(balloon, config.memory.wanted(), devices.iter().chain(&vdpas).chain(&of_host))?);
        }
        devices.extend(on_off::watchdog(config));
        devices.extend(vdpas);
        devices.extend(rtc::plan(config.rtc.as_ref())?);
        devices.extend(of_host);
        let before_pvpanic = devices.len();
        devices.extend(on_off::pvpanic(config));
        let iommu = iommu::plan(config, &devices, count)?;
        devices.splice(before_pvpanic..before_pvpanic, iommu);
        // After all others, whose slots do not depend on it.
        devices.extend(guest_channel::plan(config));
        numa::check_devices(&numa, &devices)?;
        let platform = config.platform.as_ref();
        let smbios = smbios::tables(platform.unwrap_or(&PlatformConfig::default()), &mut warnings)?;
        let plan = Self { devices, smbios, segments, roots: roots.into_buses(), numa, warnings };
        for device in &plan.devices {
            let option = |key: &str, value| format!("{},{key}={value}", device.option());
            segments::check(option, device.pci_segment, device.total_vfs(), count)?;
        }
        plan.check_apart()?;
        Ok(plan)
    }

    /// The virtio NICs of `--net` and `--vdpa`.
    pub fn nets(&self) -> impl Iterator<Item = &NetPlan> {
        self.devices.iter().filter_map(DevicePlan::net)
    }

    /// The further root buses of segment 0 if a device is on one; none otherwise.
    pub(crate) fn roots_in_use(&self) -> Vec<RootBus> {
        let is_used = self.devices.iter().any(|device| device.root().is_some());
        if is_used { self.roots.clone() } else { Vec::new() }
    }

    /// True if the guest has a channel by which it governs VFs.
    pub fn has_channel(&self) -> bool {
        self.devices.iter().any(|device| device.kind == DeviceKind::GuestChannel)
    }

    /// True if the guest's memory must be shared, because a backend maps it.
    pub fn needs_shared_memory(&self) -> bool {
        self.devices.iter().any(DevicePlan::needs_shared_memory)
    }

    /// Checks that devices of different kinds share no name and no slot. Devices of the same kind have been compared.
    fn check_apart(&self) -> Result<(), ConfigError> {
        let (mut names, mut slots, mut sockets) = (HashMap::new(), HashMap::new(), HashMap::new());
        for device in &self.devices {
            let taken = |what: String, user: String, remedy: &str| {
                Err(ConfigError::new(device.option(), Problem::InUse { what, user, remedy: remedy.to_string() }))
            };
            for name in device.names() {
                if let Some(user) = names.insert(name.clone(), device.option()) {
                    return taken(format!("the id {name}"), user, "give each device its own");
                }
            }
            if let Some(place) = device.chosen_slot()
                && let Some(user) = slots.insert(place, device.option())
            {
                return taken(slot_of(place), user, "give another, or leave pci_device_id out");
            }
            for socket in device.sockets() {
                if let Some(user) = sockets.insert(socket, device.option())
                    && user != device.option()
                {
                    let what = format!("socket {}", socket.display());
                    return taken(what, user, "start a backend with a socket of its own for each");
                }
            }
        }
        Ok(())
    }

    /// The virtual IOMMU, if the VM has one.
    pub fn iommu(&self) -> Option<&IommuSpec> {
        self.devices.iter().find_map(DevicePlan::iommu_spec)
    }

    /// Writes the values chosen here into `config`: ids, MAC addresses and, if they follow from a NIC's position, names
    /// of taps.
    fn fill_in(&self, config: &mut VmConfig) {
        config.iommu = self.iommu().is_some();
        config.guest_channel = self.has_channel();
        for (place, device) in config.places_mut().zip(self.devices.iter().filter(|device| device.has_place())) {
            *place.id = Some(device.id.clone());
        }
        let nics = self.devices.iter().filter(|device| device.net().is_some() || device.x550().is_some());
        for (net, device) in config.net.iter_mut().zip(nics) {
            let plan = match &device.kind {
                DeviceKind::Net(plan) => plan,
                DeviceKind::X550(x550) => {
                    net.mac = Some(x550.mac.into());
                    continue;
                }
                _ => continue,
            };
            if plan.pf.backend.has_own_mac() {
                let vfs = (0..).zip(&plan.vfs).filter(|(_, vf)| !vf.backend.has_own_mac());
                vfs.for_each(|(index, vf)| net.vf_mut(index).mac = Some(MacAddress(vf.spec.mac).into()));
            } else {
                net.mac = Some(MacAddress(plan.pf.spec.mac).into());
            }
            if let Some(tap) = plan.pf.backend.tap_name() {
                net.backend.tap = Some(tap.to_string());
            }
        }
    }
}

/// A warning as one printable line, whatever values it contains.
fn one_line(text: &str) -> String {
    ConfigError::new("", Problem::Value(text.to_string())).to_string().trim_start_matches([':', ' ']).to_string()
}

/// Name of a slot in messages.
fn slot_of(place: (u16, u8, u8)) -> String {
    match place {
        (0, 0, slot) => format!("slot {slot}"),
        (0, root, slot) => format!("slot {slot} of root bus {root}"),
        (segment, _, slot) => format!("slot {slot} of segment {segment}"),
    }
}

/// A VM's configuration with every value filled in, and its plan. It is planned once; further devices are planned on a
/// copy.
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
    /// Fails as [`VmPlan::of`] does.
    pub fn new(config: VmConfig) -> Result<Self, ConfigError> {
        Self::named(config, |error, _| error)
    }

    /// Plans `config`, which was read from JSON: an error names the path in the document.
    ///
    /// # Errors
    ///
    /// Fails as [`VmPlan::of`] does.
    pub fn of_document(config: VmConfig) -> Result<Self, ConfigError> {
        Self::named(config, json_names::in_document)
    }

    /// Plans `config`, whose last device of its kind was read from JSON: an error about that names the path in its
    /// document.
    ///
    /// # Errors
    ///
    /// Fails as [`VmPlan::of`] does.
    pub(crate) fn with_device_of_document(config: VmConfig) -> Result<Self, ConfigError> {
        Self::named(config, json_names::in_device)
    }

    fn named(given: VmConfig, name: impl FnOnce(ConfigError, &VmConfig) -> ConfigError) -> Result<Self, ConfigError> {
        #[cfg(test)]
        tests::PLANS.set(tests::PLANS.get() + 1);
        let expanded = sriov::expanded(&given).and_then(|config| {
            let plan = VmPlan::of_expanded(config.as_ref().unwrap_or(&given))?;
            Ok((config, plan))
        });
        let (config, plan) = expanded.map_err(|error| name(error, &given))?;
        let mut config = config.unwrap_or(given);
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

    /// Logs the warnings of this plan that the plan `before`, if there was one, did not have.
    pub(crate) fn log_warnings(&self, before: Option<&VmPlan>) {
        let is_known = |line: &String| before.is_some_and(|before| before.warnings.contains(line));
        self.plan.warnings.iter().filter(|line| !is_known(line)).for_each(|line| log::warn!("{}", one_line(line)));
    }

    /// The device that this plan has and `before` has not.
    pub fn added_to(&self, before: &VmPlan) -> Option<&DevicePlan> {
        let known: HashSet<_> = before.devices.iter().map(|device| &device.id).collect();
        self.plan.devices.iter().find(|device| !known.contains(&device.id))
    }

    /// Records that the device called `id` is in slot `device` of bus 0, where the next start places it again.
    pub fn set_slot(&mut self, id: &str, device: u8) {
        for place in self.config.places_mut().filter(|place| place.id.as_deref() == Some(id)) {
            *place.pci_device_id = Some(device);
        }
        for plan in self.plan.devices.iter_mut().filter(|plan| plan.id == id) {
            plan.pci_device_id = Some(device);
        }
    }

    /// Takes over from `before` what the configuration has no field for: the slots of devices without a given slot, and
    /// which backends may be missing.
    pub fn keep_slots(&mut self, before: &VmPlan) {
        let taken: HashSet<_> = self.plan.devices.iter().filter_map(DevicePlan::chosen_slot).collect();
        for device in self.plan.devices.iter_mut().filter(|device| device.pci_device_id.is_none()) {
            let known = before.devices.iter().find(|known| known.id == device.id);
            let known = known.and_then(DevicePlan::chosen_slot).filter(|place| !taken.contains(place));
            device.pci_device_id = known.map(|(.., slot)| slot);
        }
        for device in &mut self.plan.devices {
            let known = before.devices.iter().find(|known| known.id == device.id);
            let (DeviceKind::Net(net), Some(DeviceKind::Net(known))) =
                (&mut device.kind, known.map(|known| &known.kind))
            else {
                continue;
            };
            for (nic, known) in net.functions_mut().zip(known.functions()) {
                nic.keep_missing(known);
            }
        }
    }

    /// The plan of VF `vf` of the NIC `id`, or of that NIC's own function.
    pub(crate) fn nic_mut(&mut self, id: &str, vf: Option<u16>) -> Option<&mut NicPlan> {
        let device = self.plan.devices.iter_mut().find(|device| device.id == id)?;
        let DeviceKind::Net(net) = &mut device.kind else { return None };
        match vf {
            None => Some(&mut net.pf),
            Some(index) => net.vfs.get_mut(usize::from(index)),
        }
    }

    /// Raises the number of vCPUs that the queues of added devices are planned for to `vcpus`. A smaller number changes
    /// nothing: devices of the VM may have more queues than it has vCPUs.
    pub fn count_vcpus(&mut self, vcpus: u32) {
        let boot = &mut self.config.cpus.boot_vcpus;
        *boot = vcpus.max(*boot);
    }

    /// Records the size of the balloon, if there is one, for the next start.
    pub fn set_balloon_size(&mut self, bytes: u64) {
        if let Some(balloon) = &mut self.config.balloon {
            balloon.size = bytes;
        }
        for device in &mut self.plan.devices {
            if let DeviceKind::Balloon(spec) = &mut device.kind {
                spec.size = bytes;
            }
        }
    }

    /// Sets the VM's memory, which differs from the present one in sizes only.
    ///
    /// # Errors
    ///
    /// Fails if the VM cannot have so much memory. Nothing has changed then.
    pub fn set_memory(&mut self, memory: MemoryConfig) -> Result<(), ConfigError> {
        memory::check_memory(&memory)?;
        self.config.memory = memory;
        Ok(())
    }

    /// Removes the device called `id`, if there is one.
    pub fn remove(&mut self, id: &str) {
        self.config.remove(id);
        for node in &mut self.plan.numa {
            node.device.take_if(|device| device == id);
        }
        self.plan.devices.retain(|device| device.id != id);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Number of plans that this thread has made.
        pub(crate) static PLANS: Cell<u32> = const { Cell::new(0) };
    }

    #[test]
    fn the_kept_configuration_is_planned_again_as_it_is() {
        let mut config = VmConfig::default();
        for net in ["sriov_vfs=2", "id=b,tap=t", "id=c,sriov_vfs=1"] {
            config.net.push(net.parse().unwrap());
        }
        config.disks.push("path=/a".parse().unwrap());
        config.disks.push("path=/b".parse().unwrap());
        config.balloon = Some("size=1M".parse().unwrap());
        let mut vm = PlannedVm::new(config).unwrap();
        let again = |vm: &PlannedVm| PlannedVm::new(vm.config().clone()).unwrap();
        assert_eq!(again(&vm), vm);
        for (device, id) in [(7, "b"), (9, "_disk1"), (3, "__rng"), (5, "__console"), (4, "_net2"), (6, "__balloon")] {
            vm.set_slot(id, device);
        }
        vm.set_balloon_size(3 << 20);
        assert_eq!(vm.config().balloon.as_ref().unwrap().size, 3 << 20);
        assert_eq!(again(&vm), vm);
        let slot = |id: &str| vm.plan().devices.iter().find(|device| device.id == id).unwrap().pci_device_id;
        assert_eq!(slot("_net2"), Some(4));
        vm.remove("_net2");
        vm.remove("_disk1");
        assert_eq!((vm.plan().nets().count(), vm.plan().devices.len()), (2, 6));
        assert_eq!(again(&vm), vm);
    }

    #[test]
    fn random_mac_is_kept_although_the_config_cannot_hold_it() {
        let mut config = VmConfig::default();
        config.vdpa.push("path=/d".parse().unwrap());
        let vm = PlannedVm::new(config).unwrap();
        let mac = |plan: &VmPlan| plan.nets().next().unwrap().pf.spec.mac;
        assert!(vm.plan().nets().next().unwrap().pf.backend.has_own_mac());
        assert_ne!(mac(&VmPlan::of(vm.config()).unwrap()), mac(vm.plan()));
    }

    #[test]
    fn a_device_without_a_place_in_the_configuration_keeps_its_slot() {
        let vm = |net: &[&str]| {
            let net = net.iter().map(|net| net.parse().unwrap()).collect();
            PlannedVm::new(VmConfig { net, watchdog: true, pvpanic: true, ..VmConfig::default() }).unwrap()
        };
        let slots = |vm: &PlannedVm| {
            let slot = |id: &str| vm.plan.devices.iter().find(|device| device.id == id).unwrap().pci_device_id;
            ["__watchdog", "__pvpanic"].map(slot)
        };
        let mut before = vm(&["id=a"]);
        before.set_slot("__watchdog", 4);
        before.set_slot("__pvpanic", 5);
        let mut after = vm(&["id=a", "id=b"]);
        after.keep_slots(before.plan());
        assert_eq!(slots(&after), [Some(4), Some(5)]);
        let mut taken = vm(&["id=a", "id=b,pci_device_id=4"]);
        taken.keep_slots(before.plan());
        assert_eq!(slots(&taken), [None, Some(5)], "another device was given its slot");
    }
}
