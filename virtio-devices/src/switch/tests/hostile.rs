//! Drivers that write anything anywhere in their rings, besides honest ones.

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::rig::{BROADCAST, FEATURES, frame, mac, untrusted};
use crate::switch::steps::SwitchSteps;
use crate::testing::driver_queue::{DriverQueue, WRITE};
use crate::{GuestMap, NetSpec, Policy, SharedQueue};

const SIZE: u16 = 16;
/// The memory of the hostile drivers: their rings and buffers.
const HOSTILE: u64 = 64 << 10;
/// The rings and buffers of the others begin here.
const HONEST: u16 = 8;
const BUFFERS: u64 = 14 << 16;

fn spec(port: u16) -> NetSpec {
    NetSpec {
        queue_size: SIZE,
        policy: Policy { address: Some(mac(port)), ..untrusted() },
        ..NetSpec::new(&format!("v{port}"), mac(port))
    }
}

/// A queue whose rings are anywhere in the hostile memory.
fn hostile(base: u64) -> SharedQueue {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_desc_table_address(Some(base as u32), None);
    queue.set_avail_ring_address(Some(base as u32 + 0x400), None);
    queue.set_used_ring_address(Some(base as u32 + 0x800), None);
    queue.set_ready(true);
    Arc::new(Mutex::new(queue))
}

/// A write of a hostile driver.
#[derive(Debug, Clone)]
enum Write {
    /// A descriptor of a queue.
    Descriptor { queue: u64, index: u64, address: u64, len: u32, flags: u16, next: u16 },
    /// Chains that are available, and their number.
    Available { queue: u64, heads: Vec<u16>, more: u16 },
    /// Bytes anywhere.
    Bytes { at: u64, bytes: Vec<u8> },
    /// A frame with the source of its sender or another port, and a header, sent as drivers do, or nearly.
    Send { port: u64, at: u64, header: [u8; 12], from: u16, to: u16, len: u16, first: u16 },
    /// A buffer, provided as drivers do.
    Provide { port: u64, at: u64, len: u32 },
}

fn write() -> impl Strategy<Value = Write> {
    let address = prop_oneof![8 => 0..HOSTILE, 1 => any::<u64>()];
    let len = prop_oneof![6 => 0_u32..4000, 1 => any::<u32>()];
    prop_oneof![
        (0_u64..6, 0..u64::from(SIZE), address, len, 0_u16..8, 0_u16..20).prop_map(
            |(queue, index, address, len, flags, next)| Write::Descriptor { queue, index, address, len, flags, next }
        ),
        (0_u64..6, prop::collection::vec(0_u16..18, 0..16), prop_oneof![Just(0), any::<u16>()])
            .prop_map(|(queue, heads, more)| Write::Available { queue, heads, more }),
        (0..HOSTILE, prop::collection::vec(any::<u8>(), 0..64)).prop_map(|(at, bytes)| Write::Bytes { at, bytes }),
        (0_u64..2, 48_u64 << 10..60 << 10, header(), 0_u16..4, 0_u16..5, 14_u16..2000, 0_u16..2012).prop_map(
            |(port, at, header, from, to, len, first)| Write::Send { port, at, header, from, to, len, first }
        ),
        (0_u64..2, 48_u64 << 10..60 << 10, 0_u32..2000).prop_map(|(port, at, len)| Write::Provide { port, at, len }),
    ]
}

/// A virtio header without offloads, or with any.
fn header() -> impl Strategy<Value = [u8; 12]> {
    prop_oneof![Just([0; 12]), any::<[u8; 12]>(), Just([1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0])]
}

impl Write {
    fn carry_out(&self, memory: &GuestMap, indexes: &mut [u16; 6]) {
        let put = |at: u64, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(at)).unwrap();
        let base = |queue: u64| queue << 13;
        let mut offer = |queue: u64, chain: &[(u64, u64, u16)]| {
            let index = &mut indexes[queue as usize];
            // The table has room for chains of two.
            let head = *index % (SIZE / 2) * 2;
            for (i, (address, len, flags)) in (0..).zip(chain) {
                let flags = flags | u16::from(usize::from(i) + 1 < chain.len());
                let descriptor = [
                    &address.to_le_bytes()[..],
                    &(*len as u32).to_le_bytes(),
                    &flags.to_le_bytes(),
                    &(head + i + 1).to_le_bytes(),
                ];
                put(base(queue) + 16 * u64::from(head + i), &descriptor.concat());
            }
            put(base(queue) + 0x404 + 2 * u64::from(*index % SIZE), &head.to_le_bytes());
            *index = index.wrapping_add(1);
            put(base(queue) + 0x402, &index.to_le_bytes());
        };
        match self {
            Self::Descriptor { queue, index, address, len, flags, next } => {
                let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
                put(base(*queue) + 16 * index, &bytes.concat());
            }
            Self::Available { queue, heads, more } => {
                let index = &mut indexes[*queue as usize];
                for head in heads {
                    put(base(*queue) + 0x404 + 2 * u64::from(*index % SIZE), &head.to_le_bytes());
                    *index = index.wrapping_add(1);
                }
                put(base(*queue) + 0x402, &index.wrapping_add(*more).to_le_bytes());
            }
            Self::Bytes { at, bytes } => {
                let len = bytes.len().min((HOSTILE - at) as usize);
                put(*at, &bytes[..len]);
            }
            Self::Send { port, at, header, from, to, len, first } => {
                let to = if *to == 4 { BROADCAST } else { mac(*to) };
                put(*at, &[&header[..], &frame(mac(*from), to, usize::from(*len))].concat());
                let (first, all) = (u64::from(*first), u64::from(*len) + 12);
                let first = first.min(all);
                offer(3 * port + 1, &[(*at, first, 0), (at + first, all - first, 0)]);
            }
            Self::Provide { port, at, len } => offer(3 * port, &[(*at, (*len).into(), WRITE)]),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Two hostile ports and two honest ones. Whatever the hostile ones do, nothing panics, a frame that arrives at an
    /// honest port has a source of one of the others, and the honest ports reach each other.
    #[test]
    fn hostile_drivers_neither_spoof_frames_nor_stop_others(
        features in prop_oneof![Just(FEATURES), Just(FEATURES | 1 << 29), Just(FEATURES | 0x7f << 7 | 3)],
        writes in prop::collection::vec(prop::collection::vec(write(), 1..12), 1..12),
    ) {
        let memory = GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut driver = [0, 1, 2, 3].map(|queue| DriverQueue::new(&memory, HONEST + queue, SIZE));
        let honest = |port: usize, driver: &[DriverQueue; 4]| {
            (0..2).map(|queue| (queue, Arc::clone(&driver[2 * port + usize::from(queue)].queue))).collect::<Vec<_>>()
        };
        let evil = |port: u64| (0..3).map(|queue| (queue as u16, hostile((3 * port + queue) << 13))).collect();
        let ports =
            vec![(spec(0), evil(0)), (spec(1), evil(1)), (spec(2), honest(0, &driver)), (spec(3), honest(1, &driver))];
        let mut steps = SwitchSteps::new(&memory, features, None, ports).unwrap();
        let buffer = |port: usize, i: u64| BUFFERS + (port as u64 * 16 + i) * 2048;
        for port in 0..2 {
            (0..8).for_each(|i| _ = driver[2 * port].add(&[(buffer(port, i), 2048, WRITE)]));
        }
        let mut indexes = [0; 6];
        for round in &writes {
            round.iter().for_each(|write| write.carry_out(&memory, &mut indexes));
            let sent = frame(mac(2), mac(3), 100);
            let data = [&[0; 12][..], &sent].concat();
            driver[1].send(buffer(0, 15), &data, &[12]);
            // A hostile port may have filled the buffers first; so it gets its turn, and then they are provided again.
            let mut reached = false;
            for _ in 0..4 {
                steps.step();
                for port in 0..2 {
                    let table = u64::from(HONEST + 2 * port as u16) << 16;
                    // Further buffers of a frame do not begin with a header.
                    let mut further = 0;
                    for (head, len) in driver[2 * port].take_used() {
                        let at = driver[2 * port].bytes(table + 16 * u64::from(head), 8);
                        let at = u64::from_le_bytes(at.try_into().unwrap());
                        let got = driver[2 * port].bytes(at, len as usize);
                        if further == 0 {
                            further = u16::from_le_bytes([got[10], got[11]]);
                            let source = &got[18..24];
                            prop_assert!((0..4).any(|sender| source == mac(sender)), "{source:x?}");
                            prop_assert!(port == 1 || source != mac(2), "its own frame");
                            reached |= port == 1 && got[12..] == sent;
                        }
                        further -= 1;
                        driver[2 * port].add(&[(at, 2048, WRITE)]);
                    }
                }
            }
            driver[1].take_used();
            prop_assert!(reached, "the honest ports reach each other");
            prop_assert!(!steps.needs_reset(2) && !steps.needs_reset(3));
        }
    }
}
