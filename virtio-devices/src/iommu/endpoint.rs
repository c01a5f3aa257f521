//! A function behind the IOMMU: its addresses are translated.

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
    /// Held while mappings change, until followers have been notified in order; the table's lock is not held for that.
    /// Passes of endpoints without a follower are waited for after its release.
    pub order: Mutex<()>,
    /// True if an endpoint in no domain can access all of the guest's memory.
    pub bypass: AtomicBool,
    /// Faults to report.
    pub faults: Faults,
    /// Counters of the IOMMU.
    pub counters: Arc<IommuCounters>,
}

/// Translation of an endpoint's addresses.
#[derive(Debug, Clone)]
pub(crate) enum Attachment {
    /// In no domain: all of the guest's memory, or nothing, as the driver has set it for all such endpoints.
    None,
    /// In a bypass domain: every address is a guest physical address.
    Bypass,
    /// Mappings of the domain.
    Mapped(Arc<RwLock<Mappings>>),
}

/// A function behind the IOMMU.
///
/// Workers translate in passes. Passes that have begun may still use a removed mapping; the driver's request completes
/// when they have ended.
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

    /// Changes its mappings. Passes may use the old ones until they are waited for.
    pub(crate) fn attach(&self, attachment: Attachment) {
        self.attachment.store(Arc::new(attachment));
    }

    /// Waits for the end of all passes that have begun.
    pub(crate) fn await_passes(&self) {
        self.gate.await_passes();
    }

    /// Follower that copies its mappings, if it has one.
    pub(crate) fn follower(&self) -> Option<Arc<dyn DmaFollower>> {
        self.follower.lock().clone()
    }

    /// Removes its follower: it is no longer an endpoint.
    pub(crate) fn leave(&self) {
        *self.follower.lock() = None;
    }

    /// Notifies its follower of its present mappings. The caller holds [`Common::order`].
    pub(crate) fn tell_reach(&self) -> Result<(), NotFollowed> {
        let Some(follower) = self.follower() else { return Ok(()) };
        match &**self.attachment.load() {
            Attachment::None if !self.common.bypass.load(Ordering::Acquire) => follower.attached(DmaReach::Nothing),
            Attachment::None | Attachment::Bypass => follower.attached(DmaReach::Everything),
            // Never waits: a writer of the mappings holds `Common::order`, which the caller holds.
            Attachment::Mapped(mappings) => follower.attached(DmaReach::Mapped(&mut mappings.read().iter())),
        }
    }

    /// Applies `find` to a domain's mappings; reports a fault if it finds none. In bypass, returns `identity`.
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
