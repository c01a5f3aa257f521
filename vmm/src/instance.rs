//! A virtual machine as its clients know it: a configuration that may run.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use pci::{Rid, VfIndex};
use virtio_devices::MacError;

use crate::api::{Failure, FailureKind, Link, Resize, SetVf};
use crate::config::{DevicePlan, DiskConfig, NetConfig, VmConfig, VmPlan};
use crate::cpu::Stop;
use crate::devices::Removed;
use crate::error::Error;
use crate::events::{Events, Source};
use crate::vm::Vm;
use crate::vm_info::bdf;

/// A virtual machine, whether it runs or not.
pub struct Instance {
    /// As it was given, with all that was left out filled in.
    config: VmConfig,
    plan: VmPlan,
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
        Ok(Self { config, plan, fds: HashMap::new(), vm: None, has_run: false, events })
    }

    /// As it was given, with all that was left out filled in.
    pub const fn config(&self) -> &VmConfig {
        &self.config
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
        let vm = Vm::new(&self.config, &self.plan, self.events.clone())?;
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
        (self.config, self.plan) = (config, plan);
        Ok((id, added))
    }

    /// Asks the guest to let a device go, or takes it from the configuration of one that does not run.
    ///
    /// # Errors
    ///
    /// When there is no such device.
    pub fn remove_device(&mut self, id: &str) -> Result<(), Failure> {
        if self.plan.devices().iter().any(|device| device.id() == id && !device.is_removable()) {
            let line = format!("{id} is a part of every VM and cannot be removed");
            return Err(Failure::new(FailureKind::BadRequest, line));
        }
        let known = match &mut self.vm {
            Some(vm) => vm.unplug(id),
            None => {
                let known = self.plan.devices().iter().any(|device| device.id() == id);
                self.forget_device(id);
                known
            }
        };
        known.then_some(()).ok_or_else(|| no_device(id))
    }

    /// Changes how many vCPUs and how much memory the guest has, which it cannot yet.
    ///
    /// # Errors
    ///
    /// When that is anything else than it has.
    pub fn resize(&self, resize: &Resize) -> Result<(), Failure> {
        let VmConfig { cpus, memory, .. } = &self.config;
        let refuse = |what: String| Err(Failure::new(FailureKind::BadRequest, what));
        match *resize {
            Resize { desired_vcpus: Some(vcpus), .. } if vcpus != cpus.boot_vcpus => refuse(format!(
                "desired_vcpus={vcpus}: this VM has {} vCPUs, and none are reserved at boot; leave it out",
                cpus.boot_vcpus
            )),
            Resize { desired_ram: Some(ram), .. } if ram != memory.size => refuse(format!(
                "desired_ram={ram}: this VM has {} bytes, and no more are reserved at boot; leave it out",
                memory.size
            )),
            Resize { desired_balloon: Some(bytes @ 1..), .. } => {
                refuse(format!("desired_balloon={bytes}: this VM has no balloon; leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// Changes a VF's link or address.
    ///
    /// # Errors
    ///
    /// When there is no such VF, or its guest could not follow.
    pub fn set_vf(&self, change: &SetVf) -> Result<(), Failure> {
        let SetVf { pf, index, link, mac } = change;
        let vm = self.vm.as_ref().ok_or_else(|| {
            Failure::new(
                FailureKind::Conflict,
                "the VM is not booted; give the VF's settings in vm.create or vm.add-net",
            )
        })?;
        let plugged = vm.devices().find(pf).ok_or_else(|| no_device(pf))?;
        plugged.slot().with(|device| {
            let port = device.port(Some(VfIndex(*index))).ok_or_else(|| {
                let reserved = plugged.plan().total_vfs();
                let line = format!("pf={pf},index={index}: {pf} reserves {reserved} VFs; they are counted from 0");
                Failure::new(FailureKind::NotFound, line)
            })?;
            if let Some(mac) = mac {
                port.set_mac(mac.0).map_err(|error| {
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
            Ok(())
        })
    }

    fn forget(&mut self, removed: &[Removed]) {
        for Removed { id, rid } in removed {
            self.forget_device(id);
            self.events.tell(Source::Vm, "device-removed", &[("id", id), ("bdf", &bdf(*rid))]);
        }
    }

    fn forget_device(&mut self, id: &str) {
        self.plan.remove(id);
        self.config.remove(id);
        self.fds.remove(id);
    }
}

fn no_device(id: &str) -> Failure {
    let line = format!("there is no device called {id}; vm.info lists those that there are");
    Failure::new(FailureKind::NotFound, line)
}
