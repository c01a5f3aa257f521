//! A NIC behind an IOMMU, over a peer with IOTLB messages.

use std::thread;

use vm_memory::Permissions;

use super::super::connection::ANSWER;
use super::super::message::PROTOCOL_F_REPLY_ACK;
use super::*;
use crate::iommu::{Iommu, IommuAttachment, IommuCounter, Range, Request, Status};
use crate::memory::Translate;
use crate::{DmaSpace, NetSpec, SharedLog, VirtioDevice};

const PAGE: u64 = 4096;
/// The NIC's endpoint, and a page of its driver: the I/O address, and the address in the guest's memory.
const ENDPOINT: u32 = 0x100;
const IOVA: u64 = 0x40_0000_0000;
const TARGET: u64 = BUFFERS + 8 * PAGE;
/// The message that maps the rings.
const RINGS: &str = "UPDATE 0x0+0x30000=0x0 ReadWrite";

/// A NIC in a domain of its own in which its rings are mapped, and the drivers of both.
struct Machine {
    rig: Rig,
    iommu: Arc<Iommu>,
    attachment: IommuAttachment,
    guest: Guest,
}

impl Machine {
    /// Over the peer that listens.
    fn new(rig: Rig, id: &str) -> Self {
        let iommu = Iommu::new(48);
        let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(ENDPOINT as u16));
        let spec = NetSpec { id: id.into(), ..spec(1, 16) };
        let guest = Guest::over_in(spec, rig.connect(1).unwrap(), rig.map.clone());
        let machine = Self { rig, iommu, attachment, guest };
        machine.ask(Request::Attach { domain: 1, endpoint: ENDPOINT, bypass: false });
        machine.map((0, 0x3_0000), 0, Permissions::ReadWrite);
        machine
    }

    fn ask(&self, request: Request) {
        self.iommu.carry_out(request).unwrap();
    }

    fn map(&self, (first, len): (u64, u64), target: u64, access: Permissions) {
        self.ask(Request::Map { domain: 1, range: Range { first, last: first + len - 1 }, target, access });
    }

    fn unmap(&self, range: (u64, u64)) {
        self.try_unmap(range).unwrap();
    }

    fn try_unmap(&self, (first, len): (u64, u64)) -> Result<(), Status> {
        self.iommu.carry_out(Request::Unmap { domain: 1, range: Range { first, last: first + len - 1 } })
    }

    fn start(&mut self) {
        let mut start = self.guest.to_start(self.guest.device.features());
        let endpoint = Arc::clone(self.attachment.endpoint()) as Arc<dyn Translate>;
        start.memory = DmaSpace::translated(start.memory.memory().clone(), endpoint);
        self.guest.workers = self.guest.device.start(start).unwrap();
    }

    /// Lets the driver start again after its device has given up.
    fn start_again(&mut self) {
        self.guest.stop();
        self.guest.device.reset();
        self.guest.queues = (0..3).map(|index| DriverQueue::new(&self.rig.map, index, 16)).collect();
        self.guest.queues[0].memory_write(0, &[0; 0x3_0000]);
        self.guest.interrupts = Arc::new(crate::Interrupts::new(3, 4));
        self.start();
    }

    /// Offers a buffer of half a page for a frame.
    fn post(&mut self, address: u64) {
        self.guest.queues[0].add(&[(address, PAGE as u32 / 2, WRITE)]);
        self.guest.kick(0);
    }

    /// Waits for a frame in a buffer that was offered.
    fn await_frame(&mut self) {
        eventually("a frame", || !self.guest.queues[0].take_used().is_empty());
    }

    fn faults(&self) -> u64 {
        self.iommu.counters().get(IommuCounter::Faults)
    }

    fn fill(&self, byte: u8) {
        self.guest.queues[0].memory_write(TARGET, &[byte; PAGE as usize]);
    }

    fn page(&self) -> Vec<u8> {
        self.guest.queues[0].bytes(TARGET, PAGE as usize)
    }
}

/// Sends frames without end, until this is dropped.
struct Traffic(Arc<std::sync::atomic::AtomicBool>, Option<thread::JoinHandle<()>>);

impl Traffic {
    fn of(rig: &Rig) -> Self {
        let (stop, wire) = (Arc::<std::sync::atomic::AtomicBool>::default(), rig.wire.try_clone().unwrap());
        let seen = Arc::clone(&stop);
        let sender = thread::spawn(move || {
            while !seen.load(std::sync::atomic::Ordering::Acquire) {
                // A full wire has what it takes.
                let _ = rustix::io::write(&wire, &with_header(&frame(MAC, 60)));
                thread::sleep(Duration::from_micros(50));
            }
        });
        Self(stop, Some(sender))
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Release);
        self.1.take().unwrap().join().unwrap();
    }
}

#[test]
fn a_peer_gets_ring_mappings_first_and_changes_before_replies() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "sent");
    machine.map((IOVA, PAGE), TARGET, Permissions::Write);
    peer.heard();
    machine.start();
    let heard = peer.await_heard("STATUS 15");
    let expected = [
        "SET_FEATURES 0x340018029",
        "STATUS 11",
        "GET_STATUS",
        "INVALIDATE 0x0+0xffffffffffffffff",
        RINGS,
        "UPDATE 0x4000000000+0x1000=0x108000 ReadWrite",
    ];
    assert_eq!(heard[..6], expected);
    let [first_ring, ring] =
        ["UPDATE", "ADDR"].map(|what| heard.iter().rposition(|heard| heard.starts_with(what)).unwrap());
    assert!(first_ring < ring, "{heard:?}");

    machine.map((IOVA + PAGE, PAGE), TARGET + PAGE, Permissions::Read);
    assert_eq!(peer.heard(), ["UPDATE 0x4000001000+0x1000=0x109000 Read"]);
    machine.unmap((IOVA + PAGE, PAGE));
    assert_eq!(peer.heard(), ["INVALIDATE 0x4000001000+0x1000"]);

    machine.fill(0xc5);
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    assert_eq!(machine.page()[..72], with_header(&frame(MAC, 60)));
    assert_eq!((machine.faults(), peer.asked(), machine.guest.device.link_up()), (0, 0, true));
}

#[test]
fn a_peer_requests_a_forgotten_mapping_and_receives_it() {
    let rig = Rig::new();
    let peer = rig.peer(Script { iotlb_room: 2, ..Script::translating() });
    let mut machine = Machine::new(rig, "asks");
    machine.start();
    for page in 0..4 {
        machine.map((IOVA + page * PAGE, PAGE), TARGET, Permissions::ReadWrite);
    }
    for page in [0, 3, 1, 2, 0] {
        machine.fill(0xc5);
        machine.post(IOVA + page * PAGE);
        send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
        machine.await_frame();
        assert_eq!(machine.page()[..72], with_header(&frame(MAC, 60)), "{page}");
    }
    assert!(peer.asked() >= 4, "{}", peer.asked());
    assert_eq!((machine.faults(), machine.guest.interrupts.needs_reset()), (0, false));
}

#[test]
fn an_unmapped_address_faults_and_stops_the_function() {
    let rig = Rig::new();
    let _peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "fault");
    machine.map((IOVA, PAGE), TARGET, Permissions::Read);
    for (round, address) in [IOVA + PAGE, IOVA, TARGET].into_iter().enumerate() {
        machine.start_again();
        machine.fill(0xc5);
        machine.post(address);
        send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
        eventually("the request for a reset", || machine.guest.interrupts.needs_reset());
        assert_eq!(machine.faults(), 1 + round as u64, "{address:#x}");
        assert!(machine.page().iter().all(|byte| *byte == 0xc5), "{address:#x}");
        assert!(!machine.guest.device.backend_lost());
    }
}

#[test]
fn a_page_unmapped_under_traffic_is_not_written_after_the_reply() {
    const ROUNDS: u32 = 10_000;
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "taken");
    let _traffic = Traffic::of(&machine.rig);
    machine.start();
    let (mut frames, mut faults) = (0, 0);
    for round in 0..ROUNDS {
        machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
        machine.post(IOVA);
        (0..round % 4).for_each(|_| thread::yield_now());
        machine.unmap((IOVA, PAGE));
        machine.fill(0xc5);
        let mut used = false;
        soon("a frame or a fault", || {
            used |= !machine.guest.queues[0].take_used().is_empty();
            used || machine.guest.interrupts.needs_reset()
        });
        assert!(machine.page().iter().all(|byte| *byte == 0xc5), "round {round}");
        if used {
            frames += 1;
        } else {
            faults += 1;
        }
        if machine.guest.interrupts.needs_reset() {
            machine.start_again();
        }
    }
    println!("{ROUNDS} rounds: {frames} frames, {faults} faults");
    assert!(frames > 0 && faults > 0);
    assert_eq!((peer.connections(), machine.guest.device.backend_lost()), (1, false));
}

#[test]
fn a_peer_that_fails_to_unmap_is_lost_and_a_successor_remapped() {
    record_log();
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "unforgetting");
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    peer.await_heard("STATUS 15");
    peer.keep_translations();
    let begun = Instant::now();
    assert_eq!(machine.try_unmap((IOVA, PAGE)), Err(Status::DeviceError), "the driver gets an error, too");
    let waited = begun.elapsed();
    assert!((ANSWER..3 * ANSWER).contains(&waited), "{waited:?}");
    await_loss(&machine.guest, true);
    assert!(!machine.guest.device.link_up());
    let lines = logged("unforgetting").join("\n");
    for part in ["is lost", "IOTLB_MSG: no answer within 2 s", "its link is down"] {
        assert!(lines.contains(part), "{lines}");
    }
    let path = machine.rig.path().display().to_string();
    let [line] = &logged(&path)[..] else { panic!("{:?}", logged(&path)) };
    assert!(line.contains("does not forget") && line.contains("may still reach memory"), "{line}");
    // Its translations are lost with it.
    let begun = Instant::now();
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.unmap((IOVA, PAGE));
    assert!(begun.elapsed() < ANSWER);

    drop(peer);
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    let peer = machine.rig.peer(Script::translating());
    await_loss(&machine.guest, false);
    assert!(peer.heard().contains(&RINGS.to_owned()));
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
}

#[test]
fn a_domain_is_refused_while_the_peer_keeps_its_old_mappings() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "kept");
    machine.ask(Request::Detach { domain: 1, endpoint: ENDPOINT });
    machine.start();
    let heard = peer.await_heard("STATUS 15");
    assert!(heard.contains(&format!("UPDATE 0x0+{MEMORY:#x}=0x0 ReadWrite")), "bypass: {heard:?}");
    peer.keep_translations();
    let attach = Request::Attach { domain: 2, endpoint: ENDPOINT, bypass: false };
    machine.iommu.carry_out(attach).unwrap_err();
    assert!(machine.attachment.endpoint().is_bypassed(), "it is in no domain, as before");
    await_loss(&machine.guest, true);
    let attach = Request::Attach { domain: 2, endpoint: ENDPOINT, bypass: false };
    eventually("a domain for a function without a peer", || machine.iommu.carry_out(attach).is_ok());
}

#[test]
fn unmapping_from_a_peer_that_missed_a_reply_warns_once() {
    record_log();
    for is_attach in [false, true] {
        let rig = Rig::new();
        let path = rig.path().display().to_string();
        let peer = rig.peer(Script::translating());
        let mut machine = Machine::new(rig, "silent");
        if is_attach {
            machine.ask(Request::Detach { domain: 1, endpoint: ENDPOINT });
        }
        machine.start();
        peer.await_heard("STATUS 15");
        peer.keep_translations();
        let begun = Instant::now();
        // The worker answers, and waits for the peer's acknowledgement.
        assert!(peer.flood(0x1000) > 0);
        peer.await_heard("IOTLB");
        if is_attach {
            let attach = Request::Attach { domain: 2, endpoint: ENDPOINT, bypass: false };
            machine.iommu.carry_out(attach).unwrap_err();
        } else {
            assert_eq!(machine.try_unmap((0, 0x3_0000)), Err(Status::DeviceError));
        }
        assert!(begun.elapsed() < 3 * ANSWER, "it is not waited for again: {:?}", begun.elapsed());
        let [line] = &logged(&path)[..] else { panic!("{:?}", logged(&path)) };
        assert!(line.contains("may still reach memory that its guest has taken from it"), "{line}");
        assert!(!line.contains("closed"), "{line}");
    }
}

#[test]
fn a_peer_that_asks_without_end_delays_no_other_work() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "flood");
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    peer.await_heard("STATUS 15");
    for round in 0..20 {
        assert!(round > 0 || peer.flood(0x1000) > 64);
        peer.flood(0x1000);
        let begun = Instant::now();
        machine.map((IOVA + PAGE, PAGE), TARGET, Permissions::ReadWrite);
        machine.unmap((IOVA + PAGE, PAGE));
        assert!(begun.elapsed() < ANSWER);
        machine.post(IOVA);
        send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
        machine.await_frame();
    }
    let begun = Instant::now();
    peer.flood(0x1000);
    machine.guest.stop();
    assert!(begun.elapsed() < 3 * ANSWER);
    assert_eq!((machine.faults(), machine.guest.device.backend_lost()), (0, false));
}

#[test]
fn a_lost_peer_is_replaced_only_by_one_that_translates() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "gone");
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    peer.await_heard("STATUS 15");
    drop(peer);
    await_loss(&machine.guest, true);
    // No message is sent, and no thread waits.
    machine.unmap((IOVA, PAGE));
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);

    let unfit = machine.rig.peer(Script::translating().without(&[PROTOCOL_F_REPLY_ACK]));
    eventually("a visit", || unfit.connections() > 0);
    assert!(machine.guest.device.backend_lost());
    drop(unfit);
    let peer = machine.rig.peer(Script::translating());
    await_loss(&machine.guest, false);
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    assert_eq!((machine.faults(), peer.asked()), (0, 0));
}

#[test]
fn a_peer_that_closes_its_channel_while_stopped_is_replaced() {
    let rig = Rig::new();
    let peer = rig.peer(Script { iotlb_room: 2, ..Script::translating() });
    let mut machine = Machine::new(rig, "mute");
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    peer.await_heard("STATUS 15");
    machine.guest.device.set_link(false).wait().unwrap();
    peer.await_heard("STATUS 0");
    peer.close_channel();
    eventually("another connection", || peer.connections() == 2);
    await_loss(&machine.guest, false);
    machine.guest.device.set_link(true).wait().unwrap();
    peer.await_heard("STATUS 15");
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    assert!(peer.asked() > 0);
    assert_eq!((machine.faults(), peer.connections()), (0, 2));
}

#[test]
fn a_function_goes_into_bypass_and_back_while_its_queues_run() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "bypass");
    machine.start();
    peer.await_heard("STATUS 15");
    for domain in [2, 1, 2] {
        let bypass = domain == 2;
        machine.ask(Request::Attach { domain, endpoint: ENDPOINT, bypass });
        if !bypass {
            // The domain was deleted with its last function, and the rings' mappings with it.
            machine.map((0, 0x3_0000), 0, Permissions::ReadWrite);
            machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
            machine.start_again();
        }
        machine.fill(0xc5);
        machine.post(if bypass { TARGET } else { IOVA });
        send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
        machine.await_frame();
        assert_eq!(machine.page()[..72], with_header(&frame(MAC, 60)), "{domain}");
    }
    assert_eq!(peer.connections(), 1);
}

#[test]
fn a_peers_writes_are_logged_by_guest_address_behind_an_iommu() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "logged");
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    peer.await_heard("STATUS 15");
    let log = Arc::new(SharedLog::new(&machine.rig.map).unwrap());
    let user = machine.guest.device.memory_user().unwrap();
    user.set_log(Some(&log)).unwrap();
    assert!(peer.heard().contains(&"SET_FEATURES 0x344018029".to_owned()));
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    let mut pages = Vec::new();
    log.take(|first, bits| pages.extend((0..64).filter(|page| bits & 1 << page != 0).map(|page| first + page)));
    pages.sort_unstable();
    assert_eq!(pages, [0xa000 / PAGE, TARGET / PAGE]);
    user.set_log(None).unwrap();
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    assert_eq!((machine.faults(), machine.guest.device.backend_lost()), (0, false));
}

#[test]
fn stale_misses_from_before_a_stop_do_not_stop_a_restart() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "stale");
    machine.map((IOVA, 2 * PAGE), TARGET, Permissions::ReadWrite);
    machine.map((IOVA + 2 * PAGE, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    peer.await_heard("STATUS 15");
    machine.guest.stop();
    assert!(peer.flood(IOVA) > 64, "more than are answered in a turn");
    machine.unmap((IOVA, 2 * PAGE));
    machine.start();
    machine.post(IOVA + 2 * PAGE);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    assert!(!machine.guest.interrupts.needs_reset() && !machine.guest.device.backend_lost());
}

#[test]
fn added_memory_is_announced_once_the_peer_has_mapped_it() {
    let rig = Rig::new();
    let peer = rig.peer(Script::translating());
    let mut machine = Machine::new(rig, "added");
    machine.map((IOVA, PAGE), 1 << 32, Permissions::ReadWrite);
    machine.start();
    let heard = peer.await_heard("STATUS 15");
    assert!(!heard.iter().any(|heard| heard.starts_with("UPDATE 0x4000000000")), "there is no memory: {heard:?}");
    let map = grown(&machine.rig.map, 1 << 32, 1 << 20);
    machine.guest.device.memory_user().unwrap().set(&map).unwrap();
    let heard = peer.await_heard("STATUS 15");
    let at = |what: &str| heard.iter().position(|heard| heard.starts_with(what));
    assert!(at("ADD_MEM_REG").unwrap() < at("UPDATE 0x4000000000+0x1000").unwrap(), "{heard:?}");
}

#[test]
fn a_driver_gets_replies_while_a_peer_maps_added_memory() {
    let rig = Rig::new();
    let peer = rig.peer(Script { maps_late: true, ..Script::translating() });
    peer.let_map(true);
    let mut machine = Machine::new(rig, "adding");
    machine.map((IOVA, PAGE), TARGET, Permissions::ReadWrite);
    machine.start();
    for _ in 0..3 {
        machine.post(IOVA);
        send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
        machine.await_frame();
    }
    peer.await_heard("STATUS 15");
    peer.let_map(false);
    let (map, user) = (grown(&machine.rig.map, 1 << 32, 1 << 20), machine.guest.device.memory_user().unwrap());
    thread::scope(|scope| {
        let added = scope.spawn(|| user.set(&map));
        peer.await_heard("STATUS 0");
        let begun = Instant::now();
        machine.unmap((IOVA, PAGE));
        machine.map((IOVA, PAGE), TARGET + PAGE, Permissions::ReadWrite);
        assert!(begun.elapsed() < ANSWER, "{:?}", begun.elapsed());
        assert!(!added.is_finished());
        peer.let_map(true);
        added.join().unwrap().unwrap();
    });
    let heard = peer.await_heard("STATUS 15");
    assert!(heard.contains(&"BASE 0=3".to_owned()), "{heard:?}");
    machine.post(IOVA);
    send(&machine.rig.wire, &with_header(&frame(MAC, 60)));
    machine.await_frame();
    assert_eq!((machine.faults(), machine.guest.interrupts.needs_reset()), (0, false));
    assert_eq!((peer.connections(), machine.guest.device.backend_lost()), (1, false));
}
