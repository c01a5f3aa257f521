//! KVM's VFIO device: the files of a guest's groups and devices (`Documentation/virt/kvm/devices/vfio.rst`).

use std::io;
use std::os::fd::RawFd;

use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};

use crate::kvm::error::KvmError;

/// Sets an attribute of the device.
type SetAttribute = Box<dyn Fn(&kvm_device_attr) -> io::Result<()> + Send + Sync>;

/// KVM's list of VFIO files.
pub struct VfioFiles(SetAttribute);

impl VfioFiles {
    /// The arguments that create the device.
    pub(super) fn device() -> kvm_create_device {
        kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 }
    }

    pub(super) fn new(set: SetAttribute) -> Self {
        Self(set)
    }

    /// Adds the group or device that is open as `file`. KVM keeps it open until it is removed.
    ///
    /// # Errors
    ///
    /// Fails if it is neither, or was added already.
    pub fn add(&self, file: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_FILE_ADD, file)
    }

    /// Removes the group or device that is open as `file`.
    ///
    /// # Errors
    ///
    /// Fails if it was not added.
    pub fn remove(&self, file: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_FILE_DEL, file)
    }

    fn set(&self, attribute: u32, file: RawFd) -> Result<(), KvmError> {
        let attribute = kvm_device_attr {
            flags: 0,
            group: KVM_DEV_VFIO_FILE,
            attr: attribute.into(),
            addr: std::ptr::from_ref(&file) as u64,
        };
        (self.0)(&attribute).map_err(|error| KvmError::Ioctl { action: "change KVM's VFIO files", error })
    }
}
