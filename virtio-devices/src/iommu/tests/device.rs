//! The device with its driver.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, Permissions};

use super::super::mappings::Range;
use super::super::request::{Request, encode};
use super::super::{Iommu, IommuAttachment, IommuCounter, IommuDevice};
use crate::VirtioDevice;
use crate::memory::Translate;
use crate::testing::driver_queue::{BUFFERS, NEXT, WRITE, eventually, memory};

const ENDPOINT: u32 = 0x100;
const REPLY: u64 = BUFFERS + 0x1000;

/// The IOMMU, and the attachment of a function behind it.
struct Host {
    iommu: Arc<Iommu>,
    attachment: IommuAttachment,
}

type Guest = crate::testing::guest::Guest<IommuDevice, Host>;

impl Guest {
    fn new() -> Self {
        let iommu = Iommu::new(48);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
        let device = IommuDevice::new("iommu", Arc::clone(&iommu));
        let mut guest = Self::stopped(device, Host { iommu, attachment }, &memory(), &[16, 16]);
        guest.start();
        guest
    }

    /// Makes a request available, with `room` device-writable bytes.
    fn offer(&mut self, bytes: &[u8], room: u32) {
        self.queues[0].memory.write_slice(bytes, GuestAddress(BUFFERS)).unwrap();
        self.queues[0].memory.write_slice(&[0xaa; 600], GuestAddress(REPLY)).unwrap();
        self.queues[0].add(&[(BUFFERS, bytes.len() as u32, NEXT), (REPLY, room, WRITE)]);
    }

    fn reply(&self, len: usize) -> Vec<u8> {
        let mut reply = vec![0; len];
        self.queues[0].memory.read_slice(&mut reply, GuestAddress(REPLY)).unwrap();
        reply
    }

    /// Sends a request, and returns the status, which is written when the doorbell's write has returned.
    fn ask(&mut self, request: Request) -> u8 {
        self.offer(&encode(request), 4);
        assert!(self.device.doorbell_rung(0));
        assert_eq!(self.queues[0].take_used().len(), 1);
        self.reply(1)[0]
    }

    fn count(&self, counter: IommuCounter) -> u64 {
        self.host.iommu.counters().get(counter)
    }
}

#[test]
fn requests_are_answered_when_the_doorbells_write_returns() {
    let mut guest = Guest::new();
    assert_eq!(guest.workers.len(), 1, "of events alone");
    assert!(guest.workers.iter().flat_map(|worker| &worker.doorbells).all(|(queue, _)| *queue == 1));
    let range = Range { first: 0x1000, last: 0x1fff };
    assert_eq!(guest.ask(Request::Map { domain: 1, range, target: 0, access: Permissions::Read }), 6);
    assert_eq!(guest.ask(Request::Attach { domain: 1, endpoint: ENDPOINT, bypass: false }), 0);
    assert_eq!(guest.ask(Request::Map { domain: 1, range, target: 0x2000, access: Permissions::Read }), 0);
    assert_eq!(guest.host.attachment.endpoint().translate(0x1010, 4, Permissions::Read), Some((0x2010, 4)));
    assert_eq!(guest.ask(Request::Unmap { domain: 1, range }), 0);
    assert_eq!(guest.ask(Request::Detach { domain: 1, endpoint: ENDPOINT }), 0);
    let counted = [IommuCounter::Attaches, IommuCounter::Maps, IommuCounter::Unmaps, IommuCounter::Refused];
    assert_eq!(counted.map(|counter| guest.count(counter)), [1, 1, 1, 1]);
}

#[test]
fn an_endpoint_is_told_where_its_interrupts_go() {
    let mut guest = Guest::new();
    guest.offer(&encode(Request::Probe { endpoint: ENDPOINT }), 516);
    guest.device.doorbell_rung(0);
    assert_eq!(guest.queues[0].take_used(), [(0, 516)]);
    let reply = guest.reply(520);
    assert_eq!(reply[..8], [1, 0, 20, 0, 1, 0, 0, 0]);
    assert_eq!(reply[8..24], [0, 0, 0xe0, 0xfe, 0, 0, 0, 0, 0xff, 0xff, 0xef, 0xfe, 0, 0, 0, 0]);
    assert!(reply[24..516].iter().all(|byte| *byte == 0) && reply[516] == 0xaa);
    guest.offer(&encode(Request::Probe { endpoint: 0x200 }), 516);
    guest.device.doorbell_rung(0);
    let reply = guest.reply(516);
    assert!(reply[512] == 6 && reply[..512].iter().all(|byte| *byte == 0));
}

#[test]
fn a_chain_without_room_for_an_answer_is_given_back_and_counted() {
    let mut guest = Guest::new();
    for (request, room) in
        [(Request::Probe { endpoint: ENDPOINT }, 515), (Request::Detach { domain: 0, endpoint: 0 }, 3)]
    {
        guest.offer(&encode(request), room);
        guest.device.doorbell_rung(0);
        assert_eq!(guest.queues[0].take_used().len(), 1);
    }
    assert_eq!(guest.count(IommuCounter::BadChains), 2);
}

#[test]
fn faults_report_endpoint_and_address_while_buffers_last() {
    let mut guest = Guest::new();
    guest.queues[1].add(&[(BUFFERS + 0x8000, 24, WRITE)]);
    guest.ask(Request::Attach { domain: 1, endpoint: ENDPOINT, bypass: false });
    assert_eq!(guest.host.attachment.endpoint().translate(0x1234, 4, Permissions::Write), None);
    eventually("an event", || guest.count(IommuCounter::Events) == 1);
    let mut event = [0; 24];
    guest.queues[1].memory.read_slice(&mut event, GuestAddress(BUFFERS + 0x8000)).unwrap();
    assert_eq!(event, [2, 0, 0, 0, 2, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 0, 0]);
    assert!(guest.interrupted(1));
    assert_eq!(guest.host.attachment.endpoint().translate(0x1234, 4, Permissions::Read), None);
    eventually("a drop", || guest.count(IommuCounter::EventsDropped) == 1);
    assert_eq!(guest.count(IommuCounter::Faults), 2);
}

#[test]
fn the_bypass_setting_survives_a_device_reset_not_a_power_on() {
    let mut guest = Guest::new();
    let at = |guest: &Guest| guest.host.attachment.endpoint().translate(0x1234, 4, Permissions::Write);
    assert_eq!(at(&guest), Some((0x1234, 4)), "at boot");
    guest.device.config_write(36, &[0]);
    guest.device.config_write(36, &[2]);
    let mut config = [0; 41];
    guest.device.config_read(0, &mut config);
    assert_eq!(config[..8], (0x20_1000u64).to_le_bytes());
    assert_eq!(
        (&config[16..24], &config[32..]),
        (&(u64::MAX >> 16).to_le_bytes()[..], &[0, 2, 0, 0, 0, 0, 0, 0, 0][..])
    );
    guest.ask(Request::Attach { domain: 1, endpoint: ENDPOINT, bypass: true });
    assert_eq!(at(&guest), Some((0x1234, 4)));
    guest.stop();
    guest.device.reset();
    assert_eq!(at(&guest), None);
    assert!(!guest.device.doorbell_rung(0), "nothing runs");
    guest.host.iommu.power_on();
    assert_eq!(at(&guest), Some((0x1234, 4)));
}

#[test]
fn a_request_queued_while_stopped_is_answered_at_the_start() {
    let mut guest = Guest::new();
    guest.stop();
    guest.offer(&encode(Request::Attach { domain: 1, endpoint: ENDPOINT, bypass: false }), 4);
    guest.start();
    assert_eq!((guest.queues[0].take_used().len(), guest.reply(1)), (1, vec![0]));
}

#[test]
fn a_ring_that_cannot_be_asks_for_a_reset_once() {
    let mut guest = Guest::new();
    guest.queues[0].set_avail_index(1000);
    guest.device.doorbell_rung(0);
    guest.device.doorbell_rung(0);
    assert!(guest.interrupts.needs_reset());
    assert_eq!(guest.count(IommuCounter::BrokenRings), 1);
}
