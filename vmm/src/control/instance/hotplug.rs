//! Adding and removing devices.

use std::collections::HashSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use virtio_devices::{BackendKind, Cancel, tap_name};

use super::{Added, Instance, no_device};
use crate::api::{Failure, NewDevice};
use crate::config::shared_macs::SharedMac;
use crate::config::{DevicePlan, MacAddress, NetConfig};
use crate::control::addition::Addition;
use crate::control::opening::{Acquire, OpenedResources};
use crate::devices::opened_before::OpenedBefore;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::telemetry::events::Source;
use crate::vfio::Notice;

/// MAC addresses of the functions of a device.
fn macs_of(device: &DevicePlan) -> HashSet<MacAddress> {
    let x550 = device.x550().map(|x550| x550.mac);
    device.nics().map(|nic| MacAddress(nic.spec.mac)).chain(x550).collect()
}

impl Instance {
    /// Adds a device, hot-plugging it if the VM is booted. Returns its address then. Skips a NIC whose address and tap
    /// the VM already has: Kata adds all NICs again.
    ///
    /// # Errors
    ///
    /// Fails without a change if it cannot be added.
    pub(crate) fn add(&mut self, new: NewDevice) -> Result<Option<Added>, Error> {
        if let Some(id) = self.present(&new) {
            log::info!(
                "{id}: a NIC with its MAC address and a descriptor of its tap is asked for; it is there already"
            );
            let plugged = self.vm.as_ref().and_then(|vm| vm.devices().find(&id));
            return Ok(plugged.map(|plugged| Added { address: plugged.address(), id }));
        }
        let Addition { planned, opened, .. } = self.take_addition(&new);
        let mut planned = planned?;
        let (mut id, mut added) = (String::new(), None);
        if let Some(device) = planned.added_to(self.planned.plan()).cloned() {
            id.clone_from(&device.id);
            if let Some(vm) = &mut self.vm {
                let address = vm.add(&device, opened)?;
                planned.set_slot(&id, address.rid.device());
                self.events.tell(Source::Vm, "device-added", &[("id", &id), ("bdf", &address.to_string())]);
                added = Some(Added { id: id.clone(), address });
            }
        }
        planned.log_warnings(Some(self.planned.plan()));
        let added_macs = planned.added_to(self.planned.plan()).map(macs_of).unwrap_or_default();
        self.planned = Arc::new(planned);
        self.decide_again(|_, settings| settings.mac.is_some_and(|mac| added_macs.contains(&mac)));
        self.warn_of_macs(Some(&id));
        let fds = new.into_fds();
        if !fds.is_empty() {
            self.fds.insert(id, fds);
        }
        Ok(added)
    }

    /// Plans the addition of a device to a booted VM. Returns an opener, for any thread, of what it needs, if that
    /// takes time; else [`Self::add`] uses the plan at once.
    pub(super) fn device_opener(&mut self, new: &NewDevice) -> Option<Acquire> {
        if self.vm.is_none() || self.present(new).is_some() {
            return None;
        }
        let mut addition = self.plan_addition(new);
        let opener = self.vm.as_mut().zip(addition.device()).and_then(|(vm, plan)| vm.opener(plan));
        let Some(open) = opener else {
            self.acquired = Some(OpenedResources::Device(Box::new(addition)));
            return None;
        };
        Some(Box::new(move |cancel: &Cancel| {
            addition.opened = open(cancel);
            OpenedResources::Device(Box::new(addition))
        }))
    }

    /// Takes the plan that [`Self::device_opener`] made. Plans again if it is for another device, or the VM has
    /// changed since.
    fn take_addition(&mut self, new: &NewDevice) -> Addition {
        let opened = match self.acquired.take() {
            Some(OpenedResources::Device(addition)) if addition.is_of(new, &self.planned, self.vm.is_some()) => {
                return *addition;
            }
            Some(OpenedResources::Device(stale)) => stale.opened,
            _ => OpenedBefore::Nothing,
        };
        let mut addition = self.plan_addition(new);
        addition.opened = opened;
        addition
    }

    fn plan_addition(&self, new: &NewDevice) -> Addition {
        Addition::plan(new, &self.planned, self.vm.is_some())
    }

    /// Returns the NIC that has the MAC address and a descriptor of the tap of a new one.
    fn present(&self, new: &NewDevice) -> Option<String> {
        let NewDevice::Net(net, fds) = new else { return None };
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
            let port = device.host_nic(None)?;
            let is_tap = matches!(port.backend_kind(), BackendKind::Tap | BackendKind::VhostNet);
            is_tap.then(|| port.backend_name().to_string())
        });
        name.flatten()
    }

    /// Warns of MAC addresses that several devices share, `id` among them if given.
    pub(super) fn warn_of_macs(&self, id: Option<&str>) {
        let shared = SharedMac::all(&self.planned.plan().devices).into_iter();
        let asked = shared.filter(|shared| id.is_none_or(|id| shared.devices.iter().any(|device| device == id)));
        asked.for_each(|shared| log::warn!("{}", shared.warning()));
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
