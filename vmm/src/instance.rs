//! A virtual machine as its clients know it: a configuration that may run.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use pci::{Rid, VfIndex};
use virtio_devices::{BackendKind, MacError, Status};

use crate::api::{Failure, FailureKind, Link, Resize, SetVf};
use crate::config::{DevicePlan, DiskConfig, MacAddress, NetConfig, VdpaConfig, VmConfig, VmPlan};
use crate::cpu::Stop;
use crate::devices::Removed;
use crate::error::Error;
use crate::events::{Events, Source};
use crate::vm::Vm;
use crate::vm_info::bdf;

/// A virtual machine, whether it runs or not.
pub struct Instance {
    /// As it was given, with all that was left out filled in: it can be planned, always in the same way.
    config: VmConfig,
    /// How many vCPUs it has or should have, which is what it has at its next start. The configuration keeps those that it was given,
    /// which the queues of its devices were planned for.
    vcpus: u32,
    /// Taps that clients passed, by the id of their NIC.
    fds: HashMap<String, Vec<OwnedFd>>,
    vm: Option<Vm>,
    has_run: bool,
    events: Events,
}

/// A device that was added to a guest that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    /// Its id.
    pub id: String,
    /// Where its own function is.
    pub rid: Rid,
}

/// How a guest's life went on.
pub enum Turn {
    /// It runs.
    On,
    /// It starts again.
    Again,
    /// It switched itself off.
    Off,
}

impl Instance {
    /// A virtual machine that does not run, and tells what happens to it. Its payload is looked at when it is booted.
    ///
    /// # Errors
    ///
    /// When `config` is one that cannot be.
    pub fn new(mut config: VmConfig, events: Events) -> Result<Self, Error> {
        let plan = config.plan()?;
        config.resolve(&plan);
        let vcpus = config.cpus.boot_vcpus;
        Ok(Self { config, vcpus, fds: HashMap::new(), vm: None, has_run: false, events })
    }

    /// As it was given, with all that was left out filled in.
    pub const fn config(&self) -> &VmConfig {
        &self.config
    }

    /// How many vCPUs it has or should have.
    pub const fn vcpus(&self) -> u32 {
        self.vcpus
    }

    /// Whether it was ever started.
    pub const fn has_run(&self) -> bool {
        self.has_run
    }

    /// Gets all that it needs from the host, to be started by [`Self::start`].
    ///
    /// # Errors
    ///
    /// When something is missing. It is as it was then.
    pub fn open(&mut self) -> Result<(), Error> {
        self.config.payload.check_present()?;
        self.events.vm("booting");
        let mut config = self.config.clone();
        config.cpus.boot_vcpus = self.vcpus;
        let vm = Vm::new(&config, &self.config.plan()?, self.events.clone())?;
        for plugged in vm.devices().iter() {
            self.config.set_slot(plugged.plan().id(), plugged.placement().rid.device());
        }
        self.vm = Some(vm);
        Ok(())
    }

    /// Runs the guest, after [`Self::open`]. Signals must not end the process any more: the terminal has to be restored.
    ///
    /// # Errors
    ///
    /// When it cannot be run. It is switched off then.
    pub fn start(&mut self) -> Result<(), Error> {
        let Some(vm) = &mut self.vm else { return Ok(()) };
        let started = vm.take_terminal().and_then(|()| vm.power_on());
        match started {
            Ok(()) => {
                self.has_run = true;
                self.events.vm("booted");
            }
            Err(_) => self.vm = None,
        }
        started
    }

    /// Switches it off at once.
    pub fn shutdown(&mut self) {
        if let Some(mut vm) = self.vm.take() {
            let removed = vm.remove_unplugged();
            self.forget(&removed);
            drop(vm);
            self.events.vm("shutdown");
        }
    }

    /// Starts it again.
    ///
    /// # Errors
    ///
    /// When it cannot be run. It is switched off then.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.reset_by(Vm::reset)
    }

    fn reset_by(&mut self, reset: impl FnOnce(&mut Vm) -> Result<(), Error>) -> Result<(), Error> {
        let Some(vm) = &mut self.vm else { return Ok(()) };
        self.events.vm("rebooting");
        let removed = vm.remove_unplugged();
        let started = reset(vm);
        self.forget(&removed);
        match started {
            Ok(()) => self.events.vm("rebooted"),
            Err(_) => self.shutdown(),
        }
        started
    }

    /// The guest, if it runs or stands still.
    pub const fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    /// The guest, if it runs or stands still.
    pub const fn vm_mut(&mut self) -> Option<&mut Vm> {
        self.vm.as_mut()
    }

    /// Looks at what the guest did, after [`Vm::event`].
    ///
    /// # Errors
    ///
    /// When the guest cannot go on. It is switched off then.
    pub fn turn(&mut self) -> Result<Turn, Error> {
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
                Err(error.into())
            }
            None => {
                let removed = vm.take_ejected();
                self.forget(&removed);
                Ok(Turn::On)
            }
        }
    }

    /// Adds a NIC, to the guest if it runs, whose taps may be `fds`.
    ///
    /// # Errors
    ///
    /// When it cannot be. Nothing is left of it then.
    pub fn add_net(&mut self, mut net: NetConfig, fds: Vec<OwnedFd>) -> Result<Option<Added>, Error> {
        net.fds = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let (id, added) =
            self.add(|config| config.net.push(net), |plan| plan.nets.last().cloned().map(DevicePlan::Net))?;
        if !fds.is_empty() {
            self.fds.insert(id, fds);
        }
        Ok(added)
    }

    /// Adds a vDPA device, to the guest if it runs.
    ///
    /// # Errors
    ///
    /// When it cannot be. Nothing is left of it then.
    pub fn add_vdpa(&mut self, vdpa: VdpaConfig) -> Result<Option<Added>, Error> {
        let added =
            self.add(|config| config.vdpa.push(vdpa), |plan| plan.vdpas.last().cloned().map(DevicePlan::Net))?;
        Ok(added.1)
    }

    /// Adds a disk, to the guest if it runs.
    ///
    /// # Errors
    ///
    /// When it cannot be. Nothing is left of it then.
    pub fn add_disk(&mut self, disk: DiskConfig) -> Result<Option<Added>, Error> {
        let added =
            self.add(|config| config.disks.push(disk), |plan| plan.disks.last().cloned().map(DevicePlan::Disk))?;
        Ok(added.1)
    }

    /// Adds the device that `change` adds to the configuration and `find` finds in the plan of it. Returns its name, and where
    /// it is if a guest runs.
    fn add(
        &mut self,
        change: impl FnOnce(&mut VmConfig),
        find: impl FnOnce(&VmPlan) -> Option<DevicePlan>,
    ) -> Result<(String, Option<Added>), Error> {
        let mut config = self.config.clone();
        change(&mut config);
        let plan = config.plan()?;
        config.resolve(&plan);
        let (mut id, mut added) = (String::new(), None);
        if let Some(device) = find(&plan) {
            id = device.id().to_string();
            if let Some(vm) = &mut self.vm {
                let rid = vm.add(&device)?;
                config.set_slot(&id, rid.device());
                self.events.tell(Source::Vm, "device-added", &[("id", &id), ("bdf", &bdf(rid))]);
                added = Some(Added { id: id.clone(), rid });
            }
        }
        self.config = config;
        Ok((id, added))
    }

    /// Asks the guest to let a device go, or takes it from the configuration of one that does not run.
    ///
    /// # Errors
    ///
    /// When there is no such device.
    pub fn remove_device(&mut self, id: &str) -> Result<(), Failure> {
        let devices = self.config.plan()?.devices();
        let device = devices.iter().find(|device| device.id() == id).ok_or_else(|| no_device(id))?;
        if !device.is_removable() {
            let line = format!("{id} is a part of every VM and cannot be removed");
            return Err(Failure::new(FailureKind::BadRequest, line));
        }
        match &mut self.vm {
            Some(vm) => vm.unplug(id),
            None => self.forget_device(id),
        }
        Ok(())
    }

    /// Changes how many vCPUs the guest has, at once or once it has let some go, and at its next start. Memory stays as it is.
    ///
    /// # Errors
    ///
    /// When that is more than was reserved, the guest has not answered to an earlier change, or the host cannot. Nothing is changed
    /// then.
    pub fn resize(&mut self, resize: &Resize) -> Result<(), Failure> {
        let Some(vcpus) = resize.vcpus(&self.config)? else { return Ok(()) };
        if let Some(vm) = &mut self.vm {
            vm.resize(vcpus)
                .map_err(|error| Failure::from(error).in_context(format!("the VM cannot have {vcpus} vCPUs now")))?;
        }
        self.vcpus = vcpus.into();
        Ok(())
    }

    /// Changes a VF's link or address. The address is the VF's in the configuration then, too.
    ///
    /// # Errors
    ///
    /// When there is no such VF, another function has the address, or its guest could not follow. Nothing is changed then.
    pub fn set_vf(&mut self, change: &SetVf) -> Result<(), Failure> {
        let SetVf { pf, index, link, mac } = change;
        let vm = self.vm.as_ref().ok_or_else(|| {
            Failure::new(
                FailureKind::Conflict,
                "the VM is not booted; give the VF's settings in vm.create or vm.add-net",
            )
        })?;
        let plugged = vm.devices().find(pf).ok_or_else(|| no_device(pf))?;
        let reserved = plugged.plan().total_vfs();
        let no_vf = || {
            let line = match reserved.checked_sub(1) {
                Some(last) => format!("pf={pf},index={index}: {pf} reserves {reserved} VFs; index must be 0 to {last}"),
                None => format!("pf={pf},index={index}: {pf} reserves no VFs; name a NIC with sriov_vfs"),
            };
            Failure::new(FailureKind::NotFound, line)
        };
        if *index >= reserved {
            return Err(no_vf());
        }
        let config = mac.map(|mac| self.config_with_vf_mac(pf, *index, mac)).transpose()?;
        plugged.slot().with(|device| {
            let vf = Some(VfIndex(*index));
            let driven = device.function_status(vf).is_some_and(|status| status.driver.contains(Status::DRIVER));
            let port = device.port(vf).ok_or_else(no_vf)?;
            if let Some(mac) = mac {
                // The device has been told its address, and filters by it.
                if port.backend_kind() == BackendKind::Vdpa && port.mac() != mac.0 {
                    let device = port.backend_name();
                    let line = format!(
                        "pf={pf},index={index},mac={mac}: the address is that of {device}; give the VF another where it is \
                         described, before the PF is added"
                    );
                    return Err(Failure::new(FailureKind::Conflict, line));
                }
                // It has read its address when it says so, or is about to; its queues may not run before long.
                let set = if driven { Err(MacError::InUse) } else { port.set_mac(mac.0) };
                set.map_err(|error| {
                    let kind = match error {
                        MacError::NotUnicast => FailureKind::BadRequest,
                        MacError::InUse => FailureKind::Conflict,
                    };
                    Failure::new(kind, format!("pf={pf},index={index},mac={mac}: {error}"))
                })?;
            }
            if let Some(link) = link {
                port.set_link(*link == Link::Up);
            }
            Ok::<_, Failure>(())
        })?;
        if let Some(config) = config {
            self.config = config;
        }
        Ok(())
    }

    /// The configuration in which VF `index` of `pf` has the address `mac`.
    fn config_with_vf_mac(&self, pf: &str, index: u16, mac: MacAddress) -> Result<VmConfig, Failure> {
        let mut config = self.config.clone();
        let net = config.net.iter_mut().find(|net| net.id.as_deref() == Some(pf)).ok_or_else(|| no_device(pf))?;
        net.vf_mut(index).mac = Some(mac);
        match config.plan() {
            Ok(_) => Ok(config),
            Err(error) => {
                let line = format!("pf={pf},index={index},mac={mac}: {}", error.problem);
                Err(Failure::new(Failure::from(error).kind, line))
            }
        }
    }

    fn forget(&mut self, removed: &[Removed]) {
        for Removed { id, rid } in removed {
            self.forget_device(id);
            self.events.tell(Source::Vm, "device-removed", &[("id", id), ("bdf", &bdf(*rid))]);
        }
    }

    fn forget_device(&mut self, id: &str) {
        self.config.remove(id);
        self.fds.remove(id);
    }
}

fn no_device(id: &str) -> Failure {
    let line = format!("there is no device called {id}; vm.info lists those that there are");
    Failure::new(FailureKind::NotFound, line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(config: &str) -> Instance {
        Instance::new(serde_json::from_str(config).unwrap(), Events::default()).unwrap()
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
        assert_eq!(kind(&mut instance, "nobody"), FailureKind::NotFound);
        assert_eq!(kind(&mut instance, "__rng"), FailureKind::BadRequest);
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
        let given = |index, mac: &str| instance.config_with_vf_mac("a", index, mac.parse().unwrap());
        for index in 0..3 {
            let (mut expected, config) =
                (instance.config().plan().unwrap(), given(index, "52:54:00:77:77:77").unwrap());
            expected.nets[0].vfs[usize::from(index)].mac = [0x52, 0x54, 0, 0x77, 0x77, 0x77];
            assert_eq!(config.plan().unwrap(), expected);
        }
        given(2, "52:54:00:00:01:02").unwrap();
        let derived = instance.config().plan().unwrap().nets[0].vfs[1].mac;
        for used in ["52:54:00:00:00:01", "52:54:00:00:00:02", "52:54:00:00:01:02", &MacAddress(derived).to_string()] {
            let failure = given(0, used).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Conflict, "{failure:?}");
        }
        assert_eq!(given(0, "01:00:00:00:00:01").unwrap_err().kind, FailureKind::BadRequest);
    }
}
