//! Opens the devices of a plan, and plugs them into their slots.

mod announce;
pub(crate) mod backends;
pub(crate) mod connect;
pub(crate) mod counters;
pub(crate) mod disks;
mod drivers;
mod error;
pub(crate) mod fallback;
mod handle;
mod host;
pub(crate) mod kind;
pub(crate) mod mem_regions;
mod memory_users;
mod missing;
pub(crate) mod opened_before;
pub(crate) mod passed_taps;
pub(crate) mod places;
pub(crate) mod pvpanic;
pub(crate) mod saved;
mod stateful;
mod storage_locks;
pub(crate) mod vhost_user_backends;

use std::sync::Arc;
use std::time::Instant;

use pci::{Bdf, HostBridge, Placement, VfIndex};
use virtio_devices::{
    Cancel, GuestMap, NotResumed, ResizeError, SocketHandle, StorageLock, Switch, TapHandle, Thread, VirtioPci,
};

use crate::acpi::viot::Viot;
use crate::config::{DeviceKind, DevicePlan};
pub(crate) use crate::devices::announce::NetFunction;
use crate::devices::backends::BackendOpener;
use crate::devices::disks::Disk;
pub(crate) use crate::devices::disks::LimitGroups;
pub(crate) use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
pub(crate) use crate::devices::host::HostResources;
use crate::devices::kind::site::Site;
use crate::devices::memory_users::MemoryUsers;
use crate::devices::opened_before::OpenedBefore;
use crate::devices::passed_taps::{PassedTaps, TapOf};
use crate::devices::places::Place;
use crate::devices::vhost_user_backends::{VhostUserBackends, function_option};
use crate::kvm::Vm;
use crate::pci_host::bus::Bus;
use crate::pci_host::device_watch::DeviceWatch;
use crate::pci_host::slot::Slot;
use crate::pci_layout::{Apertures, RootBus};
use crate::vfio::{Notice, VfioError, VfioHost};

/// The host bridge that guests of Cloud Hypervisor see.
const HOST_BRIDGE: HostBridge<Thread> = HostBridge::new(0x8086, 0x0d57);

/// The devices of a machine. They outlive the KVM VMs that a guest's reboots make of it.
pub struct Devices {
    bus: Arc<Bus>,
    host: HostResources,
    plugged: Vec<Plugged>,
}

/// A device in its slot.
pub struct Plugged {
    plan: DevicePlan,
    placement: Placement,
    slot: Arc<Slot>,
    handle: Handle,
    /// True once the guest was asked to release the device.
    going: bool,
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
        let (kind, functions) = self.handle.counts();
        Counted { kind, functions, latencies: self.handle.disk().map_or_else(Vec::new, Disk::latencies) }
    }

    /// Counts of VF `index` of a virtio NIC until now, by name; none of another device.
    pub fn counted_vf(&self, index: u16) -> Vec<(&'static str, u64)> {
        self.handle.counts_of_vf(index)
    }

    /// Changes the size of a disk in bytes, and notifies the guest. `None` if the device is not a disk.
    pub fn resize_disk(&self, bytes: u64, is_paused: bool) -> Option<Result<(), ResizeError>> {
        Some(self.handle.disk()?.resize(bytes, &self.slot, is_paused))
    }

    /// Host storage that the device writes, if any.
    fn storage_lock(&self) -> Option<StorageLock> {
        self.handle.storage_lock()
    }

    /// The switch that connects the functions of a PF, if it has one.
    pub const fn switch(&self) -> Option<&Switch> {
        match &self.handle {
            Handle::Net(net) => net.switch.as_ref(),
            _ => None,
        }
    }

    /// The taps of a NIC.
    fn taps(&self) -> &[(TapOf, TapHandle)] {
        match &self.handle {
            Handle::Net(net) => &net.taps,
            _ => &[],
        }
    }

    /// True if this program made the tap of a NIC's VF, or that of its own function, which did not exist.
    pub fn tap_was_made(&self, vf: Option<VfIndex>) -> bool {
        let is_of = |of: &TapOf| !of.uplink && of.vf == vf.map(|vf| vf.0);
        self.taps().iter().any(|(of, tap)| is_of(of) && tap.was_made())
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

    /// The listening sockets of devices.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = SocketHandle> {
        self.plugged.iter().filter_map(|plugged| plugged.handle.socket())
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
        mut host: HostResources,
        passed: &PassedTaps,
        cancel: Option<&Cancel>,
    ) -> Result<Self, DeviceError> {
        let segments = u16::try_from(host.apertures.len()).unwrap_or(u16::MAX);
        let mut devices =
            Self { bus: Arc::new(Bus::new(segments, std::mem::take(&mut host.roots))), host, plugged: Vec::new() };
        // Only segment 0 has a host bridge, as in Cloud Hypervisor.
        let placement = devices.place((0, 0), Place::Slot(Some(0)), 0, "host bridge")?;
        let slot = devices.slot(Box::new(HOST_BRIDGE), placement, "host bridge")?;
        devices.plug(placement, slot, "host bridge")?;
        let memory = devices.host.memory.clone();
        let mut opener =
            BackendOpener::new(&memory, VhostUserBackends::connect(plans, &memory, cancel)?).with_taps(passed);
        // In the order of the configuration, so that the buses of VFs do not depend on which slots are given.
        for (plan, place) in plans.iter().zip(places) {
            devices.open(plan, *place, &mut opener)?;
        }
        // Disks added to a running guest are locked at once.
        devices.host.locks_later = false;
        devices.host.sockets = Arc::default();
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
        let roots = self.roots().iter().map(|root| root.bus).collect();
        Some(Viot { iommu: iommu.address(), devices, segments: spec.segments.clone(), roots })
    }

    /// Notices of the host about its devices since the last call.
    pub(crate) fn notices(&self) -> Vec<(String, Notice)> {
        self.host.vfio.watch().map_or_else(Vec::new, |watch| watch.take())
    }

    /// The host devices.
    pub(crate) const fn vfio(&self) -> &Arc<VfioHost> {
        &self.host.vfio
    }

    /// Further root buses of segment 0.
    pub fn roots(&self) -> &[RootBus] {
        self.bus.roots()
    }

    /// The numbers of [`Self::roots`] if no device is on one; none otherwise.
    pub(crate) fn empty_root_buses(&self) -> Vec<u8> {
        let is_used = self.plugged.iter().any(|plugged| plugged.plan.root().is_some());
        if is_used { Vec::new() } else { self.roots().iter().map(|root| root.bus).collect() }
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
            OpenedBefore::Nothing => (VhostUserBackends::connect(std::slice::from_ref(plan), &memory, None)?, None),
            OpenedBefore::VhostUserBackends(peers) => (peers?, None),
            OpenedBefore::HostDevice(device, _) => (VhostUserBackends::default(), Some(*device)),
        };
        let mut opener = BackendOpener::new(&memory, peers).with_host_device(host_device);
        let placement = self.open(plan, Place::Slot(plan.pci_device_id), &mut opener)?;
        Ok(placement.bdf(placement.rid))
    }

    /// Records that the guest was asked to release the device called `id`, and returns its address.
    pub fn unplug(&mut self, id: &str) -> Option<Bdf> {
        let plugged = self.plugged.iter_mut().find(|plugged| plugged.plan.id == id)?;
        plugged.going = true;
        Some(plugged.address())
    }

    /// Removes the device at this address, which the guest has released.
    pub fn remove(&mut self, address: Bdf) -> Option<Removed> {
        let n = self.plugged.iter().position(|plugged| plugged.address() == address)?;
        let plugged = self.plugged.remove(n);
        self.bus.unplug(plugged.address());
        Some(plugged.removed())
    }

    /// Removes all devices that the guest was asked to release.
    pub fn remove_unplugged(&mut self) -> Vec<Removed> {
        let going = |plugged: &Plugged| plugged.going.then(|| plugged.address());
        let going: Vec<_> = self.plugged.iter().filter_map(going).collect();
        going.into_iter().filter_map(|address| self.remove(address)).collect()
    }

    fn open(
        &mut self,
        plan: &DevicePlan,
        place: Place,
        opener: &mut BackendOpener<'_>,
    ) -> Result<Placement, DeviceError> {
        let option = plan.option();
        if let Some(root) = plan.root()
            && !self.roots().contains(&root)
        {
            return Err(DeviceError::NoRootBus { option, node: root.node });
        }
        let placement = self.place((plan.pci_segment, plan.root_bus()), place, plan.total_vfs(), &option)?;
        let (device, handle) = kind::open(&Site { plan, placement, host: &self.host }, opener)?;
        let slot = self.slot(device, placement, &option)?;
        self.plug(placement, Arc::clone(&slot), &option)?;
        DeviceWatch::begin(&plan.id, &slot, &self.host.events);
        self.plugged.push(Plugged { plan: plan.clone(), placement, slot, handle, going: false });
        Ok(placement)
    }

    fn place(&self, root: (u16, u8), place: Place, total_vfs: u16, option: &str) -> Result<Placement, DeviceError> {
        let placement = match place {
            Place::Slot(slot) => self.bus.place(root, slot, total_vfs),
            Place::At { slot, first_vf_bus } => self.bus.place_at(root, slot, first_vf_bus, total_vfs),
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
