//! Memory that a host device reaches behind the guest's virtual IOMMU: the mappings of its domain, in an address space
//! of its own. It follows each request before the reply to the guest's driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use virtio_devices::{DmaFollower, DmaMapping, DmaReach, GuestMap, NotFollowed};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, Permissions};

use crate::vfio::error::VfioError;
use crate::vfio::memory::address_space::{AddressSpace, pinning};
use crate::vfio::memory::guest_memory::{added, identity};
use crate::vfio::memory::host_iommu::HostIommu;
use crate::vfio::piece::Piece;
use crate::vfio::seldom::counted;

/// An address space that follows a domain of the virtual IOMMU.
pub(crate) struct Follower {
    /// The device's name in the VM.
    id: String,
    state: Mutex<State>,
    /// Number of changes that failed.
    refused: AtomicU64,
    /// Numbers of times that the kernel unmapped less than requested, and nothing at all.
    untaken: [AtomicU64; 2],
}

struct State {
    // Drop order: devices lose their mappings before this process unmaps the memory.
    space: AddressSpace,
    memory: GuestMap,
    reach: Reach,
}

/// Memory that the device reaches.
enum Reach {
    Nothing,
    Everything,
    /// The domain's mappings by their first addresses, up to the host IOMMU's limit; also those without memory, which
    /// may be added later.
    Mapped(BTreeMap<u64, DmaMapping>),
}

impl Reach {
    /// Pieces of `memory` within reach.
    fn pieces(&self, memory: &GuestMap) -> Vec<Piece> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Everything => identity(memory),
            Self::Mapped(mappings) => mappings.values().flat_map(|mapping| pieces(mapping, memory)).collect(),
        }
    }
}

/// The parts of `mapping` that are memory. The device does not reach the rest (BARs that the guest's VFIO maps).
fn pieces(mapping: &DmaMapping, memory: &GuestMap) -> Vec<Piece> {
    let DmaMapping { first, last, target, access } = *mapping;
    // A mapping without permissions cannot be made.
    let end = Some(target.saturating_add(last - first)).filter(|_| access != Permissions::No);
    let part = |(start, len, host): (u64, u64, u64)| {
        let (from, to) = (target.max(start), end?.min(start.checked_add(len)?.checked_sub(1)?));
        let size = to.checked_sub(from)?.checked_add(1)?;
        Some(Piece { iova: first + (from - target), size, host: host + (from - start), access })
    };
    let regions = memory.iter().map(|region| (region.start_addr().raw_value(), region.len(), region.as_ptr() as u64));
    regions.filter_map(part).collect()
}

impl Follower {
    /// The address space of the device `id`, which reaches all of `memory` until a request changes that.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot reach the memory. None of it is mapped then.
    pub(crate) fn new(id: &str, iommu: Arc<dyn HostIommu>, memory: &GuestMap) -> Result<Self, VfioError> {
        let state = State { space: AddressSpace::new(iommu), memory: GuestMap::new(), reach: Reach::Everything };
        let (refused, untaken) = (AtomicU64::new(0), Default::default());
        let this = Self { id: id.to_string(), state: Mutex::new(state), refused, untaken };
        this.set_memory(memory)?;
        Ok(this)
    }

    /// Replaces the guest's memory by `memory`, and maps the parts of it that the domain maps.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot reach it. The former memory stays mapped then.
    pub(crate) fn set_memory(&self, memory: &GuestMap) -> Result<(), VfioError> {
        let state = &mut *self.state.lock();
        let (size, wanted) = (added(memory, &state.memory), state.reach.pieces(memory));
        // SAFETY: the pieces are mappings of guest memory, to which no references are made. They stay in
        // `state.memory`, or with the caller, until they are unmapped.
        pinning(state.space.counted(), size, || unsafe { state.space.set(&wanted) })?;
        state.memory = memory.clone();
        Ok(())
    }

    /// The guest's memory.
    pub(crate) fn memory(&self) -> GuestMap {
        self.state.lock().memory.clone()
    }

    /// Number of changes that failed.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Maps exactly `reach` for the device.
    fn replace(&self, state: &mut State, reach: Reach) -> Result<(), VfioError> {
        let wanted = reach.pieces(&state.memory);
        // SAFETY: the pieces are mappings of guest memory, to which no references are made. They stay in
        // `state.memory` until they are unmapped.
        let replaced = unsafe { state.space.set(&wanted) };
        match &replaced {
            Ok(()) => state.reach = reach,
            // The kernel has restored the former mappings.
            Err(_) => self.empty(state),
        }
        replaced
    }

    /// Unmaps everything. If the kernel fails to unmap a piece, the next change tries again.
    fn empty(&self, state: &mut State) {
        state.reach = Reach::Nothing;
        let [_, all] = &self.untaken;
        if let Err(error) = state.space.clear()
            && counted(all)
        {
            log::error!("{}: the device may still reach memory that its guest has taken from it: {error}", self.id);
        }
    }

    /// Counts and logs a mapping that the device cannot reach.
    fn refuse(&self, error: &VfioError) -> NotFollowed {
        if counted(&self.refused) {
            log::warn!("{}: the device cannot follow its virtual IOMMU: {error}", self.id);
        }
        NotFollowed
    }
}

/// The first `most` of `mappings`, the most that a host device can have, and true if those were all.
fn taken(mut mappings: &mut dyn Iterator<Item = DmaMapping>, most: usize) -> (BTreeMap<u64, DmaMapping>, bool) {
    let taken = (&mut mappings).take(most).map(|mapping| (mapping.first, mapping)).collect();
    (taken, mappings.next().is_none())
}

impl DmaFollower for Follower {
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed> {
        let state = &mut *self.state.lock();
        let Reach::Mapped(mappings) = &mut state.reach else { return Ok(()) };
        let most = state.space.most();
        if mappings.len() >= most {
            return Err(self.refuse(&VfioError::TooManyMappings(most)));
        }
        let pieces = pieces(&mapping, &state.memory);
        // SAFETY: the pieces are mappings of guest memory, to which no references are made. They stay in
        // `state.memory` until they are unmapped.
        unsafe { state.space.add(&pieces) }.map_err(|error| self.refuse(&error))?;
        mappings.insert(mapping.first, mapping);
        Ok(())
    }

    fn unmapped(&self, gone: &[DmaMapping]) {
        let state = &mut *self.state.lock();
        let Reach::Mapped(mappings) = &mut state.reach else { return };
        for mapping in gone {
            mappings.remove(&mapping.first);
        }
        let (Some(first), Some(last)) = (gone.first(), gone.last()) else { return };
        if let Err(error) = state.space.remove(first.first, last.last) {
            let [some, _] = &self.untaken;
            if counted(some) {
                log::error!("{}: cannot take memory from a device of the host: {error}; all is taken from it", self.id);
            }
            // The device could reach all that was left.
            self.empty(state);
        }
    }

    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed> {
        let state = &mut *self.state.lock();
        let most = state.space.most();
        let (reach, complete) = match reach {
            DmaReach::Nothing => (Reach::Nothing, true),
            DmaReach::Everything => (Reach::Everything, true),
            DmaReach::Mapped(mappings) => {
                let (mappings, complete) = taken(mappings, most);
                (Reach::Mapped(mappings), complete)
            }
        };
        let reach = if complete { reach } else { Reach::Nothing };
        let replaced = self.replace(state, reach).map_err(|error| self.refuse(&error));
        if complete { replaced } else { Err(self.refuse(&VfioError::TooManyMappings(most))) }
    }
}

#[cfg(test)]
mod tests;
