//! Any sequence of accesses: nothing panics, reads agree with peeks, and what is saved is restored.

mod common;

use common::{MAC, PF};
use proptest::prelude::*;
use x550::{Counter, Direction, Mac, Nic, NicState, Place, RestoreError, VfCounter, rows};

#[derive(Debug, Clone)]
enum Op {
    Read(Place, u64, usize),
    Write(Place, u64, Vec<u8>),
    Event(Direction, u16),
    Vfs(u16),
    Link(bool),
    ResetVf(u16),
    Reset,
    Count(u16, u64),
    Head(u16, u16),
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![2 => Just(PF), 2 => (0..4u16).prop_map(Place::Vf), 1 => any::<u16>().prop_map(Place::Vf)]
}

/// Offsets of registers, those next to them, and any.
fn offset() -> impl Strategy<Value = u64> {
    let registers: Vec<u64> = rows()
        .map(|row| u64::from(row.first + (row.count / 2) * row.stride))
        .chain([0x0, 0x8, 0x600, 0x700, 0x710, 0x800, 0x808, 0x880, 0xa90, 0xaa0, 0xad4, 0x2f04, 0x4984, 0x4260])
        .chain([0x4b00, 0x10140, 0x13000, 0x15800, 0x15804, 0x15808, 0x15f00, 0x100, 0x108, 0x120, 0x140, 0x200, 0x2fc])
        .collect();
    let register = prop::sample::select(registers);
    prop_oneof![
        6 => register.clone(),
        1 => (register, 0..8u64).prop_map(|(at, more)| at + more),
        1 => 0..0x8_0010u64,
        1 => any::<u64>(),
    ]
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => prop_oneof![any::<u32>(), Just(u32::MAX), Just(0x31), Just(3), Just(1 << 26), Just(1 << 30 | 3 << 26)]
            .prop_map(|value| value.to_le_bytes().to_vec()),
        1 => any::<[u8; 8]>().prop_map(|bytes| bytes.to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..20),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let direction = prop_oneof![Just(Direction::Receive), Just(Direction::Transmit)];
    prop_oneof![
        8 => (place(), offset(), data()).prop_map(|(place, offset, data)| Op::Write(place, offset, data)),
        4 => (place(), offset(), 0..20usize).prop_map(|(place, offset, len)| Op::Read(place, offset, len)),
        2 => (direction, any::<u16>()).prop_map(|(direction, queue)| Op::Event(direction, queue % 160)),
        1 => any::<u16>().prop_map(Op::Vfs),
        1 => any::<bool>().prop_map(Op::Link),
        1 => any::<u16>().prop_map(|index| Op::ResetVf(index % 70)),
        1 => (any::<u16>(), any::<u64>()).prop_map(|(index, amount)| Op::Count(index, amount)),
        1 => (any::<u16>(), any::<u16>()).prop_map(|(queue, head)| Op::Head(queue, head)),
        1 => Just(Op::Reset),
    ]
}

/// Performs an operation. Returns the vectors that it sent.
fn run(nic: &mut Nic, op: Op) -> Vec<(Place, u64)> {
    match op {
        Op::Read(place, offset, len) => {
            let (mut peeked, mut read) = (vec![0xaa; len], vec![0x55; len]);
            let before = nic.clone();
            nic.peek(place, offset, &mut peeked);
            assert_eq!(*nic, before, "a peek changes nothing");
            nic.read(place, offset, &mut read);
            // A longer read sees what the read of its first registers has changed, such as EICR before EICS.
            assert!(len > 8 || read == peeked, "{place:?} {offset:#x}: {read:?}, {peeked:?}");
            Vec::new()
        }
        Op::Write(place, offset, data) => nic.write(place, offset, &data).vectors,
        Op::Event(direction, queue) => nic.queue_event(direction, queue).vectors,
        Op::Vfs(num_vfs) => nic.set_num_vfs(num_vfs).vectors,
        Op::Link(up) => nic.set_link(up).vectors,
        Op::ResetVf(index) => nic.reset_vf(index).vectors,
        Op::Reset => nic.reset().vectors,
        Op::Count(index, amount) => {
            nic.count(Counter::BytesReceived, amount);
            nic.count_vf(index, VfCounter::BytesSent, amount);
            Vec::new()
        }
        Op::Head(queue, head) => {
            nic.set_head(Direction::Transmit, queue, head);
            Vec::new()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_leaves_a_nic_that_can_be_saved(ops in prop::collection::vec(op(), 1..60)) {
        let mut nic = Nic::new(MAC);
        for op in ops {
            for (place, vectors) in run(&mut nic, op) {
                prop_assert!(vectors != 0 && (place == PF || vectors < 8), "{place:?} {vectors:#x}");
            }
        }
        for pool in 0..70 {
            let pool = nic.pool(pool);
            prop_assert!(pool.addresses.len() <= 128 && pool.queues.end <= 128);
        }
        let _ = nic.switching();
        for queue in 0..130 {
            prop_assert!(nic.receive_queue(queue).available() < 0x1_0000);
            prop_assert!(nic.transmit_queue(queue).available() < 0x1_0000);
        }
        let state = nic.save();
        let mut other = Nic::new(MAC);
        other.restore(&state).unwrap();
        // The configuration determines the number of VFs.
        let num_vfs = common::peek(&nic, PF, 8) >> 10 & 0xff;
        let _ = other.set_num_vfs(u16::try_from(num_vfs).unwrap());
        prop_assert_eq!(&other, &nic);
    }

    #[test]
    fn any_registers_are_restored_or_refused(
        registers in prop::collection::vec(((0..0x8000u32).prop_map(|dword| 4 * dword), any::<u32>()), 0..20),
        vectors in any::<[u64; 4]>(),
        other in any::<[u32; 4]>(),
        firmware in prop::collection::vec(any::<u32>(), 0..500),
        queues in prop::collection::vec(any::<(u16, u32, u32)>(), 0..3),
    ) {
        let mut nic = Nic::new(MAC);
        let valid = nic.save();
        for state in [
            NicState { registers, ..valid.clone() },
            NicState { vectors, ..valid.clone() },
            NicState { other, ..valid.clone() },
            NicState { firmware, ..valid.clone() },
            NicState { queues, ..valid.clone() },
        ] {
            let before = nic.clone();
            match nic.restore(&state) {
                Ok(()) => prop_assert_eq!(nic.save(), state),
                Err(_) => prop_assert_eq!(&nic, &before),
            }
        }
    }
}

#[test]
fn a_state_of_another_kind_is_refused() {
    let mut nic = Nic::new(MAC);
    let state = nic.save();
    assert_eq!((state.registers.len(), state.firmware.len(), state.vfs.len()), (0, 0, 63), "a new NIC is small");
    for (wrong, error) in [
        (NicState { version: 2, ..state.clone() }, RestoreError::Version(2)),
        (NicState { vfs: Vec::new(), ..state.clone() }, RestoreError::Count("VFs")),
        (NicState { registers: vec![(0x4, 1)], ..state.clone() }, RestoreError::Value("offsets of registers")),
        (NicState { registers: vec![(0x5201, 1)], ..state.clone() }, RestoreError::Value("offsets of registers")),
        (NicState { registers: vec![(0x10148, 1)], ..state.clone() }, RestoreError::Value("registers")),
        (NicState { registers: vec![(0x42a4, 1)], ..state.clone() }, RestoreError::Value("registers")),
        (NicState { queues: vec![(128, 1, 1)], ..state.clone() }, RestoreError::Value("queues")),
        (NicState { semaphore: 4, ..state.clone() }, RestoreError::Value("registers")),
    ] {
        assert_eq!(nic.restore(&wrong), Err(error));
    }
    nic.restore(&state).unwrap();
    assert_eq!(nic, Nic::new(MAC));
    let _ = nic.set_link(true);
    let mut other = Nic::new(Mac([2; 6]));
    other.restore(&nic.save()).unwrap();
    assert!(other.link_is_up() && other.mac() == Mac([2; 6]), "the address is the configuration's");
}
