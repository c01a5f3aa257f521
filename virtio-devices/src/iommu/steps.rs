//! Executes requests one by one on the caller's thread. For fuzz targets.

use std::sync::Arc;

use parking_lot::Mutex;
use vm_memory::Permissions;

use super::counters::IommuCounter;
use super::requests::RequestQueue;
use super::table::Table;
use super::unit::{Iommu, IommuAttachment};
use crate::memory::Translate;
use crate::net::steps::{Step, Stepped};
use crate::queue::ring::Ring;
use crate::{GuestMap, Interrupts, SharedQueue};

/// An IOMMU with a request queue and some endpoints.
pub struct IommuSteps {
    iommu: Arc<Iommu>,
    endpoints: Vec<IommuAttachment>,
    requests: Mutex<RequestQueue>,
}

/// A queue whose rings were found in guest memory.
pub struct IommuQueue;

impl IommuSteps {
    /// Creates an IOMMU with I/O addresses of `address_width` bits and room for `mappings`, whose endpoints are the
    /// first functions of bus 1, and whose driver has this queue.
    pub fn new(memory: GuestMap, queue: &SharedQueue, (address_width, endpoints, mappings): (u8, u8, usize)) -> Self {
        let iommu = Iommu::new(address_width);
        let last = iommu.last_address();
        *iommu.table.lock() = Table::new(last).with_most_mappings(mappings);
        let endpoints =
            (0..endpoints).map(|n| iommu.add_endpoint(0, pci::Rid::from_bits(0x100 | u16::from(n)))).collect();
        let requests = RequestQueue {
            index: 0,
            queue: Arc::clone(queue),
            memory: memory.into(),
            interrupts: Arc::new(Interrupts::new(1, 0)),
            iommu: Arc::clone(&iommu),
        };
        Self { iommu, endpoints, requests: Mutex::new(requests) }
    }

    /// Translates `address` for the endpoint with this index to a guest address, if the access is allowed.
    pub fn translate(&self, endpoint: usize, address: u64, read: bool, write: bool) -> Option<u64> {
        let access = match (read, write) {
            (true, true) => Permissions::ReadWrite,
            (true, false) => Permissions::Read,
            (false, true) => Permissions::Write,
            (false, false) => Permissions::No,
        };
        let endpoint = self.endpoints.get(endpoint)?.endpoint();
        let _pass = endpoint.begin();
        Some(endpoint.translate(address, 1, access)?.0)
    }

    /// The value of a counter.
    pub fn count(&self, counter: IommuCounter) -> u64 {
        self.iommu.common.counters.get(counter)
    }

    /// Numbers of domains and mappings.
    pub fn counts(&self) -> (usize, usize) {
        self.iommu.table.lock().counts()
    }

    /// Sets bypass: endpoints in no domain can access all of memory, or nothing.
    pub fn set_bypass(&self, bypass: bool) {
        self.iommu.set_bypass(bypass);
    }

    /// The driver resets the device.
    pub fn reset(&self) {
        self.iommu.reset();
    }
}

impl Stepped for IommuSteps {
    type Queue<'q> = IommuQueue;

    fn queue(&self, queue: &SharedQueue) -> Option<IommuQueue> {
        let requests = self.requests.lock();
        Ring::open(0, queue.lock(), false, &requests.memory.pass()).ok().map(|_| IommuQueue)
    }

    /// Handles a doorbell.
    fn step(&mut self, _queue: &mut IommuQueue) -> Step {
        let requests = self.requests.get_mut();
        requests.answer_all();
        if requests.interrupts.needs_reset() { Step::Broken } else { Step::Doorbell }
    }

    fn take_interrupt(&self) -> bool {
        self.requests.lock().interrupts.take_isr() & 1 != 0
    }
}
