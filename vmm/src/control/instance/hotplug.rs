//! Adding and removing devices.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use virtio_devices::{BackendKind, tap_name};

use super::{Added, Instance, no_device};
use crate::api::Failure;
use crate::config::shared_macs::SharedMac;
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
    /// Adds a NIC, hot-plugging it if the VM is booted. `fds`: queues of its tap, if a client passed any. Skips a NIC
    /// whose address and tap the VM already has: Kata adds all NICs again.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add_net(&mut self, mut net: NetConfig, fds: Vec<OwnedFd>) -> Result<Option<Added>, Error> {
        if let Some(id) = self.nic_with(&net, &fds) {
            log::info!(
                "{id}: a NIC with its MAC address and a descriptor of its tap is asked for; it is there already"
            );
            let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(&id));
            return Ok(plugged.map(|plugged| Added { address: plugged.address(), id }));
        }
        net.backend.fds = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let (id, added) = self.add(|config| config.net.push(net))?;
        if !fds.is_empty() {
            self.fds.insert(id, fds);
        }
        Ok(added)
    }

    /// Returns the NIC with the address of `net` and the tap of `fds`.
    fn nic_with(&self, net: &NetConfig, fds: &[OwnedFd]) -> Option<String> {
        net.mac.filter(|_| net.sriov_vfs == 0)?;
        let tap = tap_name(fds.first()?.as_fd()).ok()?;
        let is_same = |other: &&NetConfig| other.mac == net.mac && other.sriov_vfs == 0;
        let mut ids = self.config().net.iter().filter(is_same).filter_map(|other| other.id.as_ref());
        ids.find(|id| self.tap_of(id).is_some_and(|name| name == tap)).cloned()
    }

    /// Returns the name of a NIC's tap, if its descriptor was passed or it is open.
    fn tap_of(&self, id: &str) -> Option<String> {
        let Some(vm) = &self.vm else { return tap_name(self.fds.get(id)?.first()?.as_fd()).ok() };
        let slot = vm.devices().find(id)?.slot();
        let name = slot.with(|device| {
            let port = device.port(None)?;
            let is_tap = matches!(port.backend_kind(), BackendKind::Tap | BackendKind::VhostNet);
            is_tap.then(|| port.backend_name().to_string())
        });
        name.flatten()
    }

    /// Warns of MAC addresses that several devices share, `id` among them if given.
    pub(super) fn warn_of_macs(&self, id: Option<&str>) {
        let shared = SharedMac::all(self.planned.plan().nets()).into_iter();
        let asked = shared.filter(|shared| id.is_none_or(|id| shared.devices.iter().any(|device| device == id)));
        asked.for_each(|shared| log::warn!("{}", shared.warning()));
    }

    /// Adds a vDPA device, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add_vdpa(&mut self, vdpa: VdpaConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.vdpa.push(vdpa))?.1)
    }

    /// Adds a disk, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add_disk(&mut self, disk: DiskConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.disks.push(disk))?.1)
    }

    /// Adds the vsock device, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is one, or it cannot be added.
    pub(crate) fn add_vsock(&mut self, vsock: VsockConfig) -> Result<Option<Added>, Error> {
        if let Some(other) = &self.config().vsock {
            return Err(crate::config::virtio::vsock::second(other.id.as_deref().unwrap_or_default()).into());
        }
        Ok(self.add(|config| config.vsock = Some(vsock))?.1)
    }

    /// Adds a shared file system, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add_fs(&mut self, fs: FsConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.fs.push(fs))?.1)
    }

    /// Adds a vhost-user device, hot-plugging it if the VM is booted.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add_generic_vhost_user(&mut self, device: GenericVhostUserConfig) -> Result<Option<Added>, Error> {
        Ok(self.add(|config| config.generic_vhost_user.push(device))?.1)
    }

    /// Adds a host device, hot-plugging it if the VM is booted. `fds`: its descriptor, if a client passed it; `device`
    /// has the number.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add_device(&mut self, device: DeviceConfig, fds: Vec<OwnedFd>) -> Result<Option<Added>, Error> {
        let (id, added) = self.add(|config| config.devices.push(device))?;
        if !fds.is_empty() {
            self.fds.insert(id, fds);
        }
        Ok(added)
    }

    /// Handles VFIO notices: requests the guest to release devices that the host wants back, and reports errors.
    pub(crate) fn heed_host(&mut self) {
        let Some(vm) = &mut self.vm else { return };
        for (id, notice) in vm.devices().notices() {
            let event = match notice {
                // The host repeats the request until it has the device.
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
    /// Fails without a change if it cannot be added.
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
        self.warn_of_macs(Some(&id));
        Ok((id, added))
    }

    /// Requests the guest to release a device; before boot, removes it from the configuration.
    ///
    /// # Errors
    ///
    /// Fails if there is no such device, or it cannot be removed.
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
