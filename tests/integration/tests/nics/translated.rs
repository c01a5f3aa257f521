//! NICs behind the virtual IOMMU whose frames the host's kernel, a vDPA device or another process moves. The test is
//! the driver of the NIC and of the IOMMU. `iommu.rs` tests guests with such NICs.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fixtures::process::Process;
use integration::{ArpTraffic, HostTap, Subnet, repetitions};
use virtio_devices::{
    Backend, DmaSpace, GuestMap, Interrupts, Iommu, IommuAttachment, IommuCounter, IommuDevice, Memory, Net, NetSpec,
    SharedLog, Start, Tap, TapSpec, Translate, Vdpa, VdpaSpec, VhostKernel, VhostNet, VhostUser, VhostUserRole,
    VhostUserSocket, VhostUserSpec, VirtioDevice, Worker,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend};

use crate::driver::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const SIZE: u16 = 16;
/// `VIRTIO_F_VERSION_1` and `VIRTIO_F_ACCESS_PLATFORM`.
const FEATURES: u64 = 1 << 32 | 1 << 33;
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x77];
const PAGE: u64 = 4096;
/// Addresses of the IOMMU driver's queue, its request and the reply.
const REQUESTS: u16 = 4;
const REQUEST: u64 = 0x6_0000;
const ANSWER: u64 = 0x6_1000;
/// The NIC's domain and its neighbour's.
const DOMAINS: [(u32, u16); 2] = [(1, 0x100), (2, 0x101)];
/// Flags of MAP: accesses that a function may make.
const READ: u32 = 1;
const READ_WRITE: u32 = 3;
/// I/O addresses of pages: a writable one, a readable one, a neighbour's, and one that is not mapped.
const WRITABLE: u64 = 0x40_0000_0000;
const READABLE: u64 = 0x40_0000_1000;
const OF_NEIGHBOUR: u64 = 0x40_0000_2000;
const NOWHERE: u64 = 0x40_0000_3000;

/// Number of times that a page is unmapped; `CH_UNMAPS=10000` for a longer run.
fn rounds(usual: usize) -> usize {
    repetitions("CH_UNMAPS", usual)
}

/// A NIC behind an IOMMU, and the drivers of both.
struct Machine {
    net: Net,
    queues: Vec<DriverQueue>,
    workers: Vec<Worker>,
    interrupts: Arc<Interrupts>,
    memory: GuestMap,
    dma: DmaSpace,
    iommu: Arc<Iommu>,
    control: IommuDevice,
    requests: DriverQueue,
    events: Vec<Worker>,
    _attachments: Vec<IommuAttachment>,
}

fn shared_memory() -> GuestMap {
    let file: File = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
    file.set_len(MEMORY).unwrap();
    let range = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file, 0)));
    GuestMap::from_ranges_with_files([range]).unwrap()
}

impl Machine {
    /// A NIC over the backend that `open` returns, whose queues do not run, in a domain with mappings of its rings.
    fn over(open: impl FnOnce(&Memory) -> Backend) -> Self {
        let map = shared_memory();
        let memory = Memory::new(map.clone());
        let net = NetSpec { queue_size: SIZE, ..NetSpec::new("_net0", MAC) };
        let net = Net::new(net, open(&memory)).unwrap();
        let iommu = Iommu::new(48);
        let attachments: Vec<_> = DOMAINS.map(|(_, rid)| iommu.add_endpoint(0, pci::Rid::from_bits(rid))).into();
        let dma = DmaSpace::translated(memory, Arc::clone(attachments[0].endpoint()) as Arc<dyn Translate>);
        let requests = DriverQueue::new(&map, REQUESTS, SIZE);
        let control = IommuDevice::new("iommu", Arc::clone(&iommu));
        let (interrupts, queues) = (Arc::new(Interrupts::new(3, 4)), Vec::new());
        let (workers, events) = (Vec::new(), Vec::new());
        let memory = map;
        let mut machine = Self {
            net,
            queues,
            workers,
            interrupts,
            memory,
            dma,
            iommu,
            control,
            requests,
            events,
            _attachments: attachments,
        };
        let start = Start {
            memory: machine.memory.clone().into(),
            features: machine.control.features(),
            queues: vec![(0, Arc::clone(&machine.requests.queue))],
            interrupts: Arc::new(Interrupts::new(2, 3)),
            log: None,
        };
        machine.events = machine.control.start(start).unwrap();
        for (domain, endpoint) in DOMAINS {
            machine.attach(domain, endpoint.into(), 0);
        }
        machine.map(1, (0, 0x2_0000), 0, READ_WRITE);
        machine
    }

    fn over_vhost(tap: &str) -> Self {
        let spec = TapSpec { name: Some(tap.into()), ip: None, mask: None, host_mac: None, mtu: None, queue_pairs: 1 };
        Self::over(|_| {
            VhostNet::new(Tap::open(&spec).unwrap(), VhostKernel::ask().unwrap().behind_iommu().unwrap()).into()
        })
    }

    fn over_vdpa(fixture: &Process, name: &str) -> Self {
        let spec = VdpaSpec { path: fixture.node(name), mac: None, queue_pairs: 1 };
        Self::over(|memory| Vdpa::open(spec, memory).unwrap_or_else(|error| panic!("{error}")).into())
    }

    fn over_vhost_user(socket: &Path) -> Self {
        let spec = VhostUserSpec {
            socket: VhostUserSocket::of_peer(socket.to_owned()),
            role: VhostUserRole::Nic { queue_pairs: 1 },
            until: Instant::now(),
            cancel: None,
        };
        Self::over(|memory| VhostUser::connect(spec, memory).unwrap_or_else(|error| panic!("{error}")).into())
    }

    /// Sends a request to the IOMMU, and returns the status: the IOMMU has replied when its doorbell's write returns.
    fn ask(&mut self, request: &[u8]) -> u8 {
        self.requests.memory_write(REQUEST, request);
        self.requests.add(&[(REQUEST, request.len() as u32, 0), (ANSWER, 4, WRITE)]);
        assert!(self.control.doorbell_rung(0));
        assert_eq!(self.requests.take_used().len(), 1);
        self.requests.bytes(ANSWER, 1)[0]
    }

    fn attach(&mut self, domain: u32, endpoint: u32, flags: u32) {
        let numbers = [1, domain, endpoint, flags, 0];
        assert_eq!(self.ask(&numbers.map(u32::to_le_bytes).concat()), 0);
    }

    fn map(&mut self, domain: u32, (first, len): (u64, u64), target: u64, access: u32) {
        let head = [3, domain].map(u32::to_le_bytes).concat();
        let range = [first, first + len - 1, target].map(u64::to_le_bytes).concat();
        assert_eq!(self.ask(&[head, range, access.to_le_bytes().to_vec()].concat()), 0);
    }

    fn unmap(&mut self, (first, len): (u64, u64)) {
        let head = [4, 1].map(u32::to_le_bytes).concat();
        let range = [first, first + len - 1].map(u64::to_le_bytes).concat();
        assert_eq!(self.ask(&[head, range, vec![0; 4]].concat()), 0);
    }

    fn count(&self, counter: IommuCounter) -> u64 {
        self.iommu.counters().get(counter)
    }

    /// Makes the NIC's driver set up its queues, after a reset if they ran.
    fn start(&mut self) {
        self.stop();
        self.net.reset();
        self.interrupts = Arc::new(Interrupts::new(3, 4));
        self.queues = (0..2).map(|index| DriverQueue::new(&self.memory, index, SIZE)).collect();
        self.queues[0].memory_write(0, &[0; 0x2_0000]);
        let queues = self.queues.iter().enumerate().map(|(i, q)| (i as u16, Arc::clone(&q.queue))).collect();
        let (memory, interrupts) = (self.dma.clone(), Arc::clone(&self.interrupts));
        self.workers = self.net.start(Start { memory, features: FEATURES, queues, interrupts, log: None }).unwrap();
    }

    fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    /// Offers a buffer of half a page for a frame.
    fn post(&mut self, address: u64) {
        self.queues[RECEIVE].add(&[(address, PAGE as u32 / 2, WRITE)]);
        let mut doorbells = self.workers.iter().flat_map(|worker| &worker.doorbells);
        doorbells.find(|(index, _)| usize::from(*index) == RECEIVE).unwrap().1.write(1).unwrap();
    }

    /// Waits until the buffer is returned, or the NIC has stopped. Returns true if the buffer was returned.
    fn settled(&mut self) -> bool {
        let mut used = false;
        eventually("a frame or a fault", || {
            used = used || !self.queues[RECEIVE].take_used().is_empty();
            used || self.interrupts.needs_reset()
        });
        used
    }

    fn page(&self, number: u64) -> Vec<u8> {
        self.requests.bytes(BUFFERS + number * PAGE, PAGE as usize)
    }

    fn fill(&self, number: u64, byte: u8) {
        self.requests.memory_write(BUFFERS + number * PAGE, &[byte; PAGE as usize]);
    }

    /// Repeatedly unmaps a page while a frame may be written to it. Waits for `pause` in some rounds, and for the frame
    /// in each eighth: what is fast on one machine is too slow for any frame on another.
    fn take_away(&mut self, rounds: usize, pause: Duration) {
        self.start();
        let (mut frames, mut faults) = (0, 0);
        for round in 0..rounds {
            self.map(1, (WRITABLE, PAGE), BUFFERS, READ_WRITE);
            self.post(WRITABLE);
            std::thread::sleep(pause * (round % 4) as u32);
            let early = round % 8 == 7 && self.settled();
            self.unmap((WRITABLE, PAGE));
            self.fill(0, 0xc5);
            let used = early || self.settled();
            assert!(self.page(0).iter().all(|byte| *byte == 0xc5), "round {round}");
            if used {
                frames += 1
            } else {
                faults += 1
            }
            if self.interrupts.needs_reset() {
                self.start();
            }
        }
        println!("{rounds} rounds: {frames} frames, {faults} faults");
        assert!(frames > 0);
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
        self.events.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }
}

fn traffic(name: &str, subnet: u8) -> ArpTraffic {
    let tap = HostTap::existing(name);
    tap.join(Subnet(subnet));
    ArpTraffic::start(&[tap], Subnet(subnet).guest(), Duration::from_micros(100))
}

/// vhost-net: the function does not reach what is not mapped, and the driver gets the fault with address and endpoint.
#[test]
fn vhost_net_reaches_only_mapped_pages_and_stops_at_a_fault() {
    let mut machine = Machine::over_vhost("vhost0");
    let _traffic = traffic("vhost0", 90);
    machine.map(1, (WRITABLE, PAGE), BUFFERS, READ_WRITE);
    machine.map(1, (READABLE, PAGE), BUFFERS + PAGE, READ);
    machine.map(2, (OF_NEIGHBOUR, PAGE), BUFFERS + 2 * PAGE, READ_WRITE);
    for address in [NOWHERE, READABLE, OF_NEIGHBOUR, BUFFERS] {
        (0..4).for_each(|page| machine.fill(page, 0xc5));
        machine.start();
        machine.post(WRITABLE);
        assert!(machine.settled());
        assert_eq!(machine.page(0)[12..18], [0xff; 6], "a broadcast");
        machine.fill(0, 0xc5);
        let faults = machine.count(IommuCounter::Faults);
        machine.post(address);
        assert!(!machine.settled(), "{address:#x}");
        assert_eq!(machine.count(IommuCounter::Faults), faults + 1, "{address:#x}");
        for page in 0..4 {
            assert!(machine.page(page).iter().all(|byte| *byte == 0xc5), "{address:#x}, {page}");
        }
    }
}

#[test]
fn vhost_net_writes_no_page_unmapped_under_traffic() {
    let mut machine = Machine::over_vhost("vhost1");
    let _traffic = traffic("vhost1", 91);
    machine.take_away(rounds(500), Duration::from_micros(200));
}

#[test]
fn vhost_net_logs_writes_by_guest_address_behind_an_iommu() {
    let mut machine = Machine::over_vhost("vhost2");
    let _traffic = traffic("vhost2", 92);
    machine.map(1, (WRITABLE, PAGE), BUFFERS + 7 * PAGE, READ_WRITE);
    machine.start();
    machine.post(WRITABLE);
    assert!(machine.settled());
    let log = Arc::new(SharedLog::new(&machine.memory).unwrap());
    let user = machine.net.memory_user().unwrap();
    user.set_log(Some(&log)).unwrap();
    machine.post(WRITABLE);
    assert!(machine.settled());
    user.set_log(None).unwrap();
    let mut pages = Vec::new();
    log.take(|first, bits| pages.extend((0..64).filter(|bit| bits & 1 << bit != 0).map(|bit| first + bit)));
    pages.sort_unstable();
    // The kernel may come late to the start of the transmit queue, and then writes to its used ring.
    pages.retain(|page| *page != machine.queues[TRANSMIT].used() / PAGE);
    assert_eq!(pages, [machine.queues[RECEIVE].used() / PAGE, BUFFERS / PAGE + 7]);
    machine.post(WRITABLE);
    assert!(machine.settled(), "and continues without a log");
    assert_eq!(machine.count(IommuCounter::Faults), 0);
}

#[test]
fn vhost_net_follows_its_function_into_bypass_and_back_live() {
    let mut machine = Machine::over_vhost("vhost3");
    let _traffic = traffic("vhost3", 93);
    machine.map(1, (WRITABLE, PAGE), BUFFERS + PAGE, READ_WRITE);
    machine.start();
    for domain in [3, 1] {
        machine.attach(domain, 0x100, u32::from(domain == 3));
        if domain == 1 {
            // The domain was removed with its last function.
            machine.map(1, (0, 0x2_0000), 0, READ_WRITE);
            machine.map(1, (WRITABLE, PAGE), BUFFERS + PAGE, READ_WRITE);
            machine.start();
        }
        let address = if domain == 3 { BUFFERS + PAGE } else { WRITABLE };
        machine.fill(1, 0xc5);
        machine.post(address);
        assert!(machine.settled(), "domain {domain}");
        assert_eq!(machine.page(1)[12..18], [0xff; 6]);
    }
    assert_eq!(machine.memory.last_addr().0 + 1, MEMORY);
}

#[test]
fn a_vdpa_device_writes_no_page_unmapped_under_traffic() {
    let tap = HostTap::persistent("vdpa0");
    let fixture = Process::vduse_net(&["name=taken,tap=vdpa0,mac=52:54:00:00:00:77"]);
    let mut machine = Machine::over_vdpa(&fixture, "taken");
    let _traffic = traffic("vdpa0", 94);
    machine.take_away(rounds(100), Duration::from_micros(500));
    drop(machine);
    drop((fixture, tap));
}

#[test]
fn a_vhost_user_backend_writes_no_page_unmapped_under_traffic() {
    let (tap, folder) = (HostTap::persistent("vu0"), tempfile::tempdir().unwrap());
    let socket = folder.path().join("vu0.sock");
    let options = format!("socket={},tap=vu0,mac=52:54:00:00:00:77", socket.display());
    let mut fixture = Process::vhost_user_net(&["--translate", &options]);
    let mut machine = Machine::over_vhost_user(&socket);
    let _traffic = traffic("vu0", 95);
    // Each fault requires a start, of 60 ms in the lab.
    let rounds = rounds(100);
    machine.take_away(rounds, Duration::from_millis(1));
    assert!(fixture.count("vu0", "iotlb_updates") >= 2 * rounds as u64);
    drop(machine);
    drop((fixture, tap));
}
