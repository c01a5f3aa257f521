//! Devices that are added to a VM and removed from it.

use std::os::fd::{AsRawFd, OwnedFd};

use super::{Added, Instance, no_device};
use crate::api::Failure;
use crate::config::{
    DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig, NetConfig, PlannedVm, PmemConfig, VdpaConfig, VmConfig,
    VsockConfig, iommu,
};
use crate::control::opening::Acquired;
use crate::devices::backends::OpenedBefore;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::landlock;
use crate::telemetry::events::Source;
use crate::vfio::Notice;

impl Instance {
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

    /// Adds a device of the host, hot-plugging it if the VM is booted. `fds` has its own file, if a client passed it,
    /// whose number is in `device`.
    ///
    /// # Errors
    ///
    /// It cannot be added. Nothing has changed then.
    pub(crate) fn add_device(&mut self, device: DeviceConfig, fds: Vec<OwnedFd>) -> Result<Option<Added>, Error> {
        let (id, added) = self.add(|config| config.devices.push(device))?;
        if !fds.is_empty() {
            self.fds.insert(id, fds);
        }
        Ok(added)
    }

    /// Has the guest release the devices that the host wants back, and reports what it says of others.
    pub(crate) fn heed_host(&mut self) {
        let Some(vm) = &mut self.vm else { return };
        for (id, notice) in vm.devices().notices() {
            let event = match notice {
                // The host repeats this until it has the device.
                Notice::Requested if !vm.unplug(&id) => continue,
                Notice::Requested => "device-requested",
                Notice::Error => "device-error",
            };
            log::warn!("{id}: {}", notice.text());
            self.events.tell(Source::Vfio, event, &[("id", &id)]);
        }
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
        let mut planned = PlannedVm::with_device_of_document(config)?;
        planned.keep_slots(self.planned.plan());
        let (mut id, mut added) = (String::new(), None);
        if let Some(device) = planned.added_to(self.planned.plan()).cloned() {
            id.clone_from(&device.id);
            if let Some(vm) = &mut self.vm {
                let opened = match self.acquired.take() {
                    Some(Acquired::Peers(peers)) => OpenedBefore { peers: Some(peers), ..OpenedBefore::default() },
                    Some(Acquired::HostDevice(device, _)) => {
                        OpenedBefore { host_device: Some(*device), ..OpenedBefore::default() }
                    }
                    _ => OpenedBefore::default(),
                };
                iommu::check_added(self.planned.plan().iommu(), &device)?;
                landlock::check_device(&device)?;
                let address = vm.add(&device, opened)?;
                planned.set_slot(&id, address.rid.device());
                self.events.tell(Source::Vm, "device-added", &[("id", &id), ("bdf", &address.to_string())]);
                added = Some(Added { id: id.clone(), address });
            }
        }
        planned.log_warnings(Some(self.planned.plan()));
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
            Some(vm) => _ = vm.unplug(id),
            None => self.forget_device(id),
        }
        Ok(())
    }
}
