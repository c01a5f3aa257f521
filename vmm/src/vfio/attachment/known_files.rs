//! The groups and devices that KVM tracks, because a device may access memory past the caches
//! (`Documentation/virt/kvm/devices/vfio.rst`).

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::kvm::{KvmError, VfioFiles, Vm};

/// The files of a VM's groups and devices, and the KVM VM that tracks them. Each reboot creates another KVM VM.
#[derive(Default)]
pub(crate) struct KnownFiles(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Open descriptors, in the order in which they were added.
    files: Vec<RawFd>,
    vm: Option<Arc<Vm>>,
    /// Created with the first file.
    kvm: Option<VfioFiles>,
}

impl Known {
    /// Adds a file to KVM's. A device works without this, unless it accesses memory past the caches.
    fn tell(&mut self, file: RawFd) {
        let Some(vm) = &self.vm else { return };
        let mut told = Ok(());
        if self.kvm.is_none() {
            match vm.vfio_files() {
                Ok(kvm) => self.kvm = Some(kvm),
                Err(error) => told = Err(error),
            }
        }
        if let Some(kvm) = &self.kvm {
            told = kvm.add(file);
        }
        complain(told);
    }
}

impl KnownFiles {
    /// Registers all files with `vm`, now and later, and keeps `vm` until [`Self::detach`].
    pub(crate) fn attach(&self, vm: &Arc<Vm>) {
        let mut known = self.0.lock();
        known.kvm = None;
        known.vm = Some(Arc::clone(vm));
        for file in known.files.clone() {
            known.tell(file);
        }
    }

    /// Stops registering files, and releases the KVM VM.
    pub(crate) fn detach(&self) {
        let mut known = self.0.lock();
        known.kvm = None;
        known.vm = None;
    }

    /// Adds a file that stays open until [`Self::remove`].
    pub(crate) fn add(&self, file: BorrowedFd<'_>) {
        let mut known = self.0.lock();
        known.files.push(file.as_raw_fd());
        known.tell(file.as_raw_fd());
    }

    /// Removes a file that will be closed.
    pub(crate) fn remove(&self, file: BorrowedFd<'_>) {
        let mut known = self.0.lock();
        let fd = file.as_raw_fd();
        known.files.retain(|other| *other != fd);
        known.kvm.iter().for_each(|kvm| complain(kvm.remove(fd)));
    }
}

fn complain(told: Result<(), KvmError>) {
    if let Err(error) = told {
        log::warn!("KVM does not take a device of the host: {error}");
    }
}
