//! The VM as clients know it: a configuration, and a [`Vm`] while it is booted.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use pci::{Bdf, VfIndex};
use virtio_devices::{BackendKind, MacError, Status};
use vm_api::config::error::shortened;
use vm_api::config::id::LONGEST;

use crate::api::info::VmState;
use crate::api::{Failure, Link, Resize, ResizeDisk, ResizeZone, SetVf};
use crate::config::{
    DiskConfig, FsConfig, GenericVhostUserConfig, MacAddress, MemoryConfig, NetConfig, PlannedVm, PmemConfig,
    VdpaConfig, VmConfig, VsockConfig, bytes,
};
use crate::control::resize;
use crate::devices::Removed;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::telemetry::events::{Events, Source};
use crate::vcpu::cpu::Stop;
use crate::vm::{Vm, VmError};

/// A VM from `vm.create` to `vm.delete`, booted or not.
pub(crate) struct Instance {
    /// As it was given, with all that was left out filled in.
    planned: PlannedVm,
    /// How many vCPUs it has or should have, which is what it has at its next start. The configuration keeps those that
    /// it was given, which the queues of its devices were planned for.
    vcpus: u32,
    /// Tap file descriptors passed by clients, by the id of their NIC.
    fds: HashMap<String, Vec<OwnedFd>>,
    vm: Option<Vm>,
    /// Whether it was ever booted.
    has_run: bool,
    events: Events,
}

/// A device that was added to a booted VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Added {
    /// Its id.
    pub id: String,
    /// The address of its own function.
    pub address: Bdf,
}

/// What became of the guest.
pub(crate) enum Turn {
    /// It keeps running.
    On,
    /// It reboots.
    Again,
    /// It powered off.
    Off,
}

impl Instance {
    /// A virtual machine that does not run, and reports its events to `events`. Its payload is looked at when it is
    /// booted.
    pub(crate) fn new(planned: PlannedVm, events: Events) -> Self {
        let vcpus = planned.config().cpus.boot_vcpus;
        Self { planned, vcpus, fds: HashMap::new(), vm: None, has_run: false, events }
    }

    /// The configuration as given, with defaults filled in.
    pub(crate) const fn config(&self) -> &VmConfig {
        self.planned.config()
    }

    /// The number of vCPUs it has or was resized to.
    pub(crate) const fn vcpus(&self) -> u32 {
        self.vcpus
    }

    /// Its state, as `vm.info` reports it.
    pub(crate) fn state(&self) -> VmState {
        match &self.vm {
            Some(vm) if vm.is_paused() => VmState::Paused,
            Some(_) => VmState::Running,
            None if self.has_run => VmState::Shutdown,
            None => VmState::Created,
        }
    }

    /// Acquires everything the VM needs from the host. [`Self::start`] then runs the guest.
    ///
    /// # Errors
    ///
    /// Something is missing. Nothing has changed then.
    pub(crate) fn open(&mut self) -> Result<(), Error> {
        self.config().payload.check_present()?;
        self.events.vm("booting");
        let mut config = self.config().clone();
        config.cpus.boot_vcpus = self.vcpus;
        let vm = Vm::new(&config, self.planned.plan(), self.events.clone())?;
        for plugged in vm.devices().iter() {
            self.planned.set_slot(&plugged.plan().id, plugged.placement().rid.device());
        }
        self.vm = Some(vm);
        Ok(())
    }

    /// Runs the guest, after [`Self::open`]. Signals must no longer end the process: the terminal has to be restored.
    ///
    /// # Errors
    ///
    /// The guest cannot run. The VM is shut down then.
    pub(crate) fn start(&mut self) -> Result<(), Error> {
        let Some(vm) = &mut self.vm else { return Ok(()) };
        let started = vm.take_terminal().and_then(|()| vm.power_on()).map_err(Error::from);
        match started {
            Ok(()) => {
                self.has_run = true;
                self.events.vm("booted");
            }
            Err(_) => self.vm = None,
        }
        started
    }

    /// Shuts the VM down immediately.
    pub(crate) fn shutdown(&mut self) {
        if let Some(mut vm) = self.vm.take() {
            let removed = vm.remove_unplugged();
            self.forget(&removed);
            drop(vm);
            self.events.vm("shutdown");
        }
    }

    /// Reboots the guest.
    ///
    /// # Errors
    ///
    /// The guest cannot run. The VM is shut down then.
    pub(crate) fn reset(&mut self) -> Result<(), Error> {
        self.reset_by(Vm::reset)
    }

    fn reset_by(&mut self, reset: impl FnOnce(&mut Vm) -> Result<(), VmError>) -> Result<(), Error> {
        let Some(vm) = &mut self.vm else { return Ok(()) };
        self.events.vm("rebooting");
        let removed = vm.remove_unplugged();
        let started = reset(vm).map_err(Error::from);
        self.forget(&removed);
        match started {
            Ok(()) => self.events.vm("rebooted"),
            Err(_) => self.shutdown(),
        }
        started
    }

    /// The booted VM, running or paused.
    pub(crate) const fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    /// The booted VM, running or paused.
    pub(crate) const fn vm_mut(&mut self) -> Option<&mut Vm> {
        self.vm.as_mut()
    }

    /// Handles what the guest did, after [`Vm::event`] became readable.
    ///
    /// # Errors
    ///
    /// The guest cannot continue. The VM is shut down then.
    pub(crate) fn turn(&mut self) -> Result<Turn, Error> {
        let Some(vm) = &mut self.vm else { return Ok(Turn::On) };
        match vm.take_stop() {
            Some(Stop::PowerOff) => {
                self.shutdown();
                Ok(Turn::Off)
            }
            Some(Stop::Reset) => self.reset().map(|()| Turn::Again),
            Some(Stop::TripleFault) => self.reset_by(Vm::reset_after_triple_fault).map(|()| Turn::Again),
            Some(Stop::Failed(error)) => {
                self.shutdown();
                Err(VmError::from(error).into())
            }
            None => {
                let removed = vm.take_ejected();
                self.forget(&removed);
                Ok(Turn::On)
            }
        }
    }

    /// Adds a NIC, hot-plugging it if the VM is booted. `fds` are its tap's queues, if clients passed any.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_net(&mut self, mut net: NetConfig, fds: Vec<OwnedFd>) -> Result<Option<Added>, Error> {
        net.fds = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let (id, added) = self.add(|config| config.net.push(net))?;
        if !fds.is_empty() {
            self.fds.insert(id, fds);
        }
        Ok(added)
    }

    /// Adds a vDPA device, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_vdpa(&mut self, vdpa: VdpaConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.vdpa.push(vdpa))?.1)
    }

    /// Adds a disk, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_disk(&mut self, disk: DiskConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.disks.push(disk))?.1)
    }

    /// Adds the socket device, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// It cannot be added, or there is one. Nothing has changed then.
    pub(crate) fn add_vsock(&mut self, vsock: VsockConfig) -> Result<Option<Added>, Error> {
        if let Some(other) = &self.config().vsock {
            return Err(crate::config::vsock::second(other.id.as_deref().unwrap_or_default()).into());
        }
        Ok(self.add(|config| config.vsock = Some(vsock))?.1)
    }

    /// Adds a shared file system, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_fs(&mut self, fs: FsConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.fs.push(fs))?.1)
    }

    /// Adds a vhost-user device, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_generic_vhost_user(&mut self, device: GenericVhostUserConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.generic_vhost_user.push(device))?.1)
    }

    /// Adds persistent memory, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_pmem(&mut self, pmem: PmemConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.pmem.push(pmem))?.1)
    }

    /// Adds the device that `change` adds to the configuration. Returns its id, and its address if the VM is booted.
    fn add(&mut self, change: impl FnOnce(&mut VmConfig)) -> Result<(String, Option<Added>), Error> {
        let mut config = self.config().clone();
        change(&mut config);
        let mut planned = PlannedVm::new(config)?;
        planned.keep_slots(self.planned.plan());
        let (mut id, mut added) = (String::new(), None);
        if let Some(device) = planned.added_to(self.planned.plan()).cloned() {
            id.clone_from(&device.id);
            if let Some(vm) = &mut self.vm {
                let address = vm.add(&device)?;
                planned.set_slot(&id, address.rid.device());
                self.events.tell(Source::Vm, "device-added", &[("id", &id), ("bdf", &address.to_string())]);
                added = Some(Added { id: id.clone(), address });
            }
        }
        self.planned = planned;
        Ok((id, added))
    }

    /// Asks the guest to release a device; if the VM is not booted, removes the device from the configuration.
    ///
    /// # Errors
    ///
    /// There is no such device.
    pub(crate) fn remove_device(&mut self, id: &str) -> Result<(), Failure> {
        let devices = &self.planned.plan().devices;
        let device = devices.iter().find(|device| device.id == id).ok_or_else(|| no_device(id))?;
        if !device.is_removable() {
            let line = format!("{id} stays as long as its VM and cannot be removed");
            return Err(Failure::new(ErrorKind::Invalid, line));
        }
        match &mut self.vm {
            Some(vm) => vm.unplug(id),
            None => self.forget_device(id),
        }
        Ok(())
    }

    /// Changes the amount of memory, then the number of vCPUs, and then how much memory the guest is asked to return.
    /// What is added is there at once, but for memory devices, whose drivers take their time in both directions; vCPUs
    /// go when the guest has released them, and memory that ACPI added at the next start.
    ///
    /// # Errors
    ///
    /// The VM cannot have so much, the guest has not answered an earlier change, or the host failed. Nothing has
    /// changed then, except that memory stays changed when only the number of vCPUs cannot be.
    pub(crate) fn resize(&mut self, resize: &Resize) -> Result<(), Failure> {
        let (vcpus, balloon) = (resize::vcpus(resize, self.config())?, resize::balloon(resize, self.config())?);
        if let Some(ram) = resize.desired_ram {
            self.resize_memory(ram)?;
        }
        if let Some(vcpus) = vcpus {
            if let Some(vm) = &mut self.vm {
                vm.resize(vcpus).map_err(|error| {
                    Failure::from(Error::from(error)).in_context(format!("the VM cannot be resized to {vcpus} vCPUs"))
                })?;
            }
            self.vcpus = vcpus.into();
            self.planned.count_vcpus(self.vcpus);
        }
        if let Some(bytes) = balloon {
            self.planned.set_balloon_size(bytes);
            self.vm.iter().for_each(|vm| vm.balloon().resize(bytes));
        }
        Ok(())
    }

    fn resize_memory(&mut self, size: u64) -> Result<(), Failure> {
        let next = resize::memory(size, &self.config().memory)?;
        self.set_memory(next, &format!("desired_ram={size}"))
    }

    /// Changes the size of a memory zone. The driver of its memory device is asked for it.
    ///
    /// # Errors
    ///
    /// There is no such zone, or it cannot have that size. Nothing has changed then.
    pub(crate) fn resize_zone(&mut self, resize: &ResizeZone) -> Result<(), Failure> {
        let next = resize::zone(resize, self.config())?;
        self.set_memory(next, &format!("id={},desired_ram={}", resize.id, resize.desired_ram))
    }

    /// Gives the VM the memory `next`, as `request` asks.
    fn set_memory(&mut self, next: MemoryConfig, request: &str) -> Result<(), Failure> {
        let mut planned = self.planned.clone();
        planned
            .set_memory(next.clone())
            .map_err(|error| Failure::new((&error.problem).into(), format!("{request}: {}", error.problem)))?;
        if let Some(vm) = &mut self.vm {
            let size = next.wanted();
            vm.resize_memory(next).map_err(|error| {
                Failure::from(Error::from(error))
                    .in_context(format!("the VM cannot be resized to {} of memory", bytes(size)))
            })?;
        }
        self.planned = planned;
        Ok(())
    }

    /// Changes the size of a disk. The guest is notified.
    ///
    /// # Errors
    ///
    /// There is no such disk, or it cannot have that size. Nothing has changed then.
    pub(crate) fn resize_disk(&mut self, resize: &ResizeDisk) -> Result<(), Failure> {
        let ResizeDisk { id, desired_size } = resize;
        let fail = |kind, what: String| Failure::new(kind, format!("id={id},desired_size={desired_size}: {what}"));
        if !self.planned.plan().devices.iter().any(|device| device.id == *id) {
            return Err(no_device(id));
        }
        let vm = self.vm.as_ref().ok_or_else(|| {
            let what = "the VM is not booted; change the size of the image itself (truncate)";
            fail(ErrorKind::Conflict, what.to_string())
        })?;
        let plugged = vm.devices().find(id).ok_or_else(|| no_device(id))?;
        let resized = plugged
            .resize_disk(*desired_size, vm.is_paused())
            .ok_or_else(|| fail(ErrorKind::Invalid, format!("{id} is not a disk; vm.info lists the disks")))?;
        resized.map_err(|error| fail(error.kind().into(), error.to_string()))
    }

    /// Changes a VF's link or MAC address; the configuration follows.
    ///
    /// # Errors
    ///
    /// There is no such VF, another function has the address, or a driver already uses the VF. Nothing has changed
    /// then.
    pub(crate) fn set_vf(&mut self, change: &SetVf) -> Result<(), Failure> {
        let SetVf { pf, index, link, mac } = change;
        let vm = self.vm.as_ref().ok_or_else(|| {
            Failure::new(ErrorKind::Conflict, "the VM is not booted; give the VF's settings in vm.create or vm.add-net")
        })?;
        let plugged = vm.devices().find(pf).ok_or_else(|| no_device(pf))?;
        let reserved = plugged.plan().total_vfs();
        let no_vf = || {
            let line = match reserved.checked_sub(1) {
                Some(last) => format!("pf={pf},index={index}: {pf} reserves {reserved} VFs; index must be 0 to {last}"),
                None => format!("pf={pf},index={index}: {pf} reserves no VFs; name a NIC with sriov_vfs"),
            };
            Failure::new(ErrorKind::NotFound, line)
        };
        if *index >= reserved {
            return Err(no_vf());
        }
        let planned = mac.map(|mac| self.planned_with_vf_mac(pf, *index, mac)).transpose()?;
        let set = plugged.slot().with(|device| {
            let vf = Some(VfIndex(*index));
            let driven = device.function_status(vf).is_some_and(|status| status.driver.contains(Status::DRIVER));
            let port = device.port(vf).ok_or_else(no_vf)?;
            if let Some(mac) = mac {
                // The vDPA device knows its address, and filters by it.
                if port.backend_kind() == BackendKind::Vdpa && port.mac() != mac.0 {
                    let device = port.backend_name();
                    let line = format!(
                        "pf={pf},index={index},mac={mac}: a VF on {device} has that device's address; set another \
                         address in \
                         the VF's configuration, before the PF is added"
                    );
                    return Err(Failure::new(ErrorKind::Conflict, line));
                }
                // With DRIVER set, the driver has read the address or is about to, even if no queue runs yet.
                let set = if driven { Err(MacError::InUse) } else { port.set_mac(mac.0) };
                set.map_err(|error| {
                    Failure::new(error.kind().into(), format!("pf={pf},index={index},mac={mac}: {error}"))
                })?;
            }
            if let Some(link) = link {
                port.set_link(*link == Link::Up);
            }
            Ok(())
        });
        set.unwrap_or_else(|| Err(no_vf()))?;
        if let Some(planned) = planned {
            self.planned = planned;
        }
        Ok(())
    }

    /// The VM in which VF `index` of `pf` has the address `mac`.
    fn planned_with_vf_mac(&self, pf: &str, index: u16, mac: MacAddress) -> Result<PlannedVm, Failure> {
        let mut config = self.config().clone();
        let net = config.net.iter_mut().find(|net| net.id.as_deref() == Some(pf)).ok_or_else(|| no_device(pf))?;
        net.vf_mut(index).mac = Some(mac);
        PlannedVm::new(config).map_err(|error| {
            let line = format!("pf={pf},index={index},mac={mac}: {}", error.problem);
            Failure::new((&error.problem).into(), line)
        })
    }

    fn forget(&mut self, removed: &[Removed]) {
        for Removed { id, address } in removed {
            self.forget_device(id);
            self.events.tell(Source::Vm, "device-removed", &[("id", id), ("bdf", &address.to_string())]);
        }
    }

    fn forget_device(&mut self, id: &str) {
        self.planned.remove(id);
        self.fds.remove(id);
    }
}

fn no_device(id: &str) -> Failure {
    let id = shortened(id, LONGEST);
    let line = format!("there is no device {id}; vm.info lists the devices");
    Failure::new(ErrorKind::NotFound, line)
}

#[cfg(test)]
mod tests {
    use crate::config::DeviceKind;

    use super::*;

    fn instance(config: &str) -> Instance {
        Instance::new(PlannedVm::new(serde_json::from_str(config).unwrap()).unwrap(), Events::default())
    }

    fn net(text: &str) -> NetConfig {
        text.parse().unwrap()
    }

    fn ids(instance: &Instance) -> Vec<&str> {
        instance.config().net.iter().filter_map(|net| net.id.as_deref()).collect()
    }

    #[test]
    fn what_is_left_out_is_decided_once() {
        let mut instance = instance(r#"{"net":[{"sriov_vfs":2},{"id":"b"}]}"#);
        let before = instance.config().clone();
        assert!(before.net.iter().all(|net| net.mac.is_some()));
        assert_eq!(instance.add_net(net("id=c"), Vec::new()).unwrap(), None);
        assert_eq!(instance.config().net[..2], before.net);
        assert_eq!(ids(&instance), ["_net0", "b", "c"]);
        instance.remove_device("_net0").unwrap();
        assert_eq!(instance.config().net[0], before.net[1]);
    }

    #[test]
    fn a_pf_without_a_tap_gets_a_name_that_no_pf_has_although_another_has_gone() {
        let mut instance = instance(r#"{"net":[{"id":"a","sriov_vfs":1},{"id":"b","sriov_vfs":1}]}"#);
        instance.remove_device("a").unwrap();
        instance.add_net(net("id=c,sriov_vfs=1"), Vec::new()).unwrap();
        let taps: Vec<_> = instance.config().net.iter().map(|net| net.tap.clone().unwrap()).collect();
        assert_ne!(taps[0], taps[1]);
    }

    #[test]
    fn a_device_that_cannot_be_leaves_no_trace() {
        let mut instance = instance(r#"{"net":[{"id":"a","tap":"a0"}]}"#);
        let before = instance.config().clone();
        for wrong in ["id=a", "tap=a0", "mtu=1", "pci_device_id=32", "id=__x", "num_queues=3", "sriov_vfs=65535"] {
            assert!(instance.add_net(net(wrong), Vec::new()).is_err(), "{wrong}");
        }
        assert!(instance.add_disk("id=a,path=/x".parse().unwrap()).is_err(), "a name is one of all devices");
        assert_eq!(instance.config(), &before);
    }

    #[test]
    fn what_is_not_there_or_in_every_vm_is_not_removed() {
        let mut instance = instance("{}");
        let kind = |instance: &mut Instance, id| instance.remove_device(id).unwrap_err().kind;
        assert_eq!(kind(&mut instance, "nobody"), ErrorKind::NotFound);
        assert_eq!(kind(&mut instance, "__rng"), ErrorKind::Invalid);
    }

    #[test]
    fn taps_that_were_passed_are_kept_as_long_as_their_nic() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut instance = instance("{}");
        // The numbers of the request mean nothing here.
        instance.add_net(net("id=a,fd=[3]"), vec![ours.into()]).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let gone = || std::io::Read::read(&mut &theirs, &mut [0]).is_ok_and(|len| len == 0);
        assert!(!gone());
        instance.remove_device("a").unwrap();
        assert!(gone());
    }

    #[test]
    fn an_address_that_a_vf_is_given_is_its_own_in_the_configuration() {
        let instance = instance(
            r#"{"net":[{"id":"a","mac":"52:54:00:00:00:01","sriov_vfs":3,"vfs":[{"index":2,"mac":"52:54:00:00:01:02"}]},
                {"id":"b","mac":"52:54:00:00:00:02"}]}"#,
        );
        let given = |index, mac: &str| instance.planned_with_vf_mac("a", index, mac.parse().unwrap());
        for index in 0..3 {
            let (mut expected, changed) = (instance.planned.plan().clone(), given(index, "52:54:00:77:77:77").unwrap());
            let DeviceKind::Net(net) = &mut expected.devices[0].kind else { panic!("the first device is the PF") };
            net.vfs[usize::from(index)].spec.mac = [0x52, 0x54, 0, 0x77, 0x77, 0x77];
            assert_eq!(changed.plan(), &expected);
        }
        given(2, "52:54:00:00:01:02").unwrap();
        let derived = instance.planned.plan().nets().next().unwrap().vfs[1].spec.mac;
        for used in ["52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:00:01:02", &MacAddress(derived).to_string()] {
            let failure = given(0, used).unwrap_err();
            assert_eq!(failure.kind, ErrorKind::Conflict, "{failure:?}");
        }
        assert_eq!(given(0, "01:00:00:00:00:01").unwrap_err().kind, ErrorKind::Invalid);
    }
}
