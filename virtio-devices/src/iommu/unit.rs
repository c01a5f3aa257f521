//! The IOMMU of a VM, shared by devices and the function of its driver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::change::{Change, Passes, Unfinished};
use super::counters::IommuCounters;
use super::endpoint::{Common, Endpoint};
use super::fault::Faults;
use super::request::Request;
use super::status::Status;
use super::table::Table;
use crate::memory::{DmaFollower, NotFollowed, Translate};

/// The supported widths of I/O addresses, in bits.
pub const ADDRESS_WIDTHS: std::ops::RangeInclusive<u8> = 32..=64;

/// The IOMMU of a VM: its endpoints, domains and mappings. Its driver uses it through an
/// [`IommuDevice`](super::IommuDevice).
pub struct Iommu {
    pub(super) table: Mutex<Table>,
    pub(super) common: Arc<Common>,
}

impl Iommu {
    /// Creates an IOMMU without endpoints, whose I/O addresses have `address_width` bits, of [`ADDRESS_WIDTHS`].
    pub fn new(address_width: u8) -> Arc<Self> {
        let unused = u64::BITS.saturating_sub(u32::from(address_width));
        let table = Table::new(u64::MAX.checked_shr(unused).unwrap_or(0));
        let (bypass, counters) = (AtomicBool::new(true), Arc::new(IommuCounters::new()));
        let common = Arc::new(Common { order: Mutex::default(), bypass, faults: Faults::default(), counters });
        Arc::new(Self { table: Mutex::new(table), common })
    }

    /// Adds the function at `rid` of `segment`, in no domain. It is an endpoint until the returned value is dropped.
    pub fn add_endpoint(self: &Arc<Self>, segment: u16, rid: pci::Rid) -> IommuAttachment {
        let id = u32::from(segment) << 16 | u32::from(rid.to_bits());
        let endpoint = Arc::new(Endpoint::new(id, Arc::clone(&self.common)));
        self.take_away(|table| table.add(Arc::clone(&endpoint)));
        IommuAttachment { iommu: Arc::clone(self), endpoint }
    }

    /// Counters of the unit.
    pub fn counters(&self) -> Arc<IommuCounters> {
        Arc::clone(&self.common.counters)
    }

    /// Returns to the power-on state: all endpoints are in no domain, and can access all of the guest's memory.
    pub fn power_on(&self) {
        self.reset();
        self.set_bypass(true);
    }

    /// Detaches and unmaps everything after a reset by the driver. Bypass of endpoints in no domain stays.
    pub(super) fn reset(&self) {
        self.take_away(Table::reset);
    }

    /// Makes a change that only removes mappings, and so cannot be refused. When this returns, unmapped memory is
    /// unreachable. A follower that cannot reach all of memory instead reports that itself.
    fn take_away(&self, change: impl FnOnce(&mut Table) -> Change) {
        let order = self.common.order.lock();
        let change = change(&mut self.table.lock());
        let (_, passes) = change.tell();
        drop(order);
        passes.wait();
    }

    pub(super) fn bypass(&self) -> bool {
        self.common.bypass.load(Ordering::Acquire)
    }

    /// Lets endpoints in no domain access all of the guest's memory, or nothing.
    pub(crate) fn set_bypass(&self, bypass: bool) {
        self.take_away(|table| {
            let is_new = self.common.bypass.swap(bypass, Ordering::AcqRel) != bypass;
            if is_new { table.bypass_changed() } else { Change::None }
        });
    }

    pub(super) fn last_address(&self) -> u64 {
        self.table.lock().last_address()
    }

    /// Executes a request. When this returns, memory that it unmapped is unreachable.
    ///
    /// # Errors
    ///
    /// The status for the fault. Nothing has changed then, except that an endpoint whose follower failed on an attach
    /// is in no domain.
    pub(crate) fn carry_out(&self, request: Request) -> Result<(), Status> {
        let order = self.common.order.lock();
        let change = self.table.lock().carry_out(request)?;
        let (told, passes) = change.tell();
        let (answer, undone) = match told {
            Ok(()) => (Ok(()), Passes::default()),
            Err(unfinished) => self.undo(request, unfinished),
        };
        drop(order);
        passes.wait();
        undone.wait();
        answer
    }

    /// Undoes a request after a follower failed; the caller holds the order. Returns the status of the request, and the
    /// passes to wait for before it completes.
    fn undo(&self, request: Request, unfinished: Unfinished) -> (Result<(), Status>, Passes) {
        let undone = match request {
            Request::Map { domain, range, .. } => self.table.lock().carry_out(Request::Unmap { domain, range }),
            Request::Attach { domain, endpoint, .. } => {
                self.table.lock().carry_out(Request::Detach { domain, endpoint })
            }
            // The driver must not reuse the memory.
            Request::Detach { .. } | Request::Unmap { .. } if unfinished == Unfinished::NotTaken => {
                return (Err(Status::DeviceError), Passes::default());
            }
            // A follower that cannot reach the memory given back logs that itself.
            Request::Detach { .. } | Request::Unmap { .. } | Request::Probe { .. } => {
                return (Ok(()), Passes::default());
            }
        };
        (Err(Status::NoMemory), undone.map_or_else(|_| Passes::default(), |change| change.tell().1))
    }
}

impl std::fmt::Debug for Iommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Iommu").field("bypass", &self.bypass()).finish_non_exhaustive()
    }
}

/// Registration of a function behind an IOMMU, which ends when this is dropped.
#[derive(Debug)]
pub struct IommuAttachment {
    iommu: Arc<Iommu>,
    endpoint: Arc<Endpoint>,
}

impl IommuAttachment {
    /// Endpoint that translates the function's addresses.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Notifies only `follower` of the function's mappings: first of the present ones, then of each change, until this
    /// is dropped. See [`DmaFollower`].
    ///
    /// # Errors
    ///
    /// [`NotFollowed`] if the follower cannot take the present mappings. It gets no further notifications then.
    pub fn follow(&self, follower: Arc<dyn DmaFollower>) -> Result<(), NotFollowed> {
        self.endpoint.follow(Some(follower))
    }
}

impl Drop for IommuAttachment {
    fn drop(&mut self) {
        self.iommu.take_away(|table| {
            // Another function may have been added at the same address since.
            let is_own = table.endpoint(self.endpoint.id()).is_some_and(|own| Arc::ptr_eq(own, &self.endpoint));
            if is_own { table.remove(self.endpoint.id()) } else { Change::None }
        });
    }
}
