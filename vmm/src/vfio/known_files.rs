//! The groups and devices that KVM is told of: it has to know whether a device accesses memory past the caches
//! (`Documentation/virt/kvm/devices/vfio.rst`).

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::kvm::{KvmError, VfioFiles, Vm};

/// The groups and devices of a VM, by their files, and the KVM VM that is told of them. A reboot makes another of the
/// latter.
#[derive(Default)]
pub(crate) struct KnownFiles(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Descriptors that are open, in the order in which they came.
    files: Vec<RawFd>,
    vm: Option<Arc<Vm>>,
    /// Made with the first file.
    kvm: Option<VfioFiles>,
}

impl Known {
    /// Tells KVM of a file. A device works without, unless it accesses memory past the caches.
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
    /// Tells `vm` of the files from now on, and keeps it until [`Self::detach`].
    pub(crate) fn attach(&self, vm: &Arc<Vm>) {
        let mut known = self.0.lock();
        known.kvm = None;
        known.vm = Some(Arc::clone(vm));
        for file in known.files.clone() {
            known.tell(file);
        }
    }

    /// Tells nobody any more, so that the KVM VM can be gone.
    pub(crate) fn detach(&self) {
        let mut known = self.0.lock();
        known.kvm = None;
        known.vm = None;
    }

    /// Adds a file that stays open until [`Self::remove`].
    pub(super) fn add(&self, file: BorrowedFd<'_>) {
        let mut known = self.0.lock();
        known.files.push(file.as_raw_fd());
        known.tell(file.as_raw_fd());
    }

    /// Removes a file that is going to be closed.
    pub(super) fn remove(&self, file: BorrowedFd<'_>) {
        let mut known = self.0.lock();
        let fd = file.as_raw_fd();
        known.files.retain(|other| *other != fd);
        known.kvm.iter().for_each(|kvm| complain(kvm.remove(fd)));
    }
}

fn complain(told: Result<(), KvmError>) {
    if let Err(error) = told {
        log::warn!("KVM does not know of a device of the host: {error}");
    }
}
