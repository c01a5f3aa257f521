//! From a plan to devices in their slots: the one place that knows both.

pub(crate) mod backends;
pub(crate) mod counters;
pub(crate) mod disks;
mod error;
pub(crate) mod mem_regions;
pub(crate) mod peers;
pub(crate) mod pvpanic;

use std::collections::HashSet;
use std::sync::Arc;

use pci::{Bdf, HostBridge, Placement, VfIndex};
use virtio_devices::{
    Balloon, BalloonSize, Cancel, CharDevice, Console, ConsoleWindow, Expiry, Mem, Memory, Net, NetSriov, NotResumed,
    Pmem, PortHandle, ResizeError, Rng, Rtc, Switch, Thread, VirtioDevice, VirtioFunction, VirtioPci, Vsock, Watchdog,
};
use vm_memory::GuestMemoryMmap;

use crate::config::{BackendPlan, DeviceKind, DevicePlan, NetPlan, NicPlan, switch};
use crate::devices::backends::Opener;
use crate::devices::counters::NicCounters;
use crate::devices::disks::Disk;
pub(crate) use crate::devices::disks::LimitGroups;
pub(crate) use crate::devices::error::DeviceError;
use crate::devices::mem_regions::MemRegions;
use crate::devices::peers::{Peers, function_option};
use crate::devices::pvpanic::Pvpanic;
use crate::kvm::Vm;
use crate::pci_host::assign_bars::Apertures;
use crate::pci_host::bus::Bus;
use crate::pci_host::device_watch::{DeviceWatch, backend_observer, tell_backend};
use crate::pci_host::policy_watch::PolicyWatch;
use crate::pci_host::slot::Slot;
use crate::telemetry::events::Events;

/// The host bridge that guests of Cloud Hypervisor see.
const HOST_BRIDGE: HostBridge<Thread> = HostBridge::new(0x8086, 0x0d57);

/// The devices of a machine. They outlive the KVM VMs that a guest's reboots make of it.
pub struct Devices {
    bus: Arc<Bus>,
    host: Host,
    plugged: Vec<Plugged>,
}

/// What devices are given by their machine.
pub(crate) struct Host {
    /// The guest's memory.
    pub memory: Memory,
    /// Where BARs may be, on each segment.
    pub apertures: Vec<Apertures>,
    /// The other end of the virtio console, and its window where that is a terminal, if there is a console.
    pub console: Option<(Arc<CharDevice>, Option<Arc<ConsoleWindow>>)>,
    /// The size of the balloon, if there is one: 0 otherwise.
    pub balloon: Arc<BalloonSize>,
    /// Resets the guest, for its watchdog.
    pub expiry: Arc<Expiry>,
    /// The memory of memory devices.
    pub mem_regions: MemRegions,
    /// Where the guest's changes to them are reported.
    pub events: Events,
    /// The rate limits that disks share.
    pub limit_groups: LimitGroups,
}

/// A device in its slot.
pub struct Plugged {
    plan: DevicePlan,
    placement: Placement,
    slot: Arc<Slot>,
    counters: Counters,
    /// The guest was asked to let it go.
    going: bool,
}

/// What a device counts.
enum Counters {
    /// Of a NIC: its own function's, and those of its VFs by index; and its switch, if it has one.
    Net(Vec<NicCounters>, Option<Switch>),
    /// Of a disk.
    Disk(Disk),
    /// Of a device of another kind: the kind, as in names of metrics, and how its counters are read.
    Plain(&'static str, Box<dyn Fn() -> Vec<(&'static str, u64)> + Send>),
}

impl Counters {
    fn plain(kind: &'static str, read: impl Fn() -> Vec<(&'static str, u64)> + Send + 'static) -> Self {
        Self::Plain(kind, Box::new(read))
    }
}

/// What a device has counted until now.
pub struct Counted {
    /// The kind of device, as in names of metrics.
    pub kind: &'static str,
    /// The counters of each function by name, the device's own function first and then its VFs by index. Unknown
    /// counters are left out.
    pub functions: Vec<Vec<(&'static str, u64)>>,
    /// How long requests to the device's own function take, in microseconds.
    pub latencies: Vec<(&'static str, u64)>,
}

/// A device that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// Its id.
    pub id: String,
    /// Where its own function was.
    pub address: Bdf,
}

impl Plugged {
    /// What it was made of.
    pub const fn plan(&self) -> &DevicePlan {
        &self.plan
    }

    /// Where its functions are.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// What it has counted until now.
    pub fn counted(&self) -> Counted {
        let mut latencies = Vec::new();
        let (kind, functions) = match &self.counters {
            Counters::Net(counters, _) => ("net", NicCounters::counted(counters)),
            Counters::Disk(disk) => {
                latencies = disk.latencies();
                ("block", vec![disk.counters()])
            }
            Counters::Plain(kind, read) => (*kind, vec![read()]),
        };
        Counted { kind, functions, latencies }
    }

    /// Changes the size of a disk in bytes, and notifies the guest. `None` if the device is no disk.
    pub fn resize_disk(&self, bytes: u64, is_paused: bool) -> Option<Result<(), ResizeError>> {
        match &self.counters {
            Counters::Disk(disk) => Some(disk.resize(bytes, &self.slot, is_paused)),
            _ => None,
        }
    }

    /// The switch that connects the functions of a PF, if it has one.
    pub const fn switch(&self) -> Option<&Switch> {
        match &self.counters {
            Counters::Net(_, switch) => switch.as_ref(),
            _ => None,
        }
    }

    /// The address of its own function.
    pub const fn address(&self) -> Bdf {
        self.placement.bdf(self.placement.rid)
    }

    /// The device as the machine has it.
    pub const fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    fn removed(self) -> Removed {
        Removed { address: self.address(), id: self.plan.id }
    }
}

impl Devices {
    /// Opens what the plans name and makes devices of it. `cancel` ends the wait for vhost-user backends.
    ///
    /// # Errors
    ///
    /// When something cannot be opened or be a device. What was opened or created until then is closed and gone.
    pub(crate) fn new(plans: &[DevicePlan], host: Host, cancel: Option<&Cancel>) -> Result<Self, DeviceError> {
        let segments = u16::try_from(host.apertures.len()).unwrap_or(u16::MAX);
        let mut devices = Self { bus: Arc::new(Bus::new(segments)), host, plugged: Vec::new() };
        // Only segment 0 has one, as in Cloud Hypervisor.
        let placement = devices.place(0, Some(0), 0, "host bridge")?;
        let slot = devices.slot(Box::new(HOST_BRIDGE), placement, "host bridge")?;
        devices.plug(placement, slot, "host bridge")?;
        let memory = devices.host.memory.clone();
        let mut opener = Opener::new(&memory, Peers::connect(plans, &memory, cancel)?);
        // In the order of the configuration, so that the buses of VFs do not depend on who chose a slot.
        for (plan, slot) in plans.iter().zip(slots(plans)) {
            devices.open(plan, slot, &mut opener)?;
        }
        Ok(devices)
    }

    /// What vCPUs see of the devices.
    pub const fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// The devices, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = &Plugged> + Clone {
        self.plugged.iter()
    }

    /// The device called `id`.
    pub fn find(&self, id: &str) -> Option<&Plugged> {
        self.plugged.iter().find(|plugged| plugged.plan.id == id)
    }

    /// Wires the devices to `vm`, in their state of power-on. Unless firmware does that, it gives their BARs addresses.
    ///
    /// # Errors
    ///
    /// When the BARs need more addresses than there are.
    pub fn attach(&self, vm: Arc<Vm>, has_firmware: bool) -> Result<(), DeviceError> {
        Ok(self.bus.attach(vm, &self.host.apertures, has_firmware)?)
    }

    /// Stops the queues of all devices where they are.
    pub fn pause(&self) {
        self.plugged.iter().for_each(|plugged| plugged.slot.pause());
    }

    /// Lets the queues go on.
    ///
    /// # Errors
    ///
    /// The host has no thread or file for some of them. All stand still then.
    pub fn resume(&self) -> Result<(), DeviceError> {
        let resumed = self.plugged.iter().try_for_each(|plugged| {
            plugged.slot.resume().map_err(|NotResumed { vf, error }| {
                let option = function_option(&plugged.plan, vf);
                DeviceError::NotResumed { option, error }
            })
        });
        resumed.inspect_err(|_| self.pause())
    }

    /// Whether the host's devices may reach pages of the guest's memory as they are now.
    pub fn pin_memory(&self) -> bool {
        self.plugged.iter().flat_map(|plugged| plugged.plan.nics()).any(|nic| nic.backend.pins_memory())
    }

    /// Makes all backends that reach the guest's memory by themselves reach `new` in place of `old`, before the guest
    /// can know of it. Waits for them; none of them is called on a vCPU.
    ///
    /// # Errors
    ///
    /// When a backend cannot. All reach `old` then, or are lost until they do.
    pub fn set_memory(&self, old: &GuestMemoryMmap, new: &GuestMemoryMmap) -> Result<(), DeviceError> {
        let mut users = Vec::new();
        for Plugged { plan, slot, .. } in &self.plugged {
            let mut of_device = Vec::new();
            // Without the device's lock afterwards: vCPUs take it.
            slot.with(|device| device.memory_users(&mut of_device));
            users.extend(of_device.into_iter().map(|(vf, user)| (function_option(plan, vf), user)));
        }
        for (n, (option, user)) in users.iter().enumerate() {
            let Err(error) = user.set(new) else { continue };
            for (option, user) in users.iter().take(n) {
                if let Err(error) = user.set(old) {
                    log::warn!("{option}: {error}");
                }
            }
            return Err(DeviceError::Memory { option: option.clone(), error });
        }
        Ok(())
    }

    /// Where BARs may be, on each segment.
    pub fn apertures(&self) -> &[Apertures] {
        &self.host.apertures
    }

    /// Sets where BARs may be, on each segment, from the next [`Self::attach`] on.
    pub fn set_apertures(&mut self, apertures: Vec<Apertures>) {
        self.host.apertures = apertures;
    }

    /// Adds the device of `plan` to those of a running guest, and returns the address of its own function. Its BARs are
    /// the guest's to place. Its vhost-user backends, if it has any, are `peers`.
    ///
    /// # Errors
    ///
    /// As [`Self::new`]: nothing is left of it then.
    pub(crate) fn add(&mut self, plan: &DevicePlan, peers: Peers) -> Result<Bdf, DeviceError> {
        let memory = self.host.memory.clone();
        let mut opener = Opener::new(&memory, peers);
        let placement = self.open(plan, plan.pci_device_id, &mut opener)?;
        Ok(placement.bdf(placement.rid))
    }

    /// Notes that the guest is asked to let the device called `id` go, and returns its address.
    pub fn unplug(&mut self, id: &str) -> Option<Bdf> {
        let plugged = self.plugged.iter_mut().find(|plugged| plugged.plan.id == id)?;
        plugged.going = true;
        Some(plugged.address())
    }

    /// Removes the device in this slot of this segment, which the guest does not use any more.
    pub fn remove(&mut self, segment: u16, slot: u8) -> Option<Removed> {
        let is_there = |address: Bdf| (address.segment, address.rid.device()) == (segment, slot);
        let n = self.plugged.iter().position(|plugged| is_there(plugged.address()))?;
        let plugged = self.plugged.remove(n);
        self.bus.unplug(plugged.address());
        Some(plugged.removed())
    }

    /// Removes all devices that the guest was asked to let go.
    pub fn remove_unplugged(&mut self) -> Vec<Removed> {
        let going = |plugged: &Plugged| plugged.going.then(|| plugged.address());
        let going: Vec<_> = self.plugged.iter().filter_map(going).collect();
        going.into_iter().filter_map(|address| self.remove(address.segment, address.rid.device())).collect()
    }

    fn open(&mut self, plan: &DevicePlan, slot: Option<u8>, opener: &mut Opener<'_>) -> Result<Placement, DeviceError> {
        let option = plan.option();
        let placement = self.place(plan.pci_segment, slot, plan.total_vfs(), &option)?;
        let (device, counters) = open(plan, placement, &self.host, opener)?;
        let slot = self.slot(device, placement, &option)?;
        self.plug(placement, Arc::clone(&slot), &option)?;
        DeviceWatch::begin(&plan.id, &slot, &self.host.events);
        self.plugged.push(Plugged { plan: plan.clone(), placement, slot, counters, going: false });
        Ok(placement)
    }

    fn place(&self, segment: u16, slot: Option<u8>, total_vfs: u16, option: &str) -> Result<Placement, DeviceError> {
        let place = self.bus.place(segment, slot, total_vfs);
        place.map_err(|error| DeviceError::Place { option: option.to_string(), error })
    }

    fn slot(&self, device: Box<dyn VirtioPci>, placement: Placement, option: &str) -> Result<Arc<Slot>, DeviceError> {
        Slot::new(device, placement, Arc::clone(self.bus.host()))
            .map_err(|error| DeviceError::Pages { option: option.to_string(), error })
    }

    fn plug(&self, placement: Placement, slot: Arc<Slot>, option: &str) -> Result<(), DeviceError> {
        self.bus.plug(placement, slot).map_err(|error| DeviceError::Place { option: option.to_string(), error })
    }
}

/// The slot of each device: the chosen one, or the lowest from 1 of its segment that was not chosen. `None` if there
/// are no more.
fn slots(plans: &[DevicePlan]) -> Vec<Option<u8>> {
    let chosen = plans.iter().filter_map(|plan| Some((plan.pci_segment, plan.pci_device_id?)));
    let mut taken: HashSet<_> = chosen.collect();
    let slot =
        |plan: &DevicePlan| plan.pci_device_id.or_else(|| (1..32).find(|slot| taken.insert((plan.pci_segment, *slot))));
    plans.iter().map(slot).collect()
}

/// A device, and what it counts.
type Opened = (Box<dyn VirtioPci>, Counters);

/// Opens what `plan` names and makes a device of it.
fn open(plan: &DevicePlan, placement: Placement, host: &Host, opener: &mut Opener<'_>) -> Result<Opened, DeviceError> {
    let (option, memory) = (plan.option(), &host.memory);
    match &plan.kind {
        DeviceKind::Console => {
            let (end, window) = host.console.clone().ok_or(DeviceError::NoConsole)?;
            let console = Console::new(&plan.id, end, window);
            let counters = console.counters();
            let counters = Counters::plain("console", move || counters.iter().collect());
            Ok((plain(console, &option, placement, memory)?, counters))
        }
        DeviceKind::Net(net) => open_net(net, plan, placement, host, opener),
        DeviceKind::Disk(spec) => {
            let (block, disk) = Disk::open(spec, &host.limit_groups)
                .map_err(|error| DeviceError::Disk { option: option.clone(), error })?;
            Ok((plain(block, &option, placement, memory)?, Counters::Disk(disk)))
        }
        DeviceKind::Rng(spec) => {
            let rng = Rng::open(spec.clone()).map_err(|error| DeviceError::Rng { option: option.clone(), error })?;
            let counters = rng.counters();
            let counters = Counters::plain("rng", move || counters.iter().collect());
            Ok((plain(rng, &option, placement, memory)?, counters))
        }
        DeviceKind::Balloon(spec) => {
            let balloon = Balloon::new(spec.clone(), Arc::clone(&host.balloon));
            let counters = balloon.counters();
            let counters = Counters::plain("balloon", move || counters.iter().collect());
            Ok((plain(balloon, &option, placement, memory)?, counters))
        }
        DeviceKind::Rtc(spec) => {
            let rtc = Rtc::new(spec.clone());
            let counters = rtc.counters();
            let counters = Counters::plain("rtc", move || counters.iter().collect());
            Ok((plain(rtc, &option, placement, memory)?, counters))
        }
        DeviceKind::Vsock(spec) => {
            let vsock =
                Vsock::open(spec.clone()).map_err(|error| DeviceError::Vsock { option: option.clone(), error })?;
            let counters = vsock.counters();
            let counters = Counters::plain("vsock", move || counters.iter().collect());
            Ok((plain(vsock, &option, placement, memory)?, counters))
        }
        DeviceKind::Mem { spec, part } => {
            let region = host.mem_regions.of(*part).ok_or_else(|| DeviceError::NoRegion { option: option.clone() })?;
            let mem = Mem::new(spec.clone(), Arc::clone(region));
            let counters = mem.counters();
            let counters = Counters::plain("mem", move || counters.iter().collect());
            Ok((plain(mem, &option, placement, memory)?, counters))
        }
        DeviceKind::VhostUser(spec) => {
            let device = opener.device(spec);
            let device = device.map_err(|error| DeviceError::Backend { option: option.clone(), error })?;
            let observer = backend_observer(&plan.id, None, device.backend_name(), &host.events);
            device.observe_backend(observer);
            // Its requests pass this process by.
            Ok((plain(device, &option, placement, memory)?, Counters::plain("vhost_user", Vec::new)))
        }
        DeviceKind::Pmem(spec) => {
            let pmem = Pmem::open(spec.clone()).map_err(|error| DeviceError::Pmem { option: option.clone(), error })?;
            let counters = pmem.counters();
            let counters = Counters::plain("pmem", move || counters.iter().collect());
            Ok((plain(pmem, &option, placement, memory)?, counters))
        }
        DeviceKind::Watchdog => {
            let watchdog = Watchdog::new(&plan.id, Arc::clone(&host.expiry));
            let counters = watchdog.counters();
            let counters = Counters::plain("watchdog", move || counters.iter().collect());
            Ok((plain(watchdog, &option, placement, memory)?, counters))
        }
        DeviceKind::Pvpanic => {
            let device = Pvpanic::new(placement.rid, &host.events);
            let device = device.map_err(|error| DeviceError::Function { option, error: error.into() })?;
            let reports = Arc::clone(device.reports());
            Ok((Box::new(device), Counters::plain("pvpanic", move || reports.counters())))
        }
    }
}

/// A function that is neither a PF nor a VF.
fn plain<D: VirtioDevice + 'static>(
    device: D,
    option: &str,
    placement: Placement,
    memory: &Memory,
) -> Result<Box<dyn VirtioPci>, DeviceError> {
    let function = VirtioFunction::plain(device, placement.rid, memory.clone());
    Ok(Box::new(function.map_err(|error| DeviceError::Function { option: option.to_string(), error })?))
}

fn open_net(
    net: &NetPlan,
    plan: &DevicePlan,
    placement: Placement,
    host: &Host,
    opener: &mut Opener<'_>,
) -> Result<Opened, DeviceError> {
    let Host { memory, events, .. } = host;
    let (option, policy_watch) = (plan.option(), PolicyWatch::new(net.id(), events));
    let switch = opener.switch(net).map_err(|error| DeviceError::Backend { option: option.clone(), error })?;
    let mut function = |vf: Option<VfIndex>, of: &NicPlan| {
        let port = switch.as_ref().filter(|_| matches!(of.backend, BackendPlan::Port(_)));
        let port = port.and_then(|switch| switch.port(vf.map_or(0, |index| switch::port_of(index.0))));
        let nic = nic(of, port, function_option(plan, vf), opener)?;
        tell_backend(&nic, net.id(), vf, events);
        policy_watch.observe(&nic, vf);
        Ok(nic)
    };
    let pf = function(None, &net.pf)?;
    let vfs = (0..).map(VfIndex).zip(&net.vfs).map(|(index, vf)| function(Some(index), vf));
    let vfs = vfs.collect::<Result<Vec<_>, DeviceError>>()?;
    if let Some(error) = opener.take_without_vhost() {
        log::warn!("{option}: vhost=auto: this program moves the packets itself: {error}");
    }
    let nets = std::iter::once(&pf).chain(&vfs);
    let counters = NicCounters::of(nets.zip(net.functions().map(|function| &function.backend)));
    if vfs.is_empty() {
        return Ok((plain(pf, &option, placement, memory)?, Counters::Net(counters, switch)));
    }
    let device = NetSriov::new(pf, vfs, placement, memory).map_err(|error| DeviceError::Sriov { option, error })?;
    Ok((Box::new(device), Counters::Net(counters, switch)))
}

fn nic(plan: &NicPlan, port: Option<PortHandle>, option: String, opener: &mut Opener<'_>) -> Result<Net, DeviceError> {
    let backend = opener.open(plan, port, &option);
    let backend = backend.map_err(|error| DeviceError::Backend { option: option.clone(), error })?;
    Net::new(plan.spec.clone(), backend).map_err(|error| DeviceError::Net { option, error })
}

#[cfg(test)]
mod tests {
    use crate::config::{NetConfig, PlatformConfig, VmConfig, VmPlan};

    use super::*;

    #[test]
    fn devices_take_the_slots_that_nobody_chose() {
        let net = |pci_device_id| NetConfig { pci_device_id, ..NetConfig::default() };
        let mut config =
            VmConfig { net: vec![net(None), net(Some(1)), net(Some(3)), net(None)], ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        let slots = slots(&VmPlan::of(&config).unwrap().devices);
        // The last two are the virtio console and the entropy device.
        assert_eq!(slots, [2, 1, 3, 4, 5, 6].map(Some));
        let on = |pci_segment| NetConfig { pci_segment, ..net(None) };
        config.net.extend([on(1), on(2), on(1)]);
        config.platform = Some(PlatformConfig { num_pci_segments: 3, ..PlatformConfig::default() });
        let slots = super::slots(&VmPlan::of(&config).unwrap().devices);
        assert_eq!(slots, [2, 1, 3, 4, 1, 1, 2, 5, 6].map(Some));
    }
}
