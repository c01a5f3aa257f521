//! Changing the amount of memory, the number of vCPUs, and disk sizes.

use std::sync::Arc;

use super::{Instance, no_device};
use crate::api::{Failure, Resize, ResizeDisk, ResizeZone};
use crate::config::{MemoryConfig, PlannedVm, bytes};
use crate::control::resize;
use crate::error::Error;
use crate::error_kind::ErrorKind;
use crate::vm::Vm;

impl Instance {
    /// Changes the amount of memory, then the number of vCPUs, then the balloon's size. Additions take effect
    /// immediately, except on virtio-mem, whose driver works asynchronously. vCPUs are removed once the guest ejects
    /// them; ACPI memory at the next boot.
    ///
    /// # Errors
    ///
    /// Fails if a size is not possible, the guest has not completed an earlier change, or the host fails. Nothing has
    /// changed then, except that a new memory size stays if only the number of vCPUs fails.
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
            let vcpus = self.vcpus;
            self.planned_mut().count_vcpus(vcpus);
        }
        if let Some(bytes) = balloon {
            self.planned_mut().set_balloon_size(bytes);
            self.vm.iter().for_each(|vm| vm.balloon().resize(bytes));
        }
        Ok(())
    }

    fn resize_memory(&mut self, size: u64) -> Result<(), Failure> {
        let next = resize::memory(size, &self.config().memory)?;
        self.set_memory(next, &format!("desired_ram={size}"))?;
        let present = self.vm.as_ref().map(Vm::present_memory);
        resize::deferred(size, present, &self.config().memory).iter().for_each(|line| log::warn!("{line}"));
        Ok(())
    }

    /// Changes the size of a memory zone, through the driver of its virtio-mem device.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is no such zone, or the size is not possible.
    pub(crate) fn resize_zone(&mut self, resize: &ResizeZone) -> Result<(), Failure> {
        let next = resize::zone(resize, self.config())?;
        self.set_memory(next, &format!("id={},desired_ram={}", resize.id, resize.desired_ram))
    }

    /// Sets the memory to `next`. `request` prefixes errors.
    fn set_memory(&mut self, next: MemoryConfig, request: &str) -> Result<(), Failure> {
        let mut planned = PlannedVm::clone(&self.planned);
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
        self.planned = Arc::new(planned);
        Ok(())
    }

    /// Changes the size of a disk, and notifies the guest.
    ///
    /// # Errors
    ///
    /// Fails without a change if there is no such disk, or the size is not possible.
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
}
