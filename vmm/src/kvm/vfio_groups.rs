//! KVM's VFIO device: the groups whose devices a guest has (`Documentation/virt/kvm/devices/vfio.rst`).

use std::io;
use std::os::fd::RawFd;

use kvm_bindings::{
    KVM_DEV_VFIO_GROUP, KVM_DEV_VFIO_GROUP_ADD, KVM_DEV_VFIO_GROUP_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};

use crate::kvm::error::KvmError;

/// Sets an attribute of the device.
type SetAttribute = Box<dyn Fn(&kvm_device_attr) -> io::Result<()> + Send + Sync>;

/// KVM's list of VFIO groups.
pub(crate) struct VfioGroups(SetAttribute);

impl VfioGroups {
    /// The device to make.
    pub(super) fn device() -> kvm_create_device {
        kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 }
    }

    pub(super) fn new(set: SetAttribute) -> Self {
        Self(set)
    }

    /// Adds the group that is open as `group`, and keeps it open until it is removed.
    ///
    /// # Errors
    ///
    /// When it is no group, or is there already.
    pub(crate) fn add(&self, group: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_GROUP_ADD, group)
    }

    /// Removes the group that is open as `group`.
    ///
    /// # Errors
    ///
    /// When it is not there.
    pub(crate) fn remove(&self, group: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_GROUP_DEL, group)
    }

    fn set(&self, attribute: u32, group: RawFd) -> Result<(), KvmError> {
        let attribute = kvm_device_attr {
            flags: 0,
            group: KVM_DEV_VFIO_GROUP,
            attr: attribute.into(),
            addr: std::ptr::from_ref(&group) as u64,
        };
        (self.0)(&attribute).map_err(|error| KvmError::Ioctl { action: "change KVM's VFIO groups", error })
    }
}
