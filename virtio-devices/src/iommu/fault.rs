//! Failed accesses of endpoints, to be reported to the driver (`virtio 1.4 §5.13.6.9`).

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use vm_memory::Permissions;
use vmm_sys_util::eventfd::EventFd;

use super::counters::{IommuCounter, IommuCounters, Tally};

/// The most faults that wait for the worker. A faulting function faults again, and the driver logs only a few.
const MOST: usize = 64;
/// The length of an event.
pub(crate) const EVENT: usize = 24;

const READ: u32 = 1;
const WRITE: u32 = 2;
/// The field `address` is valid.
const ADDRESS: u32 = 0x100;

/// Reason why an access failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reason {
    /// The endpoint is in no domain.
    Domain = 1,
    /// The address is not mapped, or not for this access.
    Mapping = 2,
}

/// A failed access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Reason.
    pub reason: Reason,
    /// Endpoint that made the access.
    pub endpoint: u32,
    /// The I/O address.
    pub address: u64,
    /// Kind of access.
    pub access: Permissions,
}

impl Fault {
    /// The fault's event: the reason and 3 reserved bytes, flags, the endpoint, 4 reserved bytes, the address.
    pub(crate) fn event(&self) -> [u8; EVENT] {
        let read = if self.access.allow(Permissions::Read) { READ } else { 0 };
        let write = if self.access.allow(Permissions::Write) { WRITE } else { 0 };
        let mut event = [0; EVENT];
        event[0] = self.reason as u8;
        event[4..8].copy_from_slice(&(read | write | ADDRESS).to_le_bytes());
        event[8..12].copy_from_slice(&self.endpoint.to_le_bytes());
        event[16..].copy_from_slice(&self.address.to_le_bytes());
        event
    }
}

/// Faults that have not been reported.
#[derive(Default)]
pub(crate) struct Faults(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    faults: VecDeque<Fault>,
    /// Wakes the worker, while there is a driver.
    wake: Option<Arc<EventFd>>,
}

impl Faults {
    /// Counts a fault, and queues it if there is a driver and room. Does not block: it is called during a pass.
    pub(crate) fn report(&self, fault: Fault, counters: &IommuCounters) {
        let mut tally = Tally::new();
        tally.count(IommuCounter::Faults);
        let mut waiting = self.0.lock();
        match &waiting.wake {
            Some(wake) if waiting.faults.len() < MOST => {
                // A full counter has woken the worker already.
                let _ = wake.write(1);
                waiting.faults.push_back(fault);
            }
            _ => tally.count(IommuCounter::EventsDropped),
        }
        drop(waiting);
        tally.flush(counters);
    }

    /// Removes the oldest waiting fault.
    pub(crate) fn take(&self) -> Option<Fault> {
        self.0.lock().faults.pop_front()
    }

    /// Signals `wake` for each fault from now on; with `None`, faults are no longer queued.
    pub(crate) fn tell(&self, wake: Option<Arc<EventFd>>) {
        let mut waiting = self.0.lock();
        waiting.faults.clear();
        waiting.wake = wake;
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    const FAULT: Fault =
        Fault { reason: Reason::Mapping, endpoint: 0x108, address: 0x1122_3344_5566_7788, access: Permissions::Write };

    #[test]
    fn an_event_has_the_layout_of_the_standard() {
        let event = FAULT.event();
        assert_eq!(event[..12], [2, 0, 0, 0, 2, 1, 0, 0, 8, 1, 0, 0]);
        assert_eq!(event[12..], [0, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
    }

    #[test]
    fn faults_are_counted_all_and_kept_in_a_bounded_number() {
        let (faults, counters) = (Faults::default(), IommuCounters::new());
        faults.report(FAULT, &counters);
        assert_eq!(faults.take(), None, "without a driver there is no report");
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        faults.tell(Some(Arc::clone(&wake)));
        for _ in 0..3 * MOST {
            faults.report(FAULT, &counters);
        }
        assert_eq!(std::iter::from_fn(|| faults.take()).count(), MOST);
        assert!(wake.read().is_ok());
        let count = |counter| counters.get(counter);
        assert_eq!((count(IommuCounter::Faults), count(IommuCounter::EventsDropped)), (193, 129));
    }
}
