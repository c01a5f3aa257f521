//! A memory device as seen by its driver and its host.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::GuestMap;
use crate::testing::driver_queue::{BUFFERS, MEMORY, WRITE, eventually};

/// The memory of the device: ten blocks.
const BLOCK: u64 = 64 << 10;
const START: u64 = MEMORY + (1 << 20);
const BLOCKS: u64 = 10;
const LEN: u64 = BLOCKS * BLOCK;
/// Address of replies.
const ANSWER: u64 = BUFFERS + 0x100;

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

const ACK: u16 = 0;
const NACK: u16 = 1;
const ERROR: u16 = 3;

/// The vector of configuration changes.
const CONFIG_VECTOR: u16 = 1;

type Guest = crate::testing::guest::Guest<Mem>;

fn region() -> Arc<MemRegion> {
    Arc::new(MemRegion::new(&(START..START + LEN), BLOCK, 1))
}

fn mem(region: &Arc<MemRegion>, node: Option<u16>) -> Mem {
    Mem::new(MemSpec { id: "_mem0".into(), node }, Arc::clone(region))
}

/// A guest with this memory.
fn guest() -> Guest {
    let ranges = [(GuestAddress(0), MEMORY as usize), (GuestAddress(START), LEN as usize)];
    Guest::in_memory(mem(&region(), None), &GuestMap::from_ranges(&ranges).unwrap())
}

impl Guest {
    fn count(&self, counter: MemCounter) -> u64 {
        self.device.counters().get(counter)
    }

    /// Answer of the device, and the state in it.
    fn ask(&mut self, kind: u16, address: u64, blocks: u16) -> (u16, u16) {
        let mut request = [0; 24];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        request[8..16].copy_from_slice(&address.to_le_bytes());
        request[16..18].copy_from_slice(&blocks.to_le_bytes());
        self.queues[0].memory_write(BUFFERS, &request);
        self.queues[0].memory_write(ANSWER, &[0xff; 10]);
        assert_eq!(self.send(&[(BUFFERS, 24, 0), (ANSWER, 10, WRITE)]), 10);
        let [a, b, padding @ .., c, d] = <[u8; 10]>::try_from(self.queues[0].bytes(ANSWER, 10)).unwrap();
        assert_eq!(padding, [0; 6]);
        (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
    }

    fn word(&self, block: u64) -> u64 {
        self.queues[0].memory.read_obj(GuestAddress(at(block))).unwrap()
    }

    fn write(&self, block: u64) {
        self.queues[0].memory.write_obj(u64::MAX, GuestAddress(at(block))).unwrap();
    }

    /// The words of the device configuration.
    fn config(&self) -> [u64; 7] {
        let mut bytes = [0; 56];
        self.device.config_read(0, &mut bytes);
        std::array::from_fn(|word| u64::from_le_bytes(bytes[8 * word..8 * word + 8].try_into().unwrap()))
    }
}

/// The address of a block.
fn at(block: u64) -> u64 {
    START + block * BLOCK
}

#[test]
fn the_host_asks_and_the_driver_plugs_as_much_but_no_more() {
    let mut guest = guest();
    assert_eq!(guest.workers[0].thread.name(), "_mem0_q0");
    assert_eq!(guest.config(), [BLOCK, 0, START, LEN, LEN, 0, 0]);
    assert_eq!(guest.ask(PLUG, at(0), 1).0, NACK, "nothing is wanted");
    let generation = guest.device.config_generation();
    guest.device.region.resize(3 * BLOCK + 1);
    assert_eq!(guest.interrupts.eventfd(CONFIG_VECTOR).unwrap().read().unwrap(), 1);
    assert_ne!(guest.device.config_generation(), generation);
    assert_eq!(guest.ask(PLUG, at(4), 4).0, NACK);
    assert_eq!(guest.ask(PLUG, at(4), 2).0, ACK);
    assert_eq!(guest.ask(PLUG, at(0), 1).0, ACK);
    assert_eq!(guest.ask(PLUG, at(1), 1).0, NACK);
    assert_eq!(guest.config(), [BLOCK, 0, START, LEN, LEN, 3 * BLOCK, 3 * BLOCK]);
    assert_eq!((guest.device.region.plugged(), guest.device.region.requested()), (3 * BLOCK, 3 * BLOCK));
    guest.device.region.resize(u64::MAX);
    assert_eq!(guest.device.region.requested(), LEN);
    eventually("counts", || guest.count(MemCounter::RefusedRequests) == 3);
    assert_eq!(guest.count(MemCounter::PluggedBlocks), 3);
    guest.await_interrupt(0);
}

#[test]
fn unplugged_blocks_are_freed_and_plugged_ones_read_zero() {
    let mut guest = guest();
    guest.device.region.resize(LEN);
    assert_eq!(guest.ask(PLUG, at(0), 10).0, ACK);
    (0..BLOCKS).for_each(|block| guest.write(block));
    assert_eq!(guest.ask(UNPLUG, at(3), 2).0, ACK);
    assert_eq!([2, 3, 4, 5].map(|block| guest.word(block) == 0), [false, true, true, false]);
    guest.write(3);
    assert_eq!(guest.ask(PLUG, at(3), 1).0, ACK);
    assert_eq!(guest.word(3), 0, "what was written while it was not plugged");
    assert_eq!(guest.ask(UNPLUG_ALL, 0, 0).0, ACK);
    assert!((0..BLOCKS).all(|block| guest.word(block) == 0));
    assert_eq!(guest.device.region.plugged(), 0);
}

#[test]
fn possibly_pinned_pages_are_cleared_but_not_freed() {
    let mut guest = guest();
    guest.device.region.keep_pages();
    guest.device.region.resize(LEN);
    assert_eq!(guest.ask(PLUG, at(0), 2).0, ACK);
    guest.write(0);
    assert_eq!(guest.ask(UNPLUG, at(0), 2).0, ACK);
    assert_eq!(guest.word(0), 0);
    // Nothing was freed: a word written while the block is unplugged stays.
    guest.write(0);
    assert_eq!(guest.ask(PLUG, at(0), 1).0, ACK);
    assert_eq!(guest.word(0), u64::MAX);
}

#[test]
fn requests_that_make_no_sense_change_nothing() {
    let mut guest = guest();
    guest.device.region.resize(LEN);
    assert_eq!(guest.ask(PLUG, at(2), 2).0, ACK);
    for (kind, address, count) in [
        (PLUG, at(2), 1),
        (PLUG, at(1), 2),
        (PLUG, at(0), 0),
        (PLUG, at(0) + 1, 1),
        (PLUG, at(9), 2),
        (PLUG, at(0) - BLOCK, 1),
        (PLUG, u64::MAX - BLOCK + 1, u16::MAX),
        (UNPLUG, at(0), 1),
        (UNPLUG, at(3), 2),
        (UNPLUG, at(BLOCKS), 1),
        (STATE, at(0), 0),
        (STATE, 0, 1),
        (4, at(0), 1),
        (u16::MAX, at(0), 1),
    ] {
        assert_eq!(guest.ask(kind, address, count).0, ERROR, "{kind} {address:#x} {count}");
    }
    assert_eq!(guest.ask(STATE, at(2), 2), (ACK, 0));
    assert_eq!(guest.ask(STATE, at(4), 6), (ACK, 1));
    assert_eq!(guest.ask(STATE, at(0), 10), (ACK, 2));
    eventually("counts", || guest.count(MemCounter::BadRequests) == 14);
}

#[test]
fn chains_that_make_no_sense_are_given_back_empty_and_counted() {
    let mut guest = guest();
    let chains: [&[(u64, u32, u16)]; 4] = [
        &[(BUFFERS, 24, 0)],
        &[(BUFFERS, 23, 0), (ANSWER, 10, WRITE)],
        &[(BUFFERS, 24, 0), (ANSWER, 9, WRITE)],
        &[(BUFFERS, 24, WRITE), (ANSWER, 10, 0)],
    ];
    for chain in chains {
        assert_eq!(guest.send(chain), 0);
    }
    eventually("counts", || guest.count(MemCounter::BadChains) == chains.len() as u64);
    guest.break_ring(0);
}

#[test]
fn device_reset_keeps_plugged_blocks_and_machine_reset_does_not() {
    let mut guest = guest();
    guest.device.region.resize(2 * BLOCK);
    assert_eq!(guest.ask(PLUG, at(5), 2).0, ACK);
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.device.region.plugged(), 2 * BLOCK);
    guest.device.region.resize(BLOCK);
    assert!(guest.interrupts.eventfd(CONFIG_VECTOR).unwrap().read().is_ok_and(|signals| signals == 1), "the first");
    guest.device.region.unplug_all();
    assert_eq!((guest.device.region.plugged(), guest.device.region.requested()), (0, BLOCK));
}

#[test]
fn the_node_of_the_memory_is_told_if_there_is_one() {
    let mem = mem(&region(), Some(3));
    assert_eq!(mem.features() & 3, 3);
    let mut bytes = [0; 4];
    mem.config_read(8, &mut bytes);
    assert_eq!(bytes, [3, 0, 0, 0]);
    mem.config_read(u64::MAX, &mut bytes);
    assert_eq!(bytes, [0; 4]);
}

#[test]
fn plugged_blocks_are_saved() {
    let mut guest = guest();
    assert_eq!(guest.device.save(), DeviceSpecific::PowerOn);
    guest.device.region.resize(LEN);
    assert_eq!(guest.ask(PLUG, at(1), 3).0, ACK);
    let state = guest.device.save();
    let other = region();
    let mut new = mem(&other, None);
    new.restore(&state, None).unwrap();
    assert_eq!((new.save(), other.plugged()), (state, 3 * BLOCK));
    for bits in [vec![0], vec![0, 4], vec![0; 3]] {
        assert!(new.restore(&DeviceSpecific::Config(bits), None).is_err());
    }
    new.restore(&DeviceSpecific::PowerOn, None).unwrap();
    assert_eq!(other.plugged(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any requests, compared with a list of plugged blocks.
    #[test]
    fn the_plugged_blocks_are_the_acknowledged_ones(
        requests in prop::collection::vec((0..5u16, 0..12u64, 0..4u16, prop::option::of(0..12u64)), 1..40)
    ) {
        let mut guest = guest();
        let (mut plugged, mut requested) = ([false; BLOCKS as usize], 0);
        for (kind, block, count, size) in requests {
            if let Some(size) = size {
                guest.device.region.resize(size * BLOCK);
                requested = size.min(BLOCKS);
            }
            let range = block as usize..block as usize + usize::from(count);
            let there = plugged.get(range.clone()).filter(|blocks| !blocks.is_empty());
            let count_of = |on| there.map(|blocks| blocks.iter().filter(|plugged| **plugged == on).count());
            let all = plugged.iter().filter(|plugged| **plugged).count();
            let expected = match (kind, there.map(<[bool]>::len)) {
                (UNPLUG_ALL, _) => (ACK, 0),
                (PLUG..=STATE, None) | (4.., _) => (ERROR, 0),
                (PLUG, len) if count_of(false) != len => (ERROR, 0),
                (PLUG, Some(len)) if (all + len) as u64 > requested => (NACK, 0),
                (UNPLUG, len) if count_of(true) != len => (ERROR, 0),
                (STATE, len) => (ACK, if count_of(true) == len { 0 } else { 2 - u16::from(count_of(false) == len) }),
                _ => (ACK, 0),
            };
            prop_assert_eq!(guest.ask(kind, at(block), count), expected);
            match kind {
                UNPLUG_ALL => plugged = [false; BLOCKS as usize],
                PLUG | UNPLUG if expected.0 == ACK => plugged[range].fill(kind == PLUG),
                _ => {}
            }
            let bytes = plugged.iter().filter(|plugged| **plugged).count() as u64 * BLOCK;
            prop_assert_eq!(guest.device.region.plugged(), bytes);
        }
    }
}
