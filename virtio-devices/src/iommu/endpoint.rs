//! A function as the IOMMU knows it: whose addresses are translated, and by what.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use vm_memory::Permissions;

use super::counters::IommuCounters;
use super::fault::{Fault, Faults, Reason};
use super::gate::Gate;
use super::mappings::Mappings;
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};

/// State that all endpoints of an IOMMU share.
pub(crate) struct Common {
    /// Held by who changes what endpoints reach, until followers have been told: they are told in order, and the
    /// table's lock is free meanwhile. Passes of endpoints without a follower are waited for when it is free again.
    pub order: Mutex<()>,
    /// An endpoint that is in no domain reaches all of the guest's memory.
    pub bypass: AtomicBool,
    /// Faults to report.
    pub faults: Faults,
    /// Counters of the IOMMU.
    pub counters: Arc<IommuCounters>,
}

/// Translation of an endpoint's addresses.
#[derive(Debug, Clone)]
pub(crate) enum Attachment {
    /// It is in no domain: all of the guest's memory, or nothing, as the driver has set it for all such endpoints.
    None,
    /// Domain in bypass: every address is a guest address.
    Bypass,
    /// Mappings of the domain.
    Mapped(Arc<RwLock<Mappings>>),
}

/// A function behind the IOMMU.
///
/// Workers make a pass at a time. When something is taken away, passes that have begun may still use it, and the driver
/// is told when they have ended.
pub struct Endpoint {
    id: u32,
    gate: Gate,
    attachment: ArcSwap<Attachment>,
    follower: Mutex<Option<Arc<dyn DmaFollower>>>,
    common: Arc<Common>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An endpoint in no domain.
    pub(crate) fn new(id: u32, common: Arc<Common>) -> Self {
        let attachment = ArcSwap::from_pointee(Attachment::None);
        Self { id, gate: Gate::default(), attachment, follower: Mutex::new(None), common }
    }

    /// Endpoint number: its segment and its routing ID.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Changes what its addresses stand for. Passes may go by what they stood for until they are waited for.
    pub(crate) fn attach(&self, attachment: Attachment) {
        self.attachment.store(Arc::new(attachment));
    }

    /// Waits until all passes that have begun have ended.
    pub(crate) fn await_passes(&self) {
        self.gate.await_passes();
    }

    /// Follower that copies its mappings, if it has one.
    pub(crate) fn follower(&self) -> Option<Arc<dyn DmaFollower>> {
        self.follower.lock().clone()
    }

    /// Forgets who has to be told: it is no endpoint any more.
    pub(crate) fn leave(&self) {
        *self.follower.lock() = None;
    }

    /// Tells its follower what it reaches now. By who holds [`Common::order`].
    pub(crate) fn tell_reach(&self) -> Result<(), NotFollowed> {
        let Some(follower) = self.follower() else { return Ok(()) };
        match &**self.attachment.load() {
            Attachment::None if !self.common.bypass.load(Ordering::Acquire) => follower.attached(DmaReach::Nothing),
            Attachment::None | Attachment::Bypass => follower.attached(DmaReach::Everything),
            // Only who holds the order would wait for this lock.
            Attachment::Mapped(mappings) => follower.attached(DmaReach::Mapped(&mut mappings.read().iter())),
        }
    }

    /// Result of `find` in a domain's mappings; a fault is reported if there is none. In bypass `identity`.
    fn look_up<T>(
        &self,
        (address, access): (u64, Permissions),
        identity: T,
        find: impl FnOnce(&Mappings) -> Option<T>,
    ) -> Option<T> {
        let found = match &**self.attachment.load() {
            Attachment::None if self.common.bypass.load(Ordering::Acquire) => return Some(identity),
            Attachment::Bypass => return Some(identity),
            Attachment::None => {
                self.fault(Reason::Domain, address, access);
                return None;
            }
            Attachment::Mapped(mappings) => find(&mappings.read()),
        };
        if found.is_none() {
            self.fault(Reason::Mapping, address, access);
        }
        found
    }

    fn fault(&self, reason: Reason, address: u64, access: Permissions) {
        self.common.faults.report(Fault { reason, endpoint: self.id, address, access }, &self.common.counters);
    }
}

impl Translate for Endpoint {
    fn begin(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.begin()
    }

    fn is_bypassed(&self) -> bool {
        match **self.attachment.load() {
            Attachment::None => self.common.bypass.load(Ordering::Acquire),
            Attachment::Bypass => true,
            Attachment::Mapped(_) => false,
        }
    }

    fn translate(&self, address: u64, len: u64, access: Permissions) -> Option<(u64, u64)> {
        self.look_up((address, access), (address, len), |mappings| mappings.translate(address, len, access))
    }

    fn mapping(&self, address: u64, access: Permissions) -> Option<DmaMapping> {
        self.look_up((address, access), DmaMapping::IDENTITY, |mappings| mappings.find(address, access))
    }

    fn follow(&self, follower: Option<Arc<dyn DmaFollower>>) -> Result<(), NotFollowed> {
        let _order = self.common.order.lock();
        *self.follower.lock() = follower;
        self.tell_reach().inspect_err(|NotFollowed| self.leave())
    }
}
