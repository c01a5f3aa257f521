//! The devices of the host that a VM has, with what they share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use virtio_devices::{GuestMap, Memory, MemoryPeers};
use vm_memory::GuestAddressSpace;

use crate::vfio::error::VfioError;
use crate::vfio::follower::Follower;
use crate::vfio::group::{Group, Space};
use crate::vfio::guest_memory::GuestMemory;
use crate::vfio::host_device::KernelDevice;
use crate::vfio::host_iommu::{HostIommu, Type1};
use crate::vfio::known_groups::KnownGroups;
use crate::vfio::opened::OpenDevice;
use crate::vfio::peer_bars::PeerBars;
use crate::vfio::sysfs::SysfsDevice;
use crate::vfio::watch::Watch;

/// A device of the host that is to be passed through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfioSpec {
    /// Its name in the VM.
    pub id: String,
    /// Its folder in sysfs.
    pub path: PathBuf,
    /// Whether it is behind the guest's virtual IOMMU.
    pub iommu: bool,
    /// The BARs that are not mapped into the guest, 0 to 5.
    pub unmapped_bars: Vec<u8>,
}

/// The devices of the host that a VM has.
pub(crate) struct VfioHost {
    known: Arc<KnownGroups>,
    open: Mutex<Open>,
    /// What the devices reach of each other, if they are to.
    bars: Option<Arc<PeerBars>>,
    /// Made with the first device.
    watch: OnceLock<Arc<Watch>>,
}

#[derive(Default)]
struct Open {
    /// By number. A group is open as long as one of its devices is.
    groups: BTreeMap<u32, Weak<Group>>,
    /// By their folders in sysfs.
    devices: BTreeMap<PathBuf, Weak<()>>,
}

impl Open {
    /// The address space of all groups that reach all of the guest's memory, if there is one.
    fn all(&self) -> Option<Arc<GuestMemory>> {
        self.spaces().into_iter().find_map(|space| match space {
            Space::All(memory) => Some(memory),
            Space::Followed(_) => None,
        })
    }

    /// All address spaces.
    fn spaces(&self) -> Vec<Space> {
        let mut spaces: Vec<_> =
            self.groups.values().filter_map(|group| Some(group.upgrade()?.space().clone())).collect();
        let mut has_all = false;
        spaces.retain(|space| matches!(space, Space::Followed(_)) || !std::mem::replace(&mut has_all, true));
        spaces
    }

    fn is_open(&self, device: &SysfsDevice) -> bool {
        self.devices.get(&device.folder).is_some_and(|open| open.strong_count() > 0)
    }
}

impl VfioHost {
    /// No devices yet. With `p2p`, they will reach each other's BARs.
    pub(crate) fn new(p2p: bool) -> Self {
        let (known, open, watch) = (Arc::default(), Mutex::default(), OnceLock::new());
        Self { known, open, bars: p2p.then(Arc::default), watch }
    }

    /// Which groups KVM knows of.
    pub(crate) fn known_groups(&self) -> &Arc<KnownGroups> {
        &self.known
    }

    /// Where the host says what it wants of the devices, if there ever were any.
    pub(crate) fn watch(&self) -> Option<Arc<Watch>> {
        self.watch.get().cloned()
    }

    /// Opens a device of the host, and lets it reach all of `memory`. The first one pins all of that, which takes its
    /// time; so does each that is behind a virtual IOMMU.
    ///
    /// # Errors
    ///
    /// When it cannot be passed through, or not to this guest. Nothing is open or pinned then that was not before.
    pub(crate) fn open(&self, spec: &VfioSpec, memory: &Memory) -> Result<OpenDevice, VfioError> {
        let mut open = self.open.lock();
        open.devices.retain(|_, open| open.strong_count() > 0);
        open.groups.retain(|_, group| group.strong_count() > 0);
        let device = SysfsDevice::at(&spec.path)?;
        if open.is_open(&device) {
            return Err(VfioError::Taken);
        }
        let group = self.group(&mut open, (spec, &device), memory)?;
        let follower = match group.space() {
            Space::Followed(follower) => Some(Arc::clone(follower)),
            Space::All(_) => None,
        };
        let (host, info) = KernelDevice::open(&device, group)?;
        let watch = match self.watch.get() {
            Some(watch) => watch,
            None => {
                let new = Arc::new(Watch::new().map_err(VfioError::of("watch the device"))?);
                self.watch.get_or_init(|| new)
            }
        };
        let watched = watch.begin(&spec.id, &host, &info).map_err(VfioError::of("watch the device"))?;
        // Says that the device is open, as long as it lives.
        let mark = Arc::new(());
        open.devices.insert(device.folder, Arc::downgrade(&mark));
        let peers = self.bars.clone().map(|bars| bars as Arc<dyn MemoryPeers>);
        Ok(OpenDevice { unmapped_bars: spec.unmapped_bars.clone(), host, info, watched, mark, follower, peers })
    }

    fn group(
        &self,
        open: &mut Open,
        (spec, device): (&VfioSpec, &SysfsDevice),
        memory: &Memory,
    ) -> Result<Arc<Group>, VfioError> {
        if let Some(group) = open.groups.get(&device.group).and_then(Weak::upgrade) {
            return match group.space() {
                Space::All(_) if !spec.iommu => Ok(group),
                _ => Err(VfioError::SharedGroup(device.group)),
            };
        }
        let shared = open.all().filter(|_| !spec.iommu);
        let file = Group::open(device)?;
        let space = match shared {
            Some(memory) => {
                memory.iommu().attach(&file)?;
                Space::All(memory)
            }
            None => {
                let iommu: Arc<dyn HostIommu> = Arc::new(Type1::open()?);
                iommu.attach(&file)?;
                let memory = memory.memory();
                if spec.iommu {
                    Space::Followed(Arc::new(Follower::new(&spec.id, iommu, &memory)?))
                } else {
                    let memory = Arc::new(GuestMemory::new(iommu, &memory)?);
                    self.bars.iter().for_each(|bars| bars.join(&memory));
                    Space::All(memory)
                }
            }
        };
        let group = Arc::new(Group::new(file, space, &self.known));
        open.groups.insert(device.group, Arc::downgrade(&group));
        Ok(group)
    }

    /// Lets all devices reach what is theirs in `memory`, and nothing else.
    ///
    /// # Errors
    ///
    /// When they cannot. They reach what they reached before then.
    pub(crate) fn set_memory(&self, memory: &GuestMap) -> Result<(), VfioError> {
        // Nobody opens a device meanwhile, which would reach what was before.
        let open = self.open.lock();
        let mut changed: Vec<(Space, GuestMap)> = Vec::new();
        for space in open.spaces() {
            let old = space.memory();
            if let Err(error) = space.set_memory(memory) {
                for (space, old) in &changed {
                    if let Err(error) = space.set_memory(old) {
                        log::error!("a device of the host does not reach the guest's memory any more: {error}");
                    }
                }
                return Err(error);
            }
            changed.push((space, old));
        }
        Ok(())
    }
}
