//! A backend that runs the queues of a function behind an IOMMU.

use vm_memory::Permissions;

use super::*;
use crate::DmaSpace;
use crate::iommu::{Iommu, IommuAttachment, IommuCounter, Range, Request};
use crate::memory::Translate;

const START: &str = "start [(0, 0), (1, 0)] pairs=1 fresh=true";

/// A running NIC, in a domain where its rings are mapped.
fn started(backend: &Scripted) -> (Guest, Arc<Iommu>, IommuAttachment) {
    let iommu = Iommu::new(48);
    let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
    iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: false }).unwrap();
    let range = Range { first: 0, last: BUFFERS - 1 };
    iommu.carry_out(Request::Map { domain: 1, range, target: 0, access: Permissions::ReadWrite }).unwrap();
    let mut guest = backend.guest(1);
    let mut start = guest.to_start(FEATURES);
    let endpoint = Arc::clone(attachment.endpoint()) as Arc<dyn Translate>;
    start.memory = DmaSpace::translated(start.memory.memory().clone(), endpoint);
    guest.workers = guest.device.start(start).unwrap();
    backend.await_asked(START);
    (guest, iommu, attachment)
}

#[test]
fn unreachable_address_stops_queues_until_the_driver_resets() {
    let backend = Scripted::new(1);
    let (mut guest, iommu, _attachment) = started(&backend);
    backend.script.lock().positions = vec![Some(0), Some(0)];
    guest.queues[0].add(&[(BUFFERS, 64, WRITE)]);
    backend.say(Ok(Attention::Unreachable));
    backend.await_asked("stop");
    eventually("the request for a reset", || guest.interrupts.needs_reset());
    assert_eq!(iommu.counters().get(IommuCounter::Faults), 0, "the finder reported it");
    guest.kick(0);
    guest.device.set_link(false).wait().unwrap();
    guest.device.set_link(true).wait().unwrap();
    guest.stop();
    assert!(link_up(&guest.device) && backend.asked().is_empty());
    assert_eq!(guest.count(Counter::BrokenRings), 1);
    guest.device.reset();
    guest.start_with(FEATURES);
    backend.await_asked(START);
}

#[test]
fn unexplained_broken_ring_is_reported_as_an_iommu_fault() {
    let backend = Scripted::new(1);
    let (mut guest, iommu, _attachment) = started(&backend);
    backend.script.lock().positions = vec![Some(1), Some(0)];
    // The first was mapped, and was taken.
    guest.queues[0].add(&[(0x8_0000, 64, WRITE)]);
    guest.queues[0].add(&[(0x8_1000, 64, WRITE), (BUFFERS, 64, WRITE), (BUFFERS + 0x1000, 64, WRITE)]);
    guest.queues[1].add(&[(0x8_2000, 64, 0)]);
    backend.say(Ok(Attention::BrokenRing));
    backend.await_asked("stop");
    eventually("the request for a reset", || guest.interrupts.needs_reset());
    assert_eq!(iommu.counters().get(IommuCounter::Faults), 1);
    guest.stop();
    assert_eq!(guest.queues[0].queue.lock().next_avail(), 1, "looking up takes nothing");
}

#[test]
fn a_backend_whose_reach_is_another_is_stopped_and_started() {
    let backend = Scripted::new(1);
    let (guest, ..) = started(&backend);
    backend.say(Ok(Attention::Restart));
    let again = "start [(0, 0), (1, 0)] pairs=1 fresh=false";
    assert_eq!(backend.await_asked(again), ["stop", again]);
    assert!(!guest.interrupts.needs_reset() && !guest.device.backend_lost());
}
