//! Opens the devices of a plan, and plugs them into their slots.

mod announce;
pub(crate) mod backends;
pub(crate) mod connect;
pub(crate) mod counters;
pub(crate) mod disks;
mod drivers;
mod error;
pub(crate) mod fallback;
mod holds;
pub(crate) mod mem_regions;
mod memory_users;
mod missing;
pub(crate) mod opened_before;
pub(crate) mod passed_taps;
pub(crate) mod peers;
pub(crate) mod places;
pub(crate) mod pvpanic;
pub(crate) mod saved;
mod stateful;

use std::sync::Arc;
use std::time::Instant;

use pci::{Bdf, HostBridge, Placement, Rid, VfIndex};
use virtio_devices::{
    Balloon, BalloonSize, Behind, Cancel, CharDevice, Console, ConsoleWindow, Expiry, GuestMap, Hold, Iommu,
    IommuDevice, Mem, Memory, Net, NetSriov, NotResumed, Pmem, PmemCounters, PortHandle, ResizeError, Rng, Rtc, Switch,
    TapHandle, Thread, VirtioDevice, VirtioFunction, VirtioPci, Vsock, Watchdog,
};

use crate::acpi::viot::Viot;
use crate::config::{BackendPlan, DeviceKind, DevicePlan, MissingBackend, NetPlan, NicPlan, switch};
pub(crate) use crate::devices::announce::NetFunction;
use crate::devices::backends::{Opener, absent};
use crate::devices::counters::NicCounters;
use crate::devices::disks::Disk;
pub(crate) use crate::devices::disks::LimitGroups;
pub(crate) use crate::devices::error::DeviceError;
use crate::devices::mem_regions::MemRegions;
use crate::devices::memory_users::MemoryUsers;
use crate::devices::opened_before::OpenedBefore;
use crate::devices::passed_taps::{NicTaps, PassedTaps, TapOf};
use crate::devices::peers::{Peers, function_option};
use crate::devices::places::Place;
use crate::devices::pvpanic::Pvpanic;
use crate::kvm::Vm;
use crate::pci_host::bus::Bus;
use crate::pci_host::device_watch::{DeviceWatch, backend_observer, tell_backend};
use crate::pci_host::failure_watch::FailureWatch;
use crate::pci_host::policy_watch::PolicyWatch;
use crate::pci_host::slot::Slot;
use crate::pci_layout::Apertures;
use crate::telemetry::events::Events;
use crate::vfio::{Notice, VfioError, VfioHost, VfioSource};

/// The host bridge that guests of Cloud Hypervisor see.
const HOST_BRIDGE: HostBridge<Thread> = HostBridge::new(0x8086, 0x0d57);

/// The devices of a machine. They outlive the KVM VMs that a guest's reboots make of it.
pub struct Devices {
    bus: Arc<Bus>,
    host: Host,
    plugged: Vec<Plugged>,
}

/// Resources that the machine gives to devices.
pub(crate) struct Host {
    /// The guest's memory.
    pub memory: Memory,
    /// Apertures for BARs, of each segment.
    pub apertures: Vec<Apertures>,
    /// The other end of the virtio console, with its window if that is a terminal; `None` without a console.
    pub console: Option<(Arc<CharDevice>, Option<Arc<ConsoleWindow>>)>,
    /// The size of the balloon; 0 without a balloon.
    pub balloon: Arc<BalloonSize>,
    /// Resets the guest, for its watchdog.
    pub expiry: Arc<Expiry>,
    /// The memory of memory devices.
    pub mem_regions: MemRegions,
    /// Destination of events about the guest's changes to devices.
    pub events: Events,
    /// The rate limits that disks share.
    pub limit_groups: LimitGroups,
    /// True if another program holds the locks of writable disks until [`Holds::take`](virtio_devices::Holds::take).
    pub locks_later: bool,
    /// The virtual IOMMU, if there is one.
    pub iommu: Option<Arc<Iommu>>,
    /// The host devices.
    pub vfio: Arc<VfioHost>,
}

impl Host {
    /// The place of the function at `rid` behind the IOMMU.
    fn behind(&self, placement: Placement, rid: Rid) -> Option<Behind> {
        self.iommu.as_ref().map(|iommu| iommu.behind(placement.segment, rid))
    }
}

/// A device in its slot.
pub struct Plugged {
    plan: DevicePlan,
    placement: Placement,
    slot: Arc<Slot>,
    counters: Counters,
    /// True once the guest was asked to release the device.
    going: bool,
}

/// Counters of a device.
enum Counters {
    /// Of a NIC: its own function's, and those of its VFs by index; its switch, if it has one; and its taps.
    Net(Vec<NicCounters>, Option<Switch>, NicTaps),
    /// Of a disk.
    Disk(Disk),
    /// Of persistent memory, and the file that its guest writes.
    Pmem(Arc<PmemCounters>, Option<Hold>),
    /// Of a device of another kind: the kind, as in names of metrics, and a reader of its counters.
    Plain(&'static str, Box<dyn Fn() -> Vec<(&'static str, u64)> + Send>),
}

impl Counters {
    fn plain(kind: &'static str, read: impl Fn() -> Vec<(&'static str, u64)> + Send + 'static) -> Self {
        Self::Plain(kind, Box::new(read))
    }
}

/// Counts of a device until now.
pub struct Counted {
    /// The kind of device, as in names of metrics.
    pub kind: &'static str,
    /// The counters of each function by name, the device's own function first and then its VFs by index. Unknown
    /// counters are left out.
    pub functions: Vec<Vec<(&'static str, u64)>>,
    /// Latencies of requests to the device's own function, in microseconds.
    pub latencies: Vec<(&'static str, u64)>,
}

/// A device that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// Id of the device.
    pub id: String,
    /// Address of its own function.
    pub address: Bdf,
}

impl Plugged {
    /// The plan of the device.
    pub const fn plan(&self) -> &DevicePlan {
        &self.plan
    }

    /// Place of its functions.
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Counts until now.
    pub fn counted(&self) -> Counted {
        let mut latencies = Vec::new();
        let (kind, functions) = match &self.counters {
            Counters::Net(counters, ..) => ("net", NicCounters::counted(counters)),
            Counters::Disk(disk) => {
                latencies = disk.latencies();
                ("block", vec![disk.counters()])
            }
            Counters::Pmem(counters, _) => ("pmem", vec![counters.iter().collect()]),
            Counters::Plain(kind, read) => (*kind, vec![read()]),
        };
        Counted { kind, functions, latencies }
    }

    /// Changes the size of a disk in bytes, and notifies the guest. `None` if the device is not a disk.
    pub fn resize_disk(&self, bytes: u64, is_paused: bool) -> Option<Result<(), ResizeError>> {
        match &self.counters {
            Counters::Disk(disk) => Some(disk.resize(bytes, &self.slot, is_paused)),
            _ => None,
        }
    }

    /// Host storage that the device writes, if any.
    fn hold(&self) -> Option<Hold> {
        match &self.counters {
            Counters::Disk(disk) => Some(disk.hold()),
            Counters::Pmem(_, hold) => hold.clone(),
            _ => None,
        }
    }

    /// The switch that connects the functions of a PF, if it has one.
    pub const fn switch(&self) -> Option<&Switch> {
        match &self.counters {
            Counters::Net(_, switch, _) => switch.as_ref(),
            _ => None,
        }
    }

    /// The taps of a NIC.
    fn taps(&self) -> &[(TapOf, TapHandle)] {
        match &self.counters {
            Counters::Net(.., taps) => taps,
            _ => &[],
        }
    }

    /// The address of the device's own function.
    pub const fn address(&self) -> Bdf {
        self.placement.bdf(self.placement.rid)
    }

    /// The device's slot.
    pub const fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    /// True if the guest was asked to release it.
    pub const fn is_going(&self) -> bool {
        self.going
    }

    fn removed(self) -> Removed {
        Removed { address: self.address(), id: self.plan.id }
    }
}

impl Devices {
    /// The taps of all NICs, with their functions.
    pub(crate) fn taps(&self) -> impl Iterator<Item = &(TapOf, TapHandle)> {
        self.plugged.iter().flat_map(Plugged::taps)
    }

    /// Opens the devices of the plans, each in its place. Uses the taps in `passed` instead of opening them. `cancel`
    /// ends the wait for vhost-user backends.
    ///
    /// # Errors
    ///
    /// Fails if a device cannot be opened or made. All that was opened or created is then closed and removed.
    pub(crate) fn new(
        plans: &[DevicePlan],
        places: &[Place],
        host: Host,
        passed: &PassedTaps,
        cancel: Option<&Cancel>,
    ) -> Result<Self, DeviceError> {
        let segments = u16::try_from(host.apertures.len()).unwrap_or(u16::MAX);
        let mut devices = Self { bus: Arc::new(Bus::new(segments)), host, plugged: Vec::new() };
        // Only segment 0 has a host bridge, as in Cloud Hypervisor.
        let placement = devices.place(0, Place::Slot(Some(0)), 0, "host bridge")?;
        let slot = devices.slot(Box::new(HOST_BRIDGE), placement, "host bridge")?;
        devices.plug(placement, slot, "host bridge")?;
        let memory = devices.host.memory.clone();
        let mut opener = Opener::new(&memory, Peers::connect(plans, &memory, cancel)?).with_taps(passed);
        // In the order of the configuration, so that the buses of VFs do not depend on which slots are given.
        for (plan, place) in plans.iter().zip(places) {
            devices.open(plan, *place, &mut opener)?;
        }
        // Disks added to a running guest are locked at once.
        devices.host.locks_later = false;
        Ok(devices)
    }

    /// Bus that vCPUs access.
    pub const fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// The devices, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &Plugged> + Clone {
        self.plugged.iter()
    }

    /// The device called `id`.
    pub fn find(&self, id: &str) -> Option<&Plugged> {
        self.plugged.iter().find(|plugged| plugged.plan.id == id)
    }

    /// Wires the devices to `vm`, in their state of power-on and with addresses in their BARs. Firmware finds its boot
    /// devices enabled.
    ///
    /// # Errors
    ///
    /// Fails if the BARs need more addresses than there are.
    pub fn attach(&self, vm: Arc<Vm>, has_firmware: bool) -> Result<(), DeviceError> {
        if let Some(iommu) = &self.host.iommu {
            iommu.power_on();
        }
        self.host.vfio.known_files().attach(&vm);
        Ok(self.bus.attach(vm, &self.host.apertures, has_firmware)?)
    }

    /// Wires the devices to `vm` as their registers require.
    pub(crate) fn attach_as_is(&self, vm: Arc<Vm>) {
        self.bus.attach_as_is(vm);
    }

    /// Stops the queues of all devices where they are.
    pub fn pause(&self) {
        self.plugged.iter().for_each(|plugged| plugged.slot.pause());
    }

    /// As [`Self::pause`], until `deadline` at the latest.
    ///
    /// # Errors
    ///
    /// Fails if requests in flight have not ended by the deadline. All devices must be resumed then.
    pub fn pause_by(&self, deadline: Instant) -> Result<(), DeviceError> {
        let late = self.plugged.iter().filter(|plugged| !plugged.slot.pause_by(deadline));
        // Pauses all devices, even if one is late.
        let late: Vec<_> = late.map(|plugged| plugged.plan.option()).collect();
        late.into_iter().next().map_or(Ok(()), |option| Err(DeviceError::Late { option }))
    }

    /// Resumes the queues.
    ///
    /// # Errors
    ///
    /// Fails if the host has no thread or file for a device. All devices are paused then.
    pub fn resume(&self) -> Result<(), DeviceError> {
        let resumed = self.plugged.iter().try_for_each(|plugged| {
            plugged.slot.resume().map_err(|NotResumed { vf, error }| {
                let option = function_option(&plugged.plan, vf);
                DeviceError::NotResumed { option, error }
            })
        });
        resumed.inspect_err(|_| self.pause())
    }

    /// True if a host device may have pinned pages of the guest's memory.
    pub fn pin_memory(&self) -> bool {
        self.plugged.iter().any(|plugged| plugged.plan.pins_memory())
    }

    /// The backends that reach the guest's memory directly.
    pub(crate) fn memory_users(&self) -> MemoryUsers {
        MemoryUsers::of(self.plugged.iter().map(|Plugged { plan, slot, .. }| (plan, slot)))
    }

    /// Makes all backends that reach the guest's memory directly map `new` in place of `old`, before the guest can use
    /// it. Waits for the backends; no vCPU thread does.
    ///
    /// # Errors
    ///
    /// Fails if a backend cannot. All backends reach `old` then, or are lost until they do.
    pub fn set_memory(&self, old: &GuestMap, new: &GuestMap) -> Result<(), DeviceError> {
        self.host.vfio.set_memory(new).map_err(|error| self.of_host(error))?;
        let told = self.tell_users(old, new);
        if told.is_err()
            && let Err(error) = self.host.vfio.set_memory(old)
        {
            log::warn!("{}", self.of_host(error));
        }
        told
    }

    /// An error of all host devices, with the name of the first.
    fn of_host(&self, error: VfioError) -> DeviceError {
        let mut all = self.plugged.iter().filter(|plugged| matches!(plugged.plan.kind, DeviceKind::Vfio(_)));
        let option = all.next().map_or_else(|| "--device".to_string(), |plugged| plugged.plan.option());
        DeviceError::Vfio { option, error }
    }

    fn tell_users(&self, old: &GuestMap, new: &GuestMap) -> Result<(), DeviceError> {
        let users = self.memory_users().find();
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

    /// Functions behind the virtual IOMMU, if there is one.
    pub(crate) fn viot(&self) -> Option<Viot> {
        let (iommu, spec) = self.plugged.iter().find_map(|plugged| Some((plugged, plugged.plan.iommu_spec()?)))?;
        let behind = self.plugged.iter().filter(|plugged| plugged.plan.iommu);
        let devices = behind.map(Plugged::address).collect();
        Some(Viot { iommu: iommu.address(), devices, segments: spec.segments.clone() })
    }

    /// Notices of the host about its devices since the last call.
    pub(crate) fn notices(&self) -> Vec<(String, Notice)> {
        self.host.vfio.watch().map_or_else(Vec::new, |watch| watch.take())
    }

    /// The host devices.
    pub(crate) const fn vfio(&self) -> &Arc<VfioHost> {
        &self.host.vfio
    }

    /// Apertures for BARs, of each segment.
    pub fn apertures(&self) -> &[Apertures] {
        &self.host.apertures
    }

    /// Sets the apertures for BARs of each segment, from the next [`Self::attach`] on.
    pub fn set_apertures(&mut self, apertures: Vec<Apertures>) {
        self.host.apertures = apertures;
    }

    /// Adds the device of `plan` to those of a running guest, and returns the address of its own function. The guest
    /// places its BARs. `opened` has what was opened for it before.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::new`] does; everything of the device is closed then.
    pub(crate) fn add(&mut self, plan: &DevicePlan, opened: OpenedBefore) -> Result<Bdf, DeviceError> {
        let memory = self.host.memory.clone();
        let (peers, host_device) = match opened {
            OpenedBefore::Nothing => (Peers::connect(std::slice::from_ref(plan), &memory, None)?, None),
            OpenedBefore::Peers(peers) => (peers?, None),
            OpenedBefore::HostDevice(device, _) => (Peers::default(), Some(*device)),
        };
        let mut opener = Opener::new(&memory, peers).with_host_device(host_device);
        let placement = self.open(plan, Place::Slot(plan.pci_device_id), &mut opener)?;
        Ok(placement.bdf(placement.rid))
    }

    /// Records that the guest was asked to release the device called `id`, and returns its address.
    pub fn unplug(&mut self, id: &str) -> Option<Bdf> {
        let plugged = self.plugged.iter_mut().find(|plugged| plugged.plan.id == id)?;
        plugged.going = true;
        Some(plugged.address())
    }

    /// Removes the device in this slot of this segment, which the guest has released.
    pub fn remove(&mut self, segment: u16, slot: u8) -> Option<Removed> {
        let is_there = |address: Bdf| (address.segment, address.rid.device()) == (segment, slot);
        let n = self.plugged.iter().position(|plugged| is_there(plugged.address()))?;
        let plugged = self.plugged.remove(n);
        self.bus.unplug(plugged.address());
        Some(plugged.removed())
    }

    /// Removes all devices that the guest was asked to release.
    pub fn remove_unplugged(&mut self) -> Vec<Removed> {
        let going = |plugged: &Plugged| plugged.going.then(|| plugged.address());
        let going: Vec<_> = self.plugged.iter().filter_map(going).collect();
        going.into_iter().filter_map(|address| self.remove(address.segment, address.rid.device())).collect()
    }

    fn open(&mut self, plan: &DevicePlan, place: Place, opener: &mut Opener<'_>) -> Result<Placement, DeviceError> {
        let option = plan.option();
        let placement = self.place(plan.pci_segment, place, plan.total_vfs(), &option)?;
        let (device, counters) = open(plan, placement, &self.host, opener)?;
        let slot = self.slot(device, placement, &option)?;
        self.plug(placement, Arc::clone(&slot), &option)?;
        DeviceWatch::begin(&plan.id, &slot, &self.host.events);
        self.plugged.push(Plugged { plan: plan.clone(), placement, slot, counters, going: false });
        Ok(placement)
    }

    fn place(&self, segment: u16, place: Place, total_vfs: u16, option: &str) -> Result<Placement, DeviceError> {
        let placement = match place {
            Place::Slot(slot) => self.bus.place(segment, slot, total_vfs),
            Place::At { slot, first_vf_bus } => self.bus.place_at(segment, slot, first_vf_bus, total_vfs),
        };
        placement.map_err(|error| DeviceError::Place { option: option.to_string(), error })
    }

    fn slot(&self, device: Box<dyn VirtioPci>, placement: Placement, option: &str) -> Result<Arc<Slot>, DeviceError> {
        Slot::new(device, placement, Arc::clone(self.bus.host()))
            .map_err(|error| DeviceError::Pages { option: option.to_string(), error })
    }

    fn plug(&self, placement: Placement, slot: Arc<Slot>, option: &str) -> Result<(), DeviceError> {
        self.bus.plug(placement, slot).map_err(|error| DeviceError::Place { option: option.to_string(), error })
    }
}

/// A device and its counters.
type Opened = (Box<dyn VirtioPci>, Counters);

/// Opens the device that `plan` describes.
fn open(plan: &DevicePlan, placement: Placement, host: &Host, opener: &mut Opener<'_>) -> Result<Opened, DeviceError> {
    let option = plan.option();
    match &plan.kind {
        DeviceKind::Console => {
            let (end, window) = host.console.clone().ok_or(DeviceError::NoConsole)?;
            let console = Console::new(&plan.id, end, window);
            let counters = console.counters();
            let counters = Counters::plain("console", move || counters.iter().collect());
            Ok((plain(console, plan, placement, host)?, counters))
        }
        DeviceKind::Net(net) => open_net(net, plan, placement, host, opener),
        DeviceKind::Disk(spec) => {
            let opened = Disk::open(spec, &host.limit_groups, host.locks_later);
            let (block, disk) = opened.map_err(|error| DeviceError::Disk { option: option.clone(), error })?;
            FailureWatch::of_disk(&block, &plan.id, &host.events);
            Ok((plain(block, plan, placement, host)?, Counters::Disk(disk)))
        }
        DeviceKind::Rng(spec) => {
            let rng = Rng::open(spec.clone()).map_err(|error| DeviceError::Rng { option: option.clone(), error })?;
            let counters = rng.counters();
            let counters = Counters::plain("rng", move || counters.iter().collect());
            Ok((plain(rng, plan, placement, host)?, counters))
        }
        DeviceKind::Balloon(spec) => {
            let balloon = Balloon::new(spec.clone(), Arc::clone(&host.balloon));
            let counters = balloon.counters();
            let counters = Counters::plain("balloon", move || counters.iter().collect());
            Ok((plain(balloon, plan, placement, host)?, counters))
        }
        DeviceKind::Rtc(spec) => {
            let rtc = Rtc::new(spec.clone());
            let counters = rtc.counters();
            let counters = Counters::plain("rtc", move || counters.iter().collect());
            Ok((plain(rtc, plan, placement, host)?, counters))
        }
        DeviceKind::Vsock(spec) => {
            let vsock =
                Vsock::open(spec.clone()).map_err(|error| DeviceError::Vsock { option: option.clone(), error })?;
            let counters = vsock.counters();
            let counters = Counters::plain("vsock", move || counters.iter().collect());
            Ok((plain(vsock, plan, placement, host)?, counters))
        }
        DeviceKind::Mem { spec, part } => {
            let region = host.mem_regions.of(*part).ok_or_else(|| DeviceError::NoRegion { option: option.clone() })?;
            let mem = Mem::new(spec.clone(), Arc::clone(region));
            let counters = mem.counters();
            let counters = Counters::plain("mem", move || counters.iter().collect());
            Ok((plain(mem, plan, placement, host)?, counters))
        }
        DeviceKind::VhostUser(spec) => {
            let device = opener.device(spec);
            let device = device.map_err(|error| DeviceError::Backend { option: option.clone(), error })?;
            let observer = backend_observer(&plan.id, None, device.backend_name(), &host.events);
            device.observe_backend(observer);
            // The device's requests do not pass through this process.
            Ok((plain(device, plan, placement, host)?, Counters::plain("vhost_user", Vec::new)))
        }
        DeviceKind::Pmem(spec) => {
            let pmem = Pmem::open(spec.clone()).map_err(|error| DeviceError::Pmem { option: option.clone(), error })?;
            let counters = Counters::Pmem(pmem.counters(), pmem.hold());
            Ok((plain(pmem, plan, placement, host)?, counters))
        }
        DeviceKind::Vfio(spec) => {
            let behind = host.behind(placement, placement.rid).filter(|_| plan.iommu);
            let device = opener.host_device().unwrap_or_else(|| host.vfio.open(spec, &host.memory));
            let device = device.and_then(|device| device.into_function(placement.rid, behind)).map_err(|error| {
                // A descriptor's number means nothing to a client that sent it.
                let option = match &spec.source {
                    VfioSource::Path(path) => format!("{option},path={}", path.display()),
                    VfioSource::Fd(_) => option,
                };
                DeviceError::Vfio { option, error }
            })?;
            let counters = Counters::plain("vfio", device.counters());
            Ok((Box::new(device), counters))
        }
        DeviceKind::Watchdog => {
            let watchdog = Watchdog::new(&plan.id, Arc::clone(&host.expiry));
            let counters = watchdog.counters();
            let counters = Counters::plain("watchdog", move || counters.iter().collect());
            Ok((plain(watchdog, plan, placement, host)?, counters))
        }
        DeviceKind::Iommu(_) => {
            let iommu = host.iommu.clone().ok_or(DeviceError::NoIommu)?;
            let (counters, device) = (iommu.counters(), IommuDevice::new(&plan.id, iommu));
            let counters = Counters::plain("iommu", move || counters.iter().collect());
            Ok((plain(device, plan, placement, host)?, counters))
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
    plan: &DevicePlan,
    placement: Placement,
    host: &Host,
) -> Result<Box<dyn VirtioPci>, DeviceError> {
    let function = VirtioFunction::plain(device, placement.rid, host.memory.clone());
    let function = function.map_err(|error| DeviceError::Function { option: plan.option(), error })?;
    let behind = if plan.iommu { host.behind(placement, placement.rid) } else { None };
    Ok(Box::new(match behind {
        Some(behind) => function.behind(behind),
        None => function,
    }))
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
    let failure_watch = FailureWatch::of_nic(net.id(), events);
    let switch = opener.switch(net).map_err(|error| DeviceError::Backend { option: option.clone(), error })?;
    switch.iter().for_each(|switch| failure_watch.observe_uplink(switch));
    let mut function = |vf: Option<VfIndex>, of: &NicPlan| {
        let port = switch.as_ref().filter(|_| matches!(of.backend, BackendPlan::Port(_)));
        let port = port.and_then(|switch| switch.port(vf.map_or(0, |index| switch::port_of(index.0))));
        let tap_of = TapOf { id: net.id().to_string(), vf: vf.map(|vf| vf.0), uplink: false };
        let behind_iommu = host.iommu.is_some() && (vf.is_some() || plan.iommu);
        let nic = nic(of, (port, behind_iommu), (function_option(plan, vf), tap_of), opener)?;
        tell_backend(&nic, net.id(), vf, events);
        missing::tell_missing(&nic, net.id(), vf, events);
        policy_watch.observe(&nic, vf);
        failure_watch.observe(&nic, vf);
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
    let counters = Counters::Net(counters, switch, opener.take_taps());
    if vfs.is_empty() {
        return Ok((plain(pf, plan, placement, host)?, counters));
    }
    let mut device = NetSriov::new(pf, vfs, placement, memory).map_err(|error| DeviceError::Sriov { option, error })?;
    device.set_behind(|rid| {
        let behind = rid != placement.rid || plan.iommu;
        if behind { host.behind(placement, rid) } else { None }
    });
    Ok((Box::new(device), counters))
}

fn nic(
    plan: &NicPlan,
    port: (Option<PortHandle>, bool),
    (option, tap_of): (String, TapOf),
    opener: &mut Opener<'_>,
) -> Result<Net, DeviceError> {
    let backend = opener.open(plan, port, &option, tap_of);
    let backend = backend.map_err(|error| DeviceError::Backend { option: option.clone(), error })?;
    match Net::new(plan.spec.clone(), backend) {
        Err(error) if plan.missing == MissingBackend::LinkDown => {
            log::warn!("{option}: {error}; its link is down until it is given a backend (vm.set-vf)");
            Net::new(plan.spec.clone(), absent(plan, &error.to_string()))
        }
        net => net,
    }
    .map_err(|error| DeviceError::Net { option, error })
}
