//! The host devices of a VM, and the state that they share.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use virtio_devices::{GuestMap, Memory, MemoryPeers};
use vm_memory::GuestAddressSpace;

use crate::vfio::attachment::attached::{Attached, AttachedFile};
use crate::vfio::attachment::known_files::KnownFiles;
use crate::vfio::attachment::{cdev, group, rebound};
use crate::vfio::error::VfioError;
use crate::vfio::function::watch::Watch;
use crate::vfio::host_device::KernelDevice;
use crate::vfio::kernel::sysfs::SysfsDevice;
use crate::vfio::memory::follower::Follower;
use crate::vfio::memory::guest_memory::GuestMemory;
use crate::vfio::memory::host_iommu::{HostIommu, Type1};
use crate::vfio::memory::iommufd::Iommufd;
use crate::vfio::memory::peer_bars::PeerBars;
use crate::vfio::memory::space::Space;
use crate::vfio::opened::OpenDevice;
use crate::vfio::spec::{VfioInterface, VfioSpec};

/// The host devices of a VM.
pub(crate) struct VfioHost {
    known: Arc<KnownFiles>,
    open: Mutex<Open>,
    /// True if devices should reach each other's BARs.
    p2p: bool,
    /// BARs that the devices reach of each other.
    bars: Arc<PeerBars>,
    /// Created with the first device.
    watch: OnceLock<Arc<Watch>>,
}

#[derive(Default)]
struct Open {
    /// Attached groups and devices, each while one of its devices is open.
    attached: Vec<Weak<Attached>>,
    /// Open devices by their folders in sysfs.
    devices: BTreeMap<PathBuf, Weak<()>>,
    /// Open while a device uses it.
    iommufd: Weak<Iommufd>,
    /// True once it was logged that devices do not reach each other's BARs with iommufd.
    warned: bool,
}

impl Open {
    /// Objects that are attached.
    fn attached(&self) -> impl Iterator<Item = Arc<Attached>> {
        self.attached.iter().filter_map(Weak::upgrade)
    }

    /// The address space that has all of the guest's memory, if there is one.
    fn all(&self) -> Option<Arc<GuestMemory>> {
        self.attached().find_map(|attached| attached.space().all().cloned())
    }

    /// All address spaces. Sources of copied mappings come before the spaces with the copies.
    fn spaces(&self) -> Vec<Space> {
        let followed = self.attached().map(|attached| attached.space().clone());
        let followed = followed.filter(|space| matches!(space, Space::Followed { .. }));
        self.all().map(Space::All).into_iter().chain(followed).collect()
    }

    fn is_open(&self, device: &SysfsDevice) -> bool {
        self.devices.get(&device.folder).is_some_and(|open| open.strong_count() > 0)
    }

    /// The iommufd of all devices.
    fn iommufd(&mut self, given: Option<RawFd>) -> Result<Arc<Iommufd>, VfioError> {
        if let Some(iommufd) = self.iommufd.upgrade() {
            return Ok(iommufd);
        }
        let iommufd = Arc::new(Iommufd::open(given)?);
        self.iommufd = Arc::downgrade(&iommufd);
        Ok(iommufd)
    }
}

impl VfioHost {
    /// No devices yet. With `p2p`, devices will reach each other's BARs.
    pub(crate) fn new(p2p: bool) -> Self {
        let (known, open, watch) = (Arc::default(), Mutex::default(), OnceLock::new());
        Self { known, open, p2p, bars: Arc::default(), watch }
    }

    /// Groups and devices that KVM tracks.
    pub(crate) fn known_files(&self) -> &Arc<KnownFiles> {
        &self.known
    }

    /// Watch of the host's notices about the devices, if a device was ever opened.
    pub(crate) fn watch(&self) -> Option<Arc<Watch>> {
        self.watch.get().cloned()
    }

    /// Opens a host device, and maps all of `memory` for it. The first device pins all of that, which takes time; so
    /// does each device behind a virtual IOMMU.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot be passed through, or not to this guest. All that was opened or pinned for it is
    /// released then.
    pub(crate) fn open(&self, spec: &VfioSpec, memory: &Memory) -> Result<OpenDevice, VfioError> {
        let mut open = self.open.lock();
        open.devices.retain(|_, open| open.strong_count() > 0);
        open.attached.retain(|attached| attached.strong_count() > 0);
        let (device, passed) = spec.source.find()?;
        if open.is_open(&device) {
            return Err(VfioError::Taken);
        }
        let attached = self.attach(&mut open, spec, &device, passed, memory)?;
        let follower = match attached.space() {
            Space::Followed { follower, .. } => Some(Arc::clone(follower)),
            Space::All(_) => None,
        };
        let (host, info) = KernelDevice::open(&device, attached)?;
        let watch = match self.watch.get() {
            Some(watch) => watch,
            None => {
                let new = Arc::new(Watch::new().map_err(VfioError::of("watch the device"))?);
                self.watch.get_or_init(|| new)
            }
        };
        let watched = watch.begin(&spec.id, &host, &info).map_err(VfioError::of("watch the device"))?;
        // The device is open as long as the mark lives.
        let mark = Arc::new(());
        open.devices.insert(device.folder, Arc::downgrade(&mark));
        let peers = self.reaches_bars(spec).then(|| Arc::clone(&self.bars) as Arc<dyn MemoryPeers>);
        Ok(OpenDevice { unmapped_bars: spec.unmapped_bars.clone(), host, info, watched, mark, follower, peers })
    }

    /// True if devices reach each other's BARs: with iommufd they reach memory only.
    fn reaches_bars(&self, spec: &VfioSpec) -> bool {
        self.p2p && spec.interface == VfioInterface::Groups
    }

    /// Attaches `device`, or its group, to the address space that `spec` requires. `passed` is the device's file, if
    /// this process was given it.
    fn attach(
        &self,
        open: &mut Open,
        spec: &VfioSpec,
        device: &SysfsDevice,
        passed: Option<OwnedFd>,
        memory: &Memory,
    ) -> Result<Arc<Attached>, VfioError> {
        let sibling = open.attached().find(|other| other.group() == device.group);
        let has_sibling = sibling.is_some();
        if let Some(other) = sibling {
            if spec.iommu || matches!(other.space(), Space::Followed { .. }) {
                return Err(VfioError::SharedGroup(device.group));
            }
            if other.is_group() {
                return Ok(other);
            }
        }
        let (file, iommufd) = match spec.interface {
            VfioInterface::Groups => (AttachedFile::Group(group::open(device)?), None),
            VfioInterface::Iommufd(given) => {
                let iommufd = open.iommufd(given)?;
                let is_passed = passed.is_some();
                let file = passed.map_or_else(|| cdev::open(device), Ok)?;
                if cdev::bind(device, &file, &iommufd, is_passed)? {
                    rebound::take_over(&file, iommufd.file(), has_sibling)?;
                }
                (AttachedFile::Device(file), Some(iommufd))
            }
        };
        let all = open.all();
        if all.is_some() && self.p2p && iommufd.is_some() && !std::mem::replace(&mut open.warned, true) {
            log::warn!(
                "devices of the host do not reach each other's BARs by iommufd; they work without, and --platform \
                 vfio_p2p_dma=off says that they need not"
            );
        }
        let space = self.space(spec, &file, iommufd.as_ref(), all, memory)?;
        let attached = Arc::new(Attached::new(file, space, device.group, &self.known));
        open.attached.push(Arc::downgrade(&attached));
        Ok(attached)
    }

    /// Attaches `file` to the address space that `spec` requires: that of `all`, which has all of the guest's memory,
    /// or one of its own.
    fn space(
        &self,
        spec: &VfioSpec,
        file: &AttachedFile,
        iommufd: Option<&Arc<Iommufd>>,
        all: Option<Arc<GuestMemory>>,
        memory: &Memory,
    ) -> Result<Space, VfioError> {
        let memory = memory.memory();
        let new = || -> Result<Arc<dyn HostIommu>, VfioError> {
            match iommufd {
                Some(iommufd) => Ok(Arc::new(iommufd.space()?)),
                None => Ok(Arc::new(Type1::open()?)),
            }
        };
        if let Some(all) = all.as_ref().filter(|_| !spec.iommu) {
            all.attach(file.file().as_fd())?;
            return Ok(Space::All(Arc::clone(all)));
        }
        let all = match all {
            // The source of copied mappings. Without devices, nothing of it is pinned.
            None if spec.iommu && iommufd.is_some() => Some(Arc::new(GuestMemory::new(new()?, &memory)?)),
            all => all.filter(|_| iommufd.is_some()),
        };
        let iommu = match &all {
            Some(all) => Arc::clone(all.iommu()).beside()?,
            None => new()?,
        };
        // The addresses that the device reaches are known once it is attached.
        iommu.attach(file.file().as_fd())?;
        let made = if spec.iommu {
            let follower = Follower::new(&spec.id, Arc::clone(&iommu), &memory);
            follower.map(|follower| Space::Followed { follower: Arc::new(follower), all })
        } else {
            GuestMemory::new(Arc::clone(&iommu), &memory).map(|memory| Space::All(Arc::new(memory)))
        };
        if let Ok(Space::All(memory)) = &made
            && self.reaches_bars(spec)
        {
            self.bars.join(memory);
        }
        // While the device is attached, the address space cannot be destroyed.
        made.inspect_err(|_| file.detach())
    }

    /// Maps for each device its part of `memory`, and nothing else.
    ///
    /// # Errors
    ///
    /// Fails if a device cannot reach it. All devices reach their former memory then.
    pub(crate) fn set_memory(&self, memory: &GuestMap) -> Result<(), VfioError> {
        // The lock keeps devices from being opened in the meantime, with the former memory.
        let open = self.open.lock();
        let mut changed: Vec<(Space, GuestMap)> = Vec::new();
        for space in open.spaces() {
            let old = space.memory();
            if let Err(error) = space.set_memory(memory) {
                for (space, old) in &changed {
                    if let Err(error) = space.set_memory(old) {
                        log::error!("a device of the host no longer reaches the guest's memory: {error}");
                    }
                }
                return Err(error);
            }
            changed.push((space, old));
        }
        Ok(())
    }
}
