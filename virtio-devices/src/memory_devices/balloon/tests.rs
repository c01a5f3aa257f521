//! A balloon as seen by its driver and by its host.

use std::collections::BTreeSet;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::pass::{DEFLATE, INFLATE, MAX_PAGES, REPORT};
use super::*;
use crate::memory::discard::PAGE;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually, memory};

/// The first page that tests return. Rings and page numbers are below.
const FIRST: u64 = 2 << 20;
/// The vector of configuration changes.
const CONFIG_VECTOR: u16 = 3;

type Guest = crate::testing::guest::Guest<Balloon>;

fn spec() -> BalloonSpec {
    BalloonSpec { id: "__balloon".into(), size: 1 << 20, deflate_on_oom: false, free_page_reporting: true }
}

fn guest() -> Guest {
    let mut guest = Guest::stopped(Balloon::new(spec(), Arc::default()), (), &memory(), &[32; 3]);
    for page in (FIRST..MEMORY).step_by(PAGE as usize) {
        guest.queues[0].memory_write(page, &[0xee; 16]);
    }
    guest.start();
    guest
}

impl Guest {
    fn count(&self, counter: BalloonCounter) -> u64 {
        self.device.counters().get(counter)
    }

    /// Rings the doorbell of `queue`, and waits until the device has used `count` chains of it.
    fn run(&mut self, queue: u16, count: usize) {
        self.kick(queue);
        self.used(queue, count);
    }

    /// Sends `pages` through `queue`, and waits until they are used.
    fn send_pages(&mut self, queue: u16, pages: &[u32]) {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.queues[usize::from(queue)].send(BUFFERS, &bytes, &[]);
        self.run(queue, 1);
    }

    fn report(&mut self, ranges: &[(u64, u32)]) {
        let buffers: Vec<_> = ranges.iter().map(|(address, len)| (*address, *len, WRITE)).collect();
        self.queues[usize::from(REPORT)].add(&buffers);
        self.run(REPORT, 1);
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
        self.device.config_read(0, &mut bytes);
        assert_eq!(bytes[8..], [0; 4], "there is nothing further");
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        (word(0), word(4))
    }
}

fn number(page: u64) -> u32 {
    ((FIRST + page * PAGE) / PAGE) as u32
}

#[test]
fn pages_in_the_balloon_return_to_the_host_and_no_others_do() {
    let mut guest = guest();
    assert_eq!(guest.workers[0].thread.name(), "__balloon_q0");
    guest.send_pages(INFLATE, &[7, 3, 4, 9, 5].map(number));
    assert_eq!(guest.gone(), [3, 4, 5, 7, 9]);
    eventually("counts", || guest.count(BalloonCounter::DiscardedBytes) == 5 * PAGE);
    assert_eq!(guest.count(BalloonCounter::InflatedPages), 5);
    guest.await_interrupt(INFLATE);
    assert!(!guest.interrupted(DEFLATE));
}

#[test]
fn a_deflated_page_keeps_what_the_driver_wrote_to_it() {
    let mut guest = guest();
    guest.send_pages(INFLATE, &[number(1)]);
    guest.queues[0].memory_write(FIRST + PAGE, &[1; 16]);
    guest.send_pages(DEFLATE, &[number(1), number(2)]);
    assert!(guest.gone().is_empty());
    eventually("counts", || guest.count(BalloonCounter::DeflatedPages) == 2);
}

#[test]
fn free_memory_that_is_reported_is_the_hosts_in_whole_pages() {
    let mut guest = guest();
    guest.report(&[(FIRST, 0x3000), (FIRST + 0x5800, 0x2000), (FIRST + 0x9000, 0x800)]);
    assert_eq!(guest.gone(), [0, 1, 2, 6]);
    let counted = || {
        [BalloonCounter::ReportedBytes, BalloonCounter::DiscardedBytes, BalloonCounter::KeptBytes]
            .map(|of| guest.count(of))
    };
    eventually("counts", || counted() == [0x5800, 4 * PAGE, 0x5800 - 4 * PAGE]);
}

#[test]
fn pages_outside_memory_are_counted_and_others_given_back() {
    let mut guest = guest();
    let beyond = (MEMORY / PAGE) as u32;
    guest.send_pages(INFLATE, &[u32::MAX, beyond - 1, beyond, beyond + 1, number(0)]);
    assert_eq!(guest.gone(), [0, (MEMORY - FIRST) / PAGE - 1]);
    eventually("counts", || guest.count(BalloonCounter::BadRanges) == 2);
    guest.report(&[(MEMORY - PAGE, u32::MAX / 2), (u64::MAX - 5, u32::MAX / 4), (FIRST + PAGE, 0x1000)]);
    assert_eq!(guest.gone(), [0, 1, (MEMORY - FIRST) / PAGE - 1]);
    eventually("counts", || guest.count(BalloonCounter::BadRanges) == 4);
}

#[test]
fn chains_that_make_no_sense_are_given_back_and_counted() {
    let mut guest = guest();
    let longest = 4 * MAX_PAGES as u32;
    let chains = [(BUFFERS, 4, WRITE), (BUFFERS, 0, 0), (BUFFERS, 6, 0), (MEMORY - 4, 8, 0), (BUFFERS, longest + 4, 0)];
    for chain in chains {
        guest.queues[0].add(&[chain]);
    }
    guest.run(INFLATE, chains.len());
    guest.queues[usize::from(REPORT)].add(&[(FIRST, 0x1000, 0)]);
    guest.run(REPORT, 1);
    assert!(guest.gone().is_empty());
    eventually("counts", || guest.count(BalloonCounter::BadChains) == chains.len() as u64 + 1);
    // The maximum length, in descriptors that split page numbers.
    let pages: Vec<u8> = (0..MAX_PAGES as u32).flat_map(|page| number(u64::from(page) % 300).to_le_bytes()).collect();
    guest.queues[0].send(BUFFERS, &pages, &[1, 1022, 3]);
    guest.run(INFLATE, 1);
    assert_eq!(guest.gone(), (0..300).collect::<Vec<_>>());
}

#[test]
fn an_invalid_ring_stops_its_queue_and_the_others_keep_running() {
    let mut guest = guest();
    guest.break_ring(INFLATE);
    guest.report(&[(FIRST, 0x1000)]);
    assert_eq!(guest.gone(), [0]);
    eventually("a count", || guest.count(BalloonCounter::BrokenRings) == 1);
}

#[test]
fn a_pause_keeps_the_position_of_each_queue() {
    let mut guest = guest();
    guest.send_pages(INFLATE, &[number(0)]);
    guest.stop();
    let bytes: Vec<u8> = number(1).to_le_bytes().to_vec();
    guest.queues[0].send(BUFFERS, &bytes, &[]);
    guest.start();
    guest.run(INFLATE, 1);
    assert_eq!(guest.gone(), [0, 1]);
}

#[test]
fn host_and_driver_exchange_the_size_in_configuration_space() {
    let mut guest = guest();
    let size = Arc::clone(&guest.device.size);
    assert_eq!(guest.read_config(), (256, 0));
    let generation = guest.device.config_generation();
    size.resize(3 << 20);
    assert_eq!(guest.interrupts.eventfd(CONFIG_VECTOR).unwrap().read().unwrap(), 1);
    assert_ne!(guest.device.config_generation(), generation);
    size.resize(3 << 20);
    assert!(!guest.config_changed(), "nothing has changed");
    guest.device.config_write(4, &700u32.to_le_bytes());
    guest.device.config_write(0, &[0xff; 4]);
    guest.device.config_write(u64::MAX, &[0xff; 4]);
    assert_eq!(guest.read_config(), (768, 700));
    assert_eq!((size.requested(), size.actual()), (3 << 20, 700 * PAGE));
    guest.device.config_write(7, &[1, 2]);
    assert_eq!(guest.read_config(), (768, 700 | 1 << 24));
    size.resize(u64::MAX);
    assert_eq!(guest.read_config().0, u32::MAX);
}

#[test]
fn a_reset_empties_the_balloon_and_keeps_the_hosts_request() {
    let mut guest = guest();
    guest.device.config_write(4, &5u32.to_le_bytes());
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.read_config(), (256, 0));
    guest.device.size.resize(0);
    assert!(!guest.config_changed(), "there is no driver to notify");
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
        let mut guest = guest();
        let mut expected = BTreeSet::<u64>::new();
        for (report, pages) in chains {
            if report {
                // A chain has at most as many descriptors as the queue.
                let ranges: Vec<_> = pages.iter().take(30).map(|page| (FIRST + page * PAGE, PAGE as u32)).collect();
                expected.extend(pages.iter().take(30));
                guest.report(&ranges);
            } else {
                expected.extend(&pages);
                guest.send_pages(INFLATE, &pages.iter().map(|page| number(*page)).collect::<Vec<_>>());
            }
        }
        prop_assert_eq!(guest.gone(), expected.into_iter().collect::<Vec<_>>());
    }
}
