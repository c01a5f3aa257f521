//! The mappings of a vDPA device behind an IOMMU.
//!
//! A device does not ask for translations, so it gets each mapping when that is made, and has dropped it before the
//! driver gets its answer. A device that fails to drop one is reset by then, and closed by its worker. Only its worker
//! maps all of the guest's memory for it, before its queues start, because pinning may take long.
//!
//! **A vCPU can wait for that.** A request for the same function that arrives while the worker pins memory waits until
//! that is done, with the guest's interrupts off, and so do later requests. Avoiding the lock here would change
//! nothing: the kernel has a lock of its own around each change of a device's mappings, and a second change in the
//! middle of a batch would take effect only at the end of the batch.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use log::{error, warn};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::error::{MemoryFault, VdpaFault};
use super::kernel::{BackendFeature, Kernel};
use super::reach;
use crate::GuestMap;
use crate::backend::mapping::Mapping;
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};
use crate::os::eventfd::borrow;

/// The most mappings of a device: each costs memory of the host's kernel, and some devices get all of them at each
/// change.
const MOST: usize = 1 << 16;

/// A device's follower and its IOMMU, until this is dropped.
pub(super) struct Follows {
    /// The IOMMU.
    pub iommu: Arc<dyn Translate>,
    /// The follower of the IOMMU.
    pub follower: Arc<Follower>,
}

impl Follows {
    /// Sends the current mappings to the follower, and from now on their changes.
    pub(super) fn begin(&self) -> io::Result<()> {
        let follower = Arc::clone(&self.follower) as Arc<dyn DmaFollower>;
        self.iommu.follow(Some(follower)).map_err(io::Error::other)
    }

    /// Sets the guest's memory.
    ///
    /// # Errors
    ///
    /// Fails if the device does not accept it.
    pub(super) fn set_memory(&self, memory: &GuestMap) -> Result<(), MemoryFault> {
        let old = std::mem::replace(&mut self.follower.known.lock().memory, memory.clone());
        // The current mappings, with other memory.
        let tell = || self.begin().and_then(|()| self.follower.settle());
        tell().map_err(|error| {
            self.follower.known.lock().memory = old;
            let is_as_before = tell().is_ok() && !self.follower.has_failed();
            MemoryFault { fault: VdpaFault::Map(error), is_as_before }
        })
    }
}

impl Drop for Follows {
    fn drop(&mut self) {
        let _ = self.iommu.follow(None);
    }
}

/// The mappings of a device.
pub(crate) struct Follower {
    kernel: Arc<dyn Kernel>,
    /// The device's path.
    name: String,
    batch: bool,
    known: Mutex<Known>,
    /// The device must get all of the guest's memory, and does not have it yet.
    due: AtomicBool,
    /// The device may access memory that is not mapped for its function.
    failed: AtomicBool,
    /// Signalled in both cases.
    changed: EventFd,
    /// The number of mappings that the device did not accept.
    failures: AtomicU64,
}

struct Known {
    /// The guest's memory, kept mapped.
    memory: GuestMap,
    /// The mappings that were sent to the device, by first address.
    mappings: BTreeMap<u64, Mapping>,
}

impl Follower {
    /// A device that has `mappings`, which cover all of `memory`.
    pub(super) fn new(
        kernel: &Arc<dyn Kernel>,
        name: &str,
        backend_features: u64,
        (memory, mappings): (&GuestMap, &[Mapping]),
    ) -> io::Result<Arc<Self>> {
        let mappings = mappings.iter().map(|mapping| (mapping.iova(), *mapping)).collect();
        Ok(Arc::new(Self {
            kernel: Arc::clone(kernel),
            name: name.to_owned(),
            batch: BackendFeature::Batch.is_in(backend_features),
            known: Mutex::new(Known { memory: memory.clone(), mappings }),
            due: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            changed: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            failures: AtomicU64::new(0),
        }))
    }

    /// The event that asks for [`Self::settle`], with the queues stopped.
    pub(crate) fn watched(&self) -> BorrowedFd<'_> {
        borrow(&self.changed)
    }

    /// True if [`Self::settle`] must be called.
    pub(crate) fn is_due(&self) -> bool {
        let _ = self.changed.read();
        self.due.load(Ordering::Acquire)
    }

    /// True if the device did not drop a mapping on request, and has to be closed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Gives the device all of the guest's memory, if that is due.
    ///
    /// # Errors
    ///
    /// Fails if the device does not accept it.
    pub(super) fn settle(&self) -> io::Result<()> {
        let known = &mut *self.known.lock();
        if self.due.load(Ordering::Acquire) {
            let all = Mapping::all_of(&known.memory);
            self.change(known, all)?;
            self.due.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Sends all mappings again to a device that may have forgotten them.
    ///
    /// # Errors
    ///
    /// Fails if the device does not accept them.
    pub(super) fn map_again(&self) -> io::Result<()> {
        let known = self.known.lock();
        let mappings: Vec<_> = known.mappings.values().copied().collect();
        reach::map_again(&*self.kernel, &mappings, self.batch)
    }

    /// The mappings that were sent to the device.
    pub(super) fn mappings(&self) -> Vec<Mapping> {
        self.known.lock().mappings.values().copied().collect()
    }

    /// Changes the device's mappings to `wanted`. If it does not accept that, it keeps those of them that it had
    /// before.
    fn change(&self, known: &mut Known, wanted: Vec<Mapping>) -> io::Result<()> {
        let wanted: BTreeMap<_, _> = wanted.into_iter().map(|mapping| (mapping.iova(), mapping)).collect();
        let only_in = |these: &BTreeMap<u64, Mapping>, those: &BTreeMap<u64, Mapping>| -> Vec<Mapping> {
            these.values().filter(|mapping| those.get(&mapping.iova()) != Some(mapping)).copied().collect()
        };
        let (gone, came) = (only_in(&known.mappings, &wanted), only_in(&wanted, &known.mappings));
        if gone.is_empty() && came.is_empty() {
            return Ok(());
        }
        if let Err(error) = reach::change(&*self.kernel, &gone, &came, self.batch) {
            known.mappings.retain(|iova, mapping| wanted.get(iova) == Some(mapping));
            self.take_away(&[gone, came].concat(), self.batch);
            return Err(error);
        }
        known.mappings = wanted;
        Ok(())
    }

    /// Removes `mappings`, of which the device may have any, after a change that failed.
    fn take_away(&self, mappings: &[Mapping], batch: bool) {
        if let Err(error) = reach::change_back(&*self.kernel, mappings, &[], batch) {
            self.fail(&error);
        }
    }

    /// Resets a device that did not drop a mapping on request: it accesses nothing then, and is not started again, but
    /// closed.
    fn fail(&self, error: &io::Error) {
        // In this order: the thread that starts the device checks this flag afterwards.
        if self.failed.swap(true, Ordering::AcqRel) {
            return;
        }
        let _ = self.changed.write(1);
        let name = &self.name;
        error!("{name}: the device does not forget memory: {error}; it is reset, and opened again");
        if let Err(error) = self.kernel.set_status(0) {
            error!("{name}: the device may still reach memory that its guest has taken from it: {error}");
        }
    }

    /// Checks that the device has room for `count` mappings.
    fn has_room(&self, count: usize) -> io::Result<()> {
        if count <= MOST { Ok(()) } else { Err(io::Error::other(format!("it can have {MOST} mappings"))) }
    }

    /// Logs the reason why the device cannot follow.
    fn refuse(&self, error: &io::Error) -> NotFollowed {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        // Logged at powers of two, so that a driver cannot fill the log.
        if failures.is_power_of_two() {
            warn!("{}: the device does not take a mapping ({failures} so far): {error}", self.name);
        }
        NotFollowed
    }
}

impl DmaFollower for Follower {
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed> {
        let known = &mut *self.known.lock();
        let came: Vec<_> = Mapping::of(mapping, &known.memory).collect();
        let taken = self.has_room(known.mappings.len() + came.len()).and_then(|()| {
            let batch = self.batch && came.len() > 1;
            reach::change(&*self.kernel, &[], &came, batch).inspect_err(|_| self.take_away(&came, batch))
        });
        taken.map_err(|error| self.refuse(&error))?;
        known.mappings.extend(came.into_iter().map(|mapping| (mapping.iova(), mapping)));
        Ok(())
    }

    fn unmapped(&self, mappings: &[DmaMapping]) {
        let (Some(first), Some(last)) = (mappings.first(), mappings.last()) else { return };
        let known = &mut *self.known.lock();
        let gone: Vec<_> = known.mappings.range(first.first..=last.last).map(|(_, mapping)| *mapping).collect();
        for mapping in &gone {
            known.mappings.remove(&mapping.iova());
        }
        if gone.is_empty() {
            return;
        }
        if let Err(error) = reach::change(&*self.kernel, &gone, &[], self.batch && gone.len() > 1) {
            self.fail(&error);
        }
    }

    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed> {
        let known = &mut *self.known.lock();
        self.due.store(false, Ordering::Release);
        let wanted = match reach {
            DmaReach::Nothing => Vec::new(),
            DmaReach::Everything => {
                let mut all = Mapping::all_of(&known.memory);
                let count = all.len();
                // The device keeps what it has: its queues may run.
                all.retain(|mapping| known.mappings.get(&mapping.iova()) == Some(mapping));
                if all.len() < count {
                    // Pinning the rest may take long.
                    self.due.store(true, Ordering::Release);
                    let _ = self.changed.write(1);
                }
                all
            }
            DmaReach::Mapped(mappings) => {
                let parts = mappings.flat_map(|mapping| Mapping::of(mapping, &known.memory));
                parts.take(MOST + 1).collect()
            }
        };
        let fits = self.has_room(wanted.len());
        let wanted = if fits.is_ok() { wanted } else { Vec::new() };
        self.change(known, wanted).and(fits).map_err(|error| self.refuse(&error))
    }
}
