//! Hot-plug of devices and vCPUs.

use std::sync::Arc;
use std::time::Instant;

use pci::{Bdf, VfIndex};
use virtio_devices::{Cancel, Memory};
use vm_memory::GuestAddressSpace as _;

use super::{Running, Vm, VmError};
use crate::acpi::vcpu_hotplug::{Change, VcpuHotplug};
use crate::config::{DeviceKind, DevicePlan, NicPlan};
use crate::devices::connect::Connecting;
use crate::devices::opened_before::{OpenBefore, OpenedBefore};
use crate::devices::vhost_user_backends::VhostUserBackends;
use crate::devices::{Plugged, Removed};
use crate::vm::announcing::Announcing;

impl Vm {
    /// Hot-plugs a device, and returns the address of its own function. Opens all that `opened` lacks.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot be opened or placed. Nothing has changed then.
    pub(crate) fn add(&mut self, plan: &DevicePlan, opened: OpenedBefore) -> Result<Bdf, VmError> {
        if !self.ram.is_shared() && plan.needs_shared_memory() {
            return Err(VmError::PrivateMemory { option: plan.option() });
        }
        // Files of VFs that the guest has not enabled yet stay reserved.
        let plans = self.devices.iter().map(Plugged::plan).chain([plan]);
        self.limits.reserve(plans, self.max_vcpus.into())?;
        if plan.pins_memory() {
            // A device that is opened here pins memory while the guest runs.
            self.mem_regions.keep_pages();
        }
        let address = self.devices.add(plan, opened)?;
        self.ged.plugged(address);
        Ok(address)
    }

    /// Returns an opener, for any thread, of what the device of `plan` needs before it is added, if that may take time:
    /// vhost-user backends and host devices. From now on, guest memory counts as pinned if the device may pin it, until
    /// [`Self::end_pinning`].
    pub(crate) fn opener(&mut self, plan: &DevicePlan) -> Option<OpenBefore> {
        if let DeviceKind::Vfio(spec) = &plan.kind {
            let (spec, host, memory) = (spec.clone(), Arc::clone(self.devices.vfio()), self.memory().clone());
            self.begin_pinning();
            return Some(Box::new(move |_| {
                let map = memory.memory().into_inner();
                let device = host.open(&spec, &Memory::from(Arc::clone(&map)));
                OpenedBefore::HostDevice(Box::new(device), map)
            }));
        }
        if !VhostUserBackends::are_of(plan) {
            return None;
        }
        let (plan, memory) = (plan.clone(), self.shared_memory()?.clone());
        Some(Box::new(move |cancel: &Cancel| {
            OpenedBefore::VhostUserBackends(VhostUserBackends::connect(&[plan], &memory, Some(cancel)))
        }))
    }

    /// Gives a network function without a backend the backend `new`, described by `nic`.
    ///
    /// # Errors
    ///
    /// Fails as [`Devices::connect`](crate::devices::Devices::connect) does.
    pub(crate) fn give_backend(
        &mut self,
        function: (&str, Option<VfIndex>),
        nic: &NicPlan,
        new: Connecting,
    ) -> Result<(), VmError> {
        let runs = !self.is_paused();
        self.devices.connect(function, nic, new, runs)?;
        let (id, vf) = function;
        self.announcing = Some(Announcing::begin(Instant::now(), vec![(id.to_string(), vf)]));
        Ok(())
    }

    /// Keeps the pages of the guest's memory from now on: a host device will pin them before it is plugged in. Memory
    /// devices keep theirs as long as the VM lives.
    pub(crate) fn begin_pinning(&mut self) {
        self.is_being_pinned = true;
        self.mem_regions.keep_pages();
    }

    /// Ends [`Self::begin_pinning`]: all devices that pin the guest's memory are plugged in, or closed.
    pub(crate) fn end_pinning(&mut self) {
        self.is_being_pinned = false;
    }

    /// True if the pages of the guest's memory must stay: host devices may have pinned them.
    pub(crate) fn pins_memory(&self) -> bool {
        self.is_being_pinned || self.devices.pin_memory()
    }

    /// Keeps the pages of unplugged memory if host devices may have pinned them.
    pub(super) fn keep_pages(&self) {
        if self.pins_memory() {
            self.mem_regions.keep_pages();
        }
    }

    /// Asks the guest to release the device `id`. Returns true for the first request.
    pub fn unplug(&mut self, id: &str) -> bool {
        let is_new = self.devices.find(id).is_some_and(|plugged| !plugged.is_going());
        if let Some(address) = self.devices.unplug(id) {
            self.ged.unplug(address);
        }
        is_new
    }

    /// Changes the number of vCPUs to `vcpus`, 1 to the maximum: adds vCPUs, or asks the guest to release some. The
    /// number also applies after a reboot.
    ///
    /// # Errors
    ///
    /// Fails if the guest has not answered an earlier request to release vCPUs, or the host cannot run the new ones.
    /// Nothing has changed then.
    pub fn resize(&mut self, vcpus: u8) -> Result<(), VmError> {
        self.stop_ejected();
        match self.ged.with_vcpus(|hotplug| hotplug.resize(vcpus)) {
            Change::Asked => {}
            Change::Add(ids) => self.add_vcpus(&ids)?,
            Change::Unanswered(vcpu) => return Err(VmError::VcpuLeaving { vcpu }),
        }
        self.vcpus = vcpus;
        Ok(())
    }

    /// Starts the vCPUs `ids`, which do not run, and notifies the guest. KVM's vCPUs are created on first use, and
    /// kept.
    fn add_vcpus(&mut self, ids: &[u8]) -> Result<(), VmError> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        let added = self.run_vcpus(&mut running, ids);
        if added.is_err() {
            ids.iter().for_each(|id| running.vcpus.remove((*id).into()));
        }
        self.running = Some(running);
        added?;
        self.ged.with_vcpus(|hotplug| ids.iter().for_each(|id| hotplug.add(*id)));
        Ok(())
    }

    fn run_vcpus(&self, running: &mut Running, ids: &[u8]) -> Result<(), VmError> {
        for id in ids.iter().copied().map(u32::from) {
            if !running.vcpus.has(id) {
                running.vcpus.keep(id, self.vcpu(&running.powered.vm, id)?);
            }
            running.vcpus.add(id)?;
        }
        Ok(())
    }

    /// Stops the vCPUs that the guest has released.
    fn stop_ejected(&mut self) {
        let ejected = self.ged.with_vcpus(VcpuHotplug::take_ejected);
        if let Some(running) = &mut self.running {
            ejected.for_each(|id| running.vcpus.remove(id.into()));
        }
    }

    /// Stops the vCPUs and removes the devices that the guest has released, and returns the devices' ids and addresses.
    pub fn take_ejected(&mut self) -> Vec<Removed> {
        self.stop_ejected();
        let ejected = self.ged.take_ejected();
        ejected.into_iter().filter_map(|address| self.devices.remove(address)).collect()
    }

    /// Removes the device `id` at once, without the guest's consent or a notification.
    pub(crate) fn remove_by_surprise(&mut self, id: &str) -> Option<Removed> {
        let address = self.devices.find(id)?.address();
        self.devices.remove(address)
    }

    /// Ends the guest, and removes the devices that it was asked to release, even if it has not released them.
    pub fn remove_unplugged(&mut self) -> Vec<Removed> {
        self.end_guest();
        self.devices.remove_unplugged()
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{
        Bytes as _, GuestAddress, GuestAddressSpace as _, GuestMemoryBackend as _, GuestMemoryRegion as _,
    };

    use crate::vm::saved::guest::Machine;

    /// `cli; hlt; jmp back to hlt`
    const IDLE: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

    #[test]
    fn reboot_keeps_pages_while_a_host_device_pins_memory() {
        let json = r#"{"serial":{"mode":"Null"},"console":{"mode":"Null"},"memory":{"size":16777216,"shared":true,
            "hotplug_method":"VirtioMem","hotplug_size":134217728}}"#;
        let mut vm = Machine::boot(IDLE, json).vm;
        // Booting writes nothing there.
        let page = GuestAddress(12 << 20);
        let blocks = |vm: &super::Vm| {
            let memory = vm.memory().memory();
            let file = memory.find_region(page).unwrap().file_offset().unwrap();
            rustix::fs::fstat(file.file()).unwrap().st_blocks
        };
        let gives_back = |vm: &mut super::Vm| {
            vm.memory().memory().write_slice(&[7; 1 << 20], page).unwrap();
            let before = blocks(vm);
            vm.reset().unwrap();
            assert_eq!(vm.memory().memory().read_obj::<u64>(page).unwrap(), 0);
            // Booting itself writes a few pages.
            before - blocks(vm) > 1 << 10
        };
        assert!(gives_back(&mut vm) && !vm.mem_regions.all_keep_pages());
        vm.begin_pinning();
        assert!(vm.mem_regions.all_keep_pages());
        assert!(!gives_back(&mut vm));
        vm.end_pinning();
        assert!(gives_back(&mut vm));
    }
}
