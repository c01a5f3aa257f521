use std::sync::Arc;

use virtio_bindings::virtio_net::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::control::Control;
use super::super::counters::Counter;
use super::super::filter::{Filter, HEAD, Mode};
use super::super::testing::*;

const OK: u8 = 0;
const ERR: u8 = 1;
const ALL: u64 = u64::MAX;
const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];

/// A control queue with only a state behind it.
struct Commands {
    rig: Rig,
    driver: DriverQueue,
    peer: Arc<EventFd>,
}

impl Commands {
    fn new() -> Self {
        let rig = Rig::new();
        rig.state.change_filter(Filter::enable_vlans);
        let driver = DriverQueue::new(&rig.memory, 2, 64);
        Self { rig, driver, peer: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()) }
    }

    fn run(&mut self, features: u64) {
        let queue = self.driver.queue.clone();
        let ring = self.rig.ring(&queue, 2, false);
        let mut control = Control::new(ring, features, 4, vec![Arc::clone(&self.peer)]);
        while self.rig.pass(|pass| control.run(pass)).unwrap() {}
    }

    /// The device's answer to `command`, in pieces of `piece` bytes.
    fn send_in(&mut self, piece: usize, features: u64, command: &[u8]) -> u8 {
        self.driver.memory_write(BUFFERS, &[0xee]);
        self.driver.memory_write(BUFFERS + 1, command);
        let pieces = command.chunks(piece).enumerate();
        let mut chain: Vec<_> =
            pieces.map(|(i, part)| (BUFFERS + 1 + (i * piece) as u64, part.len() as u32, 0)).collect();
        chain.push((BUFFERS, 1, WRITE));
        self.driver.add(&chain);
        self.run(features);
        assert_eq!(self.driver.take_used().iter().map(|(_, len)| *len).collect::<Vec<_>>(), [1]);
        self.driver.bytes(BUFFERS, 1)[0]
    }

    fn send(&mut self, command: &[u8]) -> u8 {
        self.send_in(usize::MAX, ALL, command)
    }

    fn filter(&self) -> Filter {
        Filter::clone(&self.rig.state.filter())
    }

    fn wants(&self, mac: [u8; 6]) -> bool {
        let mut head = [0; HEAD];
        head[..6].copy_from_slice(&mac);
        self.filter().wants(&head)
    }
}

fn table(unicast: &[[u8; 6]], multicast: &[[u8; 6]]) -> Vec<u8> {
    let mut command = vec![1, 0];
    for addresses in [unicast, multicast] {
        command.extend((addresses.len() as u32).to_le_bytes());
        command.extend(addresses.concat());
    }
    command
}

/// A valid command of each kind, and the feature that it needs.
fn kinds() -> Vec<(u32, Vec<u8>)> {
    let mac = [&[1, 1], &OTHER[..]].concat();
    // A substitute for a tap accepts no offloads, so that one is tested by its refusals and with real taps.
    vec![
        (VIRTIO_NET_F_CTRL_RX, vec![0, 0, 0]),
        (VIRTIO_NET_F_CTRL_RX, vec![0, 1, 1]),
        (VIRTIO_NET_F_CTRL_RX_EXTRA, vec![0, 2, 1]),
        (VIRTIO_NET_F_CTRL_RX_EXTRA, vec![0, 3, 1]),
        (VIRTIO_NET_F_CTRL_RX_EXTRA, vec![0, 4, 1]),
        (VIRTIO_NET_F_CTRL_RX_EXTRA, vec![0, 5, 1]),
        (VIRTIO_NET_F_CTRL_RX, table(&[OTHER], &[GROUP])),
        (VIRTIO_NET_F_CTRL_MAC_ADDR, mac),
        (VIRTIO_NET_F_CTRL_VLAN, vec![2, 0, 5, 0]),
        (VIRTIO_NET_F_CTRL_VLAN, vec![2, 1, 5, 0]),
        (VIRTIO_NET_F_MQ, vec![4, 0, 2, 0]),
    ]
}

#[test]
fn each_command_needs_its_feature() {
    for (feature, command) in kinds() {
        assert_eq!(Commands::new().send_in(usize::MAX, 1 << feature, &command), OK, "{command:?}");
        let mut commands = Commands::new();
        let before = commands.filter();
        assert_eq!(commands.send_in(usize::MAX, !(1 << feature), &command), ERR, "{command:?}");
        assert_eq!((commands.filter(), commands.rig.state.mac()), (before, MAC), "{command:?}");
    }
}

#[test]
fn a_command_may_be_cut_anywhere_and_must_be_whole() {
    for (_, command) in kinds() {
        for piece in 1..command.len() {
            assert_eq!(Commands::new().send_in(piece, ALL, &command), OK, "{command:?} in pieces of {piece}");
            let mut commands = Commands::new();
            let before = commands.filter();
            assert_eq!(commands.send(&command[..piece]), ERR, "the first {piece} of {command:?}");
            assert_eq!((commands.filter(), commands.rig.state.active_pairs()), (before, 1), "{piece} of {command:?}");
        }
    }
}

#[test]
fn commands_that_do_not_exist_are_refused() {
    let mut commands = Commands::new();
    for class in 0..=u8::MAX {
        for number in [6, 7, 0x7f, 0xff] {
            assert_eq!(commands.send(&[class, number, 1, 0, 0, 0, 0, 0, 0, 0]), ERR, "{class} {number}");
        }
    }
    assert_eq!(commands.rig.count(Counter::ControlRefused), 1024);
}

#[test]
fn modes_and_tables_change_what_is_wanted() {
    let mut commands = Commands::new();
    assert!(commands.wants(OTHER));
    assert_eq!(commands.send(&[0, 0, 0]), OK);
    assert!(!commands.wants(OTHER) && !commands.wants(GROUP) && commands.wants(MAC));
    assert_eq!(commands.send(&table(&[OTHER], &[GROUP])), OK);
    assert!(commands.wants(OTHER) && commands.wants(GROUP));
    assert_eq!(commands.send(&table(&[], &[])), OK);
    assert!(!commands.wants(OTHER) && !commands.wants(GROUP));
    assert_eq!(commands.send(&[0, 1, 1]), OK);
    assert!(!commands.wants(OTHER) && commands.wants(GROUP));
    let mut expected = Filter::new(MAC);
    expected.enable_vlans();
    expected.set_mode(Mode::Promiscuous, false);
    expected.set_mode(Mode::AllMulticast, true);
    assert_eq!(commands.filter(), expected);
}

#[test]
fn oversized_filter_accepts_its_kind_and_truncated_is_rejected() {
    let mut commands = Commands::new();
    commands.send(&[0, 0, 0]);
    let many: Vec<_> = (0..1000u16).map(|i| [2, 0, 0, 0, (i >> 8) as u8, i as u8]).collect();
    assert_eq!(commands.send(&table(&many, &[])), OK);
    assert!(commands.wants(OTHER) && !commands.wants(GROUP));
    assert_eq!(commands.send(&table(&[], &[])), OK);
    let mut endless = table(&[OTHER], &[]);
    endless[2..6].fill(0xff);
    assert_eq!(commands.send(&endless), ERR);
    assert!(!commands.wants(OTHER));
    // At most 64 KiB are read.
    assert_eq!(commands.send(&table(&vec![OTHER; 11_000], &[])), ERR);
    assert!(!commands.wants(OTHER));
}

#[test]
fn a_mac_is_set_if_it_is_a_unicast_one_and_is_new_configuration() {
    let mut commands = Commands::new();
    let generation = commands.rig.state.generation();
    for refused in [GROUP, [0xff; 6], [0; 6]] {
        assert_eq!(commands.send(&[&[1, 1], &refused[..]].concat()), ERR);
        assert_eq!((commands.rig.state.mac(), commands.rig.state.generation()), (MAC, generation));
    }
    assert_eq!(commands.send(&[&[1, 1], &OTHER[..]].concat()), OK);
    assert_eq!(commands.rig.state.mac(), OTHER);
    assert_ne!(commands.rig.state.generation(), generation);
    commands.send(&[0, 0, 0]);
    assert!(commands.wants(OTHER) && !commands.wants(MAC));
}

#[test]
fn a_vlan_beyond_4095_is_refused() {
    let mut commands = Commands::new();
    for (id, expected) in [(0u16, OK), (1, OK), (4095, OK), (4096, ERR), (u16::MAX, ERR)] {
        for number in [0, 1] {
            assert_eq!(commands.send(&[&[2, number], &id.to_le_bytes()[..]].concat()), expected, "{id}");
        }
    }
}

#[test]
fn driver_can_use_all_queue_pairs_and_workers_are_notified() {
    let mut commands = Commands::new();
    for (pairs, expected, active) in [(4u16, OK, 4), (0, ERR, 4), (5, ERR, 4), (u16::MAX, ERR, 4), (1, OK, 1)] {
        assert_eq!(commands.send(&[&[4, 0], &pairs.to_le_bytes()[..]].concat()), expected, "{pairs}");
        assert_eq!(commands.rig.state.active_pairs(), active, "{pairs}");
        assert_eq!(commands.peer.read().is_ok(), expected == OK, "{pairs}");
    }
}

#[test]
fn offloads_that_were_not_negotiated_are_refused() {
    let mut commands = Commands::new();
    let negotiated = 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS | 1 << VIRTIO_NET_F_GUEST_CSUM;
    for wanted in [1u64 << VIRTIO_NET_F_GUEST_TSO4, 1, 1 << 63, u64::MAX] {
        let command = [&[5, 0], &wanted.to_le_bytes()[..]].concat();
        assert_eq!(commands.send_in(usize::MAX, negotiated, &command), ERR, "{wanted:#x}");
    }
}

#[test]
fn bad_control_chains_return_with_an_error_status_if_writable() {
    type Chain = &'static [(u64, u32, u16)];
    let cases: [(&str, Chain, u32); 8] = [
        ("no byte for the answer", &[(BUFFERS + 1, 3, 0)], 0),
        ("an empty answer", &[(BUFFERS + 1, 3, 0), (BUFFERS, 0, WRITE)], 0),
        ("no command", &[(BUFFERS, 1, WRITE)], 1),
        ("an empty command", &[(BUFFERS + 1, 0, 0), (BUFFERS, 1, WRITE)], 1),
        ("the answer before the command", &[(BUFFERS, 1, WRITE), (BUFFERS + 1, 3, 0)], 1),
        ("a command outside memory", &[(MEMORY, 3, 0), (BUFFERS, 1, WRITE)], 1),
        ("a command of all memory", &[(0, MEMORY as u32, 0), (BUFFERS, 1, WRITE)], 1),
        ("an answer outside memory", &[(BUFFERS + 1, 3, 0), (MEMORY, 1, WRITE)], 0),
    ];
    for (what, chain, written) in cases {
        let mut commands = Commands::new();
        commands.driver.memory_write(BUFFERS, &[0xee, 0, 1, 1]);
        let before = commands.filter();
        let head = commands.driver.add(chain);
        commands.run(ALL);
        assert_eq!(commands.driver.take_used(), [(head.into(), written)], "{what}");
        let answer = if written == 1 { ERR } else { 0xee };
        assert_eq!((commands.driver.bytes(BUFFERS, 1)[0], commands.filter()), (answer, before), "{what}");
        assert_eq!(commands.rig.count(Counter::ControlRefused), 1, "{what}");
    }
}
