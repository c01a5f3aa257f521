//! A balloon as seen by its driver and by its host.

use std::collections::BTreeSet;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::pass::{DEFLATE, INFLATE, MAX_PAGES, REPORT};
use super::*;
use crate::Interrupts;
use crate::memory::discard::PAGE;
use crate::net::testing::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually, memory};

/// The first page that tests return. Rings and page numbers are below.
const FIRST: u64 = 2 << 20;
/// The vector of configuration changes.
const CONFIG_VECTOR: u16 = 3;

struct Guest {
    balloon: Balloon,
    queues: [DriverQueue; 3],
    interrupts: Arc<Interrupts>,
    workers: Vec<Worker>,
}

fn spec() -> BalloonSpec {
    BalloonSpec { id: "__balloon".into(), size: 1 << 20, deflate_on_oom: false, free_page_reporting: true }
}

impl Guest {
    fn new() -> Self {
        let map = memory();
        let interrupts = Arc::new(Interrupts::new(3, 4));
        (0..3).for_each(|queue| interrupts.set_queue_vector(queue, queue));
        interrupts.set_config_vector(CONFIG_VECTOR);
        let queues = [INFLATE, DEFLATE, REPORT].map(|index| DriverQueue::new(&map, index, 32));
        let mut guest = Self { balloon: Balloon::new(spec(), Arc::default()), queues, interrupts, workers: Vec::new() };
        for page in (FIRST..MEMORY).step_by(PAGE as usize) {
            guest.queues[0].memory_write(page, &[0xee; 16]);
        }
        guest.start();
        guest
    }

    fn start(&mut self) {
        let start = Start {
            memory: self.queues[0].memory.clone().into(),
            features: self.balloon.features(),
            queues: (0..).zip(&self.queues).map(|(index, queue)| (index, Arc::clone(&queue.queue))).collect(),
            interrupts: Arc::clone(&self.interrupts),
        };
        self.workers = self.balloon.start(start).unwrap();
    }

    fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    fn kick(&self) {
        self.workers[0].kick.write(1).unwrap();
    }

    fn count(&self, counter: BalloonCounter) -> u64 {
        self.balloon.counters().get(counter)
    }

    /// Waits until the device has used `count` chains of `queue`.
    fn used(&mut self, queue: u16, count: usize) {
        let mut used = 0;
        self.kick();
        eventually("completion", || {
            used += self.queues[usize::from(queue)].take_used().len();
            used >= count
        });
        assert_eq!(used, count);
    }

    /// Sends `pages` through `queue`, and waits until they are used.
    fn send(&mut self, queue: u16, pages: &[u32]) {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.queues[usize::from(queue)].send(BUFFERS, &bytes, &[]);
        self.used(queue, 1);
    }

    fn report(&mut self, ranges: &[(u64, u32)]) {
        let buffers: Vec<_> = ranges.iter().map(|(address, len)| (*address, *len, WRITE)).collect();
        self.queues[usize::from(REPORT)].add(&buffers);
        self.used(REPORT, 1);
    }

    fn is_there(&self, page: u64) -> bool {
        self.queues[0].memory.read_obj::<u64>(GuestAddress(page)).unwrap() != 0
    }

    /// The pages returned to the host, counted from [`FIRST`].
    fn gone(&self) -> Vec<u64> {
        let pages = (FIRST..MEMORY).step_by(PAGE as usize);
        pages.filter(|page| !self.is_there(*page)).map(|page| (page - FIRST) / PAGE).collect()
    }

    fn read_config(&self) -> (u32, u32) {
        let mut bytes = [0xff; 12];
        self.balloon.config_read(0, &mut bytes);
        assert_eq!(bytes[8..], [0; 4], "there is nothing further");
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        (word(0), word(4))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
    }
}

fn number(page: u64) -> u32 {
    ((FIRST + page * PAGE) / PAGE) as u32
}

#[test]
fn pages_in_the_balloon_return_to_the_host_and_no_others_do() {
    let mut guest = Guest::new();
    assert_eq!(guest.workers[0].thread.name(), "__balloon_q0");
    guest.send(INFLATE, &[7, 3, 4, 9, 5].map(number));
    assert_eq!(guest.gone(), [3, 4, 5, 7, 9]);
    eventually("counts", || guest.count(BalloonCounter::DiscardedBytes) == 5 * PAGE);
    assert_eq!(guest.count(BalloonCounter::InflatedPages), 5);
    eventually("an interrupt", || guest.interrupts.eventfd(INFLATE).unwrap().read().is_ok());
    assert!(guest.interrupts.eventfd(DEFLATE).is_some_and(|eventfd| eventfd.read().is_err()));
}

#[test]
fn a_deflated_page_keeps_what_the_driver_wrote_to_it() {
    let mut guest = Guest::new();
    guest.send(INFLATE, &[number(1)]);
    guest.queues[0].memory_write(FIRST + PAGE, &[1; 16]);
    guest.send(DEFLATE, &[number(1), number(2)]);
    assert!(guest.gone().is_empty());
    eventually("counts", || guest.count(BalloonCounter::DeflatedPages) == 2);
}

#[test]
fn free_memory_that_is_reported_is_the_hosts_in_whole_pages() {
    let mut guest = Guest::new();
    guest.report(&[(FIRST, 0x3000), (FIRST + 0x5800, 0x2000), (FIRST + 0x9000, 0x800)]);
    assert_eq!(guest.gone(), [0, 1, 2, 6]);
    let counted = || {
        [BalloonCounter::ReportedBytes, BalloonCounter::DiscardedBytes, BalloonCounter::KeptBytes]
            .map(|of| guest.count(of))
    };
    eventually("counts", || counted() == [0x5800, 4 * PAGE, 0x5800 - 4 * PAGE]);
}

#[test]
fn what_is_not_memory_is_counted_and_the_rest_is_given_back() {
    let mut guest = Guest::new();
    let beyond = (MEMORY / PAGE) as u32;
    guest.send(INFLATE, &[u32::MAX, beyond - 1, beyond, beyond + 1, number(0)]);
    assert_eq!(guest.gone(), [0, (MEMORY - FIRST) / PAGE - 1]);
    eventually("counts", || guest.count(BalloonCounter::BadRanges) == 2);
    guest.report(&[(MEMORY - PAGE, u32::MAX / 2), (u64::MAX - 5, u32::MAX / 4), (FIRST + PAGE, 0x1000)]);
    assert_eq!(guest.gone(), [0, 1, (MEMORY - FIRST) / PAGE - 1]);
    eventually("counts", || guest.count(BalloonCounter::BadRanges) == 4);
}

#[test]
fn chains_that_make_no_sense_are_given_back_and_counted() {
    let mut guest = Guest::new();
    let longest = 4 * MAX_PAGES as u32;
    let chains = [(BUFFERS, 4, WRITE), (BUFFERS, 0, 0), (BUFFERS, 6, 0), (MEMORY - 4, 8, 0), (BUFFERS, longest + 4, 0)];
    for chain in chains {
        guest.queues[0].add(&[chain]);
    }
    guest.used(INFLATE, chains.len());
    guest.queues[usize::from(REPORT)].add(&[(FIRST, 0x1000, 0)]);
    guest.used(REPORT, 1);
    assert!(guest.gone().is_empty());
    eventually("counts", || guest.count(BalloonCounter::BadChains) == chains.len() as u64 + 1);
    // The maximum length, in descriptors that split page numbers.
    let pages: Vec<u8> = (0..MAX_PAGES as u32).flat_map(|page| number(u64::from(page) % 300).to_le_bytes()).collect();
    guest.queues[0].send(BUFFERS, &pages, &[1, 1022, 3]);
    guest.used(INFLATE, 1);
    assert_eq!(guest.gone(), (0..300).collect::<Vec<_>>());
}

#[test]
fn an_invalid_ring_stops_its_queue_and_the_others_keep_running() {
    let mut guest = Guest::new();
    guest.queues[0].write(guest.queues[0].avail() + 2, 1000u16.to_le_bytes());
    guest.kick();
    eventually("a request for a reset", || guest.interrupts.needs_reset());
    guest.report(&[(FIRST, 0x1000)]);
    assert_eq!(guest.gone(), [0]);
    eventually("a count", || guest.count(BalloonCounter::BrokenRings) == 1);
}

#[test]
fn a_pause_keeps_the_position_of_each_queue() {
    let mut guest = Guest::new();
    guest.send(INFLATE, &[number(0)]);
    guest.stop();
    let bytes: Vec<u8> = number(1).to_le_bytes().to_vec();
    guest.queues[0].send(BUFFERS, &bytes, &[]);
    guest.start();
    guest.used(INFLATE, 1);
    assert_eq!(guest.gone(), [0, 1]);
}

#[test]
fn host_and_driver_exchange_the_size_in_configuration_space() {
    let mut guest = Guest::new();
    let size = Arc::clone(&guest.balloon.size);
    assert_eq!(guest.read_config(), (256, 0));
    let generation = guest.balloon.config_generation();
    size.resize(3 << 20);
    assert_eq!(guest.interrupts.eventfd(CONFIG_VECTOR).unwrap().read().unwrap(), 1);
    assert_ne!(guest.balloon.config_generation(), generation);
    size.resize(3 << 20);
    assert!(guest.interrupts.eventfd(CONFIG_VECTOR).unwrap().read().is_err(), "nothing has changed");
    guest.balloon.config_write(4, &700u32.to_le_bytes());
    guest.balloon.config_write(0, &[0xff; 4]);
    guest.balloon.config_write(u64::MAX, &[0xff; 4]);
    assert_eq!(guest.read_config(), (768, 700));
    assert_eq!((size.requested(), size.actual()), (3 << 20, 700 * PAGE));
    guest.balloon.config_write(7, &[1, 2]);
    assert_eq!(guest.read_config(), (768, 700 | 1 << 24));
    size.resize(u64::MAX);
    assert_eq!(guest.read_config().0, u32::MAX);
}

#[test]
fn a_reset_empties_the_balloon_and_keeps_the_hosts_request() {
    let mut guest = Guest::new();
    guest.balloon.config_write(4, &5u32.to_le_bytes());
    guest.stop();
    guest.balloon.reset();
    assert_eq!(guest.read_config(), (256, 0));
    guest.balloon.size.resize(0);
    assert!(guest.interrupts.eventfd(CONFIG_VECTOR).unwrap().read().is_err(), "there is no driver to notify");
    guest.start();
    assert_eq!(guest.read_config(), (0, 0));
}

#[test]
fn features_and_queues_follow_from_the_options() {
    let balloon = |deflate_on_oom, free_page_reporting| {
        Balloon::new(BalloonSpec { deflate_on_oom, free_page_reporting, ..spec() }, Arc::default())
    };
    let own = |balloon: &Balloon| balloon.features() & 0xff;
    assert_eq!((own(&balloon(false, false)), balloon(false, false).queue_sizes()), (0, &[128, 128][..]));
    assert_eq!((own(&balloon(true, false)), balloon(true, false).queue_sizes()), (1 << 2, &[128, 128][..]));
    assert_eq!((own(&balloon(false, true)), balloon(false, true).queue_sizes()), (1 << 5, &[128, 128, 32][..]));
}

#[test]
fn the_size_that_the_driver_reported_is_saved() {
    let mut balloon = Balloon::new(spec(), Arc::default());
    assert_eq!(balloon.save(), DeviceSpecific::PowerOn);
    balloon.config_write(4, &0x0102_0304_u32.to_le_bytes());
    let state = balloon.save();
    let mut other = Balloon::new(spec(), Arc::default());
    other.restore(&state, Some(0)).unwrap();
    assert_eq!(other.save(), state);
    assert!(other.restore(&DeviceSpecific::Config(vec![0; 5]), None).is_err());
    other.restore(&DeviceSpecific::PowerOn, None).unwrap();
    assert_eq!(other.save(), DeviceSpecific::PowerOn);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// For any requests of a driver, exactly the pages named are freed.
    #[test]
    fn exactly_the_pages_that_were_named_are_gone(
        chains in prop::collection::vec((any::<bool>(), prop::collection::vec(0..512u64, 1..40)), 1..10)
    ) {
        let mut guest = Guest::new();
        let mut expected = BTreeSet::<u64>::new();
        for (report, pages) in chains {
            if report {
                // A chain has at most as many descriptors as the queue.
                let ranges: Vec<_> = pages.iter().take(30).map(|page| (FIRST + page * PAGE, PAGE as u32)).collect();
                expected.extend(pages.iter().take(30));
                guest.report(&ranges);
            } else {
                expected.extend(&pages);
                guest.send(INFLATE, &pages.iter().map(|page| number(*page)).collect::<Vec<_>>());
            }
        }
        prop_assert_eq!(guest.gone(), expected.into_iter().collect::<Vec<_>>());
    }
}
