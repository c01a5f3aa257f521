//! The effect of a policy on a driver's frames.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MRG_RXBUF,
};

use super::super::counters::Counter;
use super::super::receive::Receive;
use super::super::testing::*;
use super::super::transmit::Transmit;
use crate::frames::policy::{Policy, PortVlan, Trunk, VlanProtocol, VlanSet};
use crate::{HostNic, HostSettings, MacError, NetSpec, RateLimits, VirtioDevice};

const FURTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 3];
const PORT_VLAN: PortVlan = PortVlan { id: 100, priority: 3, protocol: VlanProtocol::Customer };

/// A frame from `source`, with a tag of this VLAN if there is one.
fn from(source: [u8; 6], vlan: Option<u16>) -> Vec<u8> {
    let mut bytes = frame(OTHER, 60);
    bytes[6..12].copy_from_slice(&source);
    if let Some(vlan) = vlan {
        let [a, b] = vlan.to_be_bytes();
        bytes.splice(12..12, [0x81, 0, a, b]);
    }
    bytes
}

/// Sends these frames, each cut in two at `cut`. Returns the frames at the backend, and the counts.
fn sent(policy: &Policy, frames: &[Vec<u8>], cut: usize) -> (Vec<Vec<u8>>, Vec<(Counter, u64)>) {
    let mut rig = Rig::new();
    rig.policy.replace(policy.clone(), RateLimits::default()).wait().unwrap();
    let mut driver = DriverQueue::new(&rig.memory, 1, 64);
    for (i, frame) in frames.iter().enumerate() {
        driver.send(BUFFERS + 0x1000 * i as u64, &with_header(frame), &[cut]);
    }
    let queue = driver.queue.clone();
    let mut transmit = Transmit::new(rig.ring(&queue, 1, false), 0);
    rig.pass(|pass| transmit.run(pass)).unwrap();
    assert_eq!(driver.take_used().len(), frames.len(), "the driver gets all back");
    let out = std::iter::from_fn(|| receive(&rig.peer)).map(|data| data[12..].to_vec()).collect();
    let not_frames = [Counter::Interrupts, Counter::TxFrames, Counter::TxBytes];
    (out, rig.counts().into_iter().filter(|(counter, _)| !not_frames.contains(counter)).collect())
}

#[test]
fn policy_drops_are_counted_by_cause_and_other_frames_are_sent() {
    let own = from(MAC, None);
    let check = Policy { spoof_check: true, trusted: false, ..Policy::default() };
    let mut to_bridges = own.clone();
    to_bridges[..6].copy_from_slice(&[0x01, 0x80, 0xc2, 0, 0, 0]);
    let frames = [own.clone(), from(OTHER, None), to_bridges, from(FURTHER, None), own.clone()];
    for cut in [12, 17, 30, 40, 72] {
        let (out, counts) = sent(&check, &frames, cut);
        assert_eq!(out, [own.clone(), own.clone()], "cut at {cut}");
        assert_eq!(counts, [(Counter::TxSpoofedMac, 2), (Counter::TxReservedGroup, 1)], "cut at {cut}");
    }
    assert_eq!(sent(&Policy::default(), &frames, 12), (frames.to_vec(), Vec::new()));
}

#[test]
fn a_port_vlan_is_on_the_wire_and_no_other() {
    let policy = Policy { port_vlan: Some(PORT_VLAN), ..Policy::default() };
    let frames = [from(MAC, None), from(MAC, Some(100)), from(MAC, Some(0)), from(MAC, Some(5))];
    let (out, counts) = sent(&policy, &frames, 12);
    assert_eq!((out, counts), (vec![from(MAC, Some(0x6064)); 2], vec![(Counter::TxBadVlan, 2)]));
    // A frame that ends within the inspected bytes.
    let short = from(MAC, None)[..15].to_vec();
    let (out, _) = sent(&policy, std::slice::from_ref(&short), 12);
    assert_eq!(out, [[&short[..12], &[0x81, 0, 0x60, 0x64], &short[12..]].concat()]);
    let trunk = Trunk { vlans: VlanSet::of([5..=5]), protocol: VlanProtocol::Customer };
    let (out, counts) = sent(&Policy { trunk: Some(trunk), ..Policy::default() }, &frames, 12);
    assert_eq!((out, counts), (vec![from(MAC, Some(5))], vec![(Counter::TxBadVlan, 3)]));
}

#[test]
fn header_offsets_move_with_the_vlan_tag_and_never_precede_it() {
    let mut rig = Rig::new();
    rig.policy
        .replace(Policy { port_vlan: Some(PORT_VLAN), ..Policy::default() }, RateLimits::default())
        .wait()
        .unwrap();
    let mut driver = DriverQueue::new(&rig.memory, 1, 64);
    let header = |csum_start: u8| [1, 1, 54, 0, 100, 0, csum_start, 0, 16, 0, 0, 0];
    driver.send(BUFFERS, &[&header(34)[..], &frame(OTHER, 1514)].concat(), &[12]);
    driver.send(BUFFERS + 0x1000, &[&header(13)[..], &frame(OTHER, 1514)].concat(), &[12]);
    let queue = driver.queue.clone();
    let features = 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_HOST_TSO4;
    let mut transmit = Transmit::new(rig.ring(&queue, 1, false), features);
    rig.pass(|pass| transmit.run(pass)).unwrap();
    let out = receive(&rig.peer).unwrap();
    assert_eq!((&out[..12], out.len()), (&[1, 1, 58, 0, 100, 0, 38, 0, 16, 0, 0, 0][..], 12 + 1518));
    assert_eq!((receive(&rig.peer), rig.count(Counter::TxBadHeaders)), (None, 1));
}

#[test]
fn a_frame_that_a_tag_makes_too_long_is_dropped() {
    let policy = Policy { port_vlan: Some(PORT_VLAN), ..Policy::default() };
    let frame = |len: usize| [from(MAC, None), vec![7; len - 60]].concat();
    let (_, counts) = sent(&policy, &[frame(65_558)], 12);
    assert_eq!(counts, [(Counter::TxTooLong, 1)]);
    assert_eq!(sent(&policy, &[frame(65_554)], 12).0[0].len(), 65_558);
}

#[test]
fn storm_limit_drops_excess_group_frames_and_sends_others() {
    let policy = Policy { storm: NonZeroU32::new(2), ..Policy::default() };
    let mut to_all = from(MAC, None);
    to_all[..6].fill(0xff);
    let frames = [to_all.clone(), to_all.clone(), to_all.clone(), from(MAC, None), to_all];
    let (out, counts) = sent(&policy, &frames, 12);
    assert_eq!((out.len(), counts), (3, vec![(Counter::StormDropped, 2)]));
}

/// The guest changes the source of its frames between two addresses all the time.
#[test]
fn checked_frame_is_sent_unchanged_despite_guest_writes() {
    let mut rig = Rig::new();
    rig.policy.replace(Policy { spoof_check: true, ..Policy::default() }, RateLimits::default()).wait().unwrap();
    let mut driver = DriverQueue::new(&rig.memory, 1, 64);
    let queue = driver.queue.clone();
    let mut transmit = Transmit::new(rig.ring(&queue, 1, false), 0);
    let (memory, done) = (rig.memory.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use vm_memory::{Bytes as _, GuestAddress};
            while !done.load(Ordering::Relaxed) {
                for source in [OTHER, MAC] {
                    memory.write_slice(&source, GuestAddress(BUFFERS + 12 + 6)).unwrap();
                }
            }
        });
        for _ in 0..300 {
            let head = driver.send(BUFFERS, &with_header(&from(MAC, None)), &[12]);
            (0..31).for_each(|_| driver.offer(head));
            rig.pass(|pass| transmit.run(pass)).unwrap();
            driver.take_used();
            while let Some(data) = receive(&rig.peer) {
                assert_eq!(&data[18..24], &MAC);
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(rig.count(Counter::TxFrames) + rig.count(Counter::TxSpoofedMac), 300 * 32, "{:?}", rig.counts());
}

/// Delivers these frames under `policy`. Returns the received frames, and the counts.
fn received(policy: &Policy, frames: &[Vec<u8>], mergeable: bool) -> (Vec<Vec<u8>>, Vec<(Counter, u64)>) {
    let mut rig = Rig::new();
    rig.policy.replace(policy.clone(), RateLimits::default()).wait().unwrap();
    let mut driver = DriverQueue::new(&rig.memory, 0, 64);
    let len = if mergeable { 40 } else { 2048 };
    (0..60).for_each(|i| _ = driver.add(&[(BUFFERS + 0x1000 * i, len, WRITE)]));
    frames.iter().for_each(|frame| send(&rig.peer, &with_header(frame)));
    let queue = driver.queue.clone();
    let features = u64::from(mergeable) << VIRTIO_NET_F_MRG_RXBUF;
    let mut receive = Receive::new(rig.ring(&queue, 0, false), features, spill());
    rig.pass(|pass| receive.run(pass)).unwrap();
    let (mut out, mut rest) = (Vec::new(), 0_u16);
    for (head, len) in driver.take_used() {
        let bytes = driver.bytes(BUFFERS + 0x1000 * u64::from(head), len as usize);
        if rest == 0 {
            rest = u16::from_le_bytes([bytes[10], bytes[11]]);
            out.push(bytes[12..].to_vec());
        } else {
            out.last_mut().unwrap().extend(bytes);
        }
        rest -= 1;
    }
    // A frame that was refused is in no buffer.
    for frame in frames.iter().filter(|frame| !out.iter().any(|out| frame.ends_with(&out[14..]))) {
        let all = driver.bytes(BUFFERS, 60 * 0x1000);
        assert!(!all.windows(20).any(|window| window == &frame[frame.len() - 20..]));
    }
    let not_frames = [Counter::Interrupts, Counter::RxFrames, Counter::RxBytes];
    (out, rig.counts().into_iter().filter(|(counter, _)| !not_frames.contains(counter)).collect())
}

/// A frame to `to`, with a tag of this VLAN if there is one, and distinct bytes.
fn to(to: [u8; 6], vlan: Option<u16>, mark: u8) -> Vec<u8> {
    let mut bytes = from(OTHER, vlan);
    bytes[..6].copy_from_slice(&to);
    bytes.extend([mark; 30]);
    bytes
}

#[test]
fn only_frames_of_the_port_vlan_arrive_and_without_its_tag() {
    let policy = Policy { port_vlan: Some(PORT_VLAN), ..Policy::default() };
    let frames =
        [to(MAC, Some(0x6064), 1), to(MAC, None, 2), to(MAC, Some(5), 3), to(MAC, Some(0), 4), to(MAC, Some(100), 5)];
    for mergeable in [false, true] {
        let (out, counts) = received(&policy, &frames, mergeable);
        assert_eq!(out, [to(MAC, None, 1), to(MAC, None, 5)], "{mergeable}");
        assert_eq!(counts, [(Counter::RxVlanFiltered, 3)]);
    }
    let trunk = Trunk { vlans: VlanSet::of([0..=0, 5..=5]), protocol: VlanProtocol::Customer };
    let (out, counts) = received(&Policy { trunk: Some(trunk), ..Policy::default() }, &frames, true);
    assert_eq!((out, counts), (frames[1..4].to_vec(), vec![(Counter::RxVlanFiltered, 2)]));
}

#[test]
fn an_untrusted_driver_sees_no_frame_that_is_for_others() {
    let policy = Policy { trusted: false, ..Policy::default() };
    let frames = [to(MAC, None, 1), to(FURTHER, None, 2), to([0xff; 6], None, 3), to([1, 0, 0x5e, 0, 0, 1], None, 4)];
    for mergeable in [false, true] {
        let (out, counts) = received(&policy, &frames, mergeable);
        assert_eq!((out, counts), (vec![frames[0].clone(), frames[2].clone()], vec![(Counter::RxFiltered, 2)]));
    }
    assert_eq!(received(&Policy::default(), &frames, true).0, frames);
}

#[test]
fn offsets_of_a_received_header_move_with_the_tag() {
    let mut rig = Rig::new();
    rig.policy
        .replace(Policy { port_vlan: Some(PORT_VLAN), ..Policy::default() }, RateLimits::default())
        .wait()
        .unwrap();
    let mut driver = DriverQueue::new(&rig.memory, 0, 64);
    driver.add(&[(BUFFERS, 2048, WRITE)]);
    send(&rig.peer, &[&[1, 1, 58, 0, 100, 0, 38, 0, 16, 0, 0, 0][..], &to(MAC, Some(100), 1)].concat());
    let queue = driver.queue.clone();
    let mut receive = Receive::new(rig.ring(&queue, 0, false), 1 << VIRTIO_NET_F_GUEST_CSUM, spill());
    rig.pass(|pass| receive.run(pass)).unwrap();
    assert_eq!(driver.bytes(BUFFERS, 12), [1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 1, 0]);
}

/// A frame that was read, and waits for buffers, is not delivered under a replaced policy.
#[test]
fn a_frame_that_waits_does_not_outlive_its_policy() {
    let mut rig = Rig::new();
    let mut driver = DriverQueue::new(&rig.memory, 0, 64);
    driver.add(&[(BUFFERS, 40, WRITE)]);
    send(&rig.peer, &with_header(&to(MAC, None, 1)));
    let queue = driver.queue.clone();
    let mut receive = Receive::new(rig.ring(&queue, 0, false), 1 << VIRTIO_NET_F_MRG_RXBUF, spill());
    rig.pass(|pass| receive.run(pass)).unwrap();
    assert!(receive.has_waiting());
    rig.policy
        .replace(Policy { port_vlan: Some(PORT_VLAN), ..Policy::default() }, RateLimits::default())
        .wait()
        .unwrap();
    (1..8).for_each(|i| _ = driver.add(&[(BUFFERS + 0x1000 * i, 40, WRITE)]));
    rig.pass(|pass| receive.run(pass)).unwrap();
    assert_eq!((rig.count(Counter::RxStopped), rig.count(Counter::RxFrames)), (1, 0));
    assert!(driver.take_used().is_empty());
}

const COMMANDS: u64 = 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_CTRL_MAC_ADDR;

fn set_address(guest: &mut Guest, mac: [u8; 6]) -> u8 {
    guest.command(2, &[&[1, 1][..], &mac].concat())
}

#[test]
fn host_given_mac_is_fixed_unless_the_driver_is_trusted() {
    let given = Policy { address: Some(MAC), trusted: false, ..Policy::default() };
    let mut guest = Guest::with(NetSpec { policy: given.clone(), ..spec(1, 64) });
    guest.start_fresh(COMMANDS);
    assert_eq!((set_address(&mut guest, OTHER), set_address(&mut guest, MAC)), (1, 0));
    assert_eq!(guest.device.mac(), MAC);
    // This applies as soon as the host trusts it.
    guest.device.set_policy(Policy { trusted: true, ..given }, RateLimits::default()).wait().unwrap();
    assert_eq!((set_address(&mut guest, OTHER), guest.device.mac()), (0, OTHER));
    guest.device.set_policy(Policy { trusted: false, ..Policy::default() }, RateLimits::default()).wait().unwrap();
    assert_eq!((set_address(&mut guest, FURTHER), guest.device.mac()), (0, FURTHER), "none was given");
    assert_eq!(guest.device.set_mac(OTHER).err(), Some(MacError::InUse));
    guest.stop();
}

fn speed(guest: &Guest) -> (u32, u8) {
    let mut data = [0; 5];
    guest.device.config_read(12, &mut data);
    let [speed @ .., duplex] = data;
    (u32::from_le_bytes(speed), duplex)
}

#[test]
fn link_speed_is_max_tx_rate_and_a_change_is_announced_once() {
    let policy = |mbits| Policy { max_tx_rate: NonZeroU32::new(mbits), ..Policy::default() };
    let mut guest = Guest::with(NetSpec { policy: policy(500), ..spec(1, 64) });
    assert_eq!(speed(&guest), (500, 1));
    guest.start_fresh(COMMANDS);
    let vector = guest.interrupts.config_vector();
    let told = guest.interrupts.eventfd(vector).unwrap();
    let mut set = |policy: Policy| {
        let generation = guest.device.config_generation();
        guest.device.set_policy(policy, RateLimits::default()).wait().unwrap();
        let is_changed = guest.device.config_generation() != generation;
        (speed(&guest), is_changed, told.read().unwrap_or(0))
    };
    assert_eq!(set(policy(50)), ((50, 1), true, 1));
    assert_eq!(set(Policy { spoof_check: true, ..policy(50) }), ((50, 1), false, 0), "the speed is the same");
    assert_eq!(set(policy(u32::MAX)), ((0x7fff_ffff, 1), true, 1));
    assert_eq!(set(policy(0)), ((10_000, 1), true, 1), "no limit");
    assert_eq!(set(policy(25_000)), ((25_000, 1), true, 1));
    guest.stop();
    guest.device.reset();
    assert_eq!(speed(&guest), (25_000, 1), "a reset changes nothing");
}

#[test]
fn spoof_check_follows_the_drivers_mac_and_survives_its_reset() {
    let mut guest = Guest::with(NetSpec {
        policy: Policy { spoof_check: true, trusted: false, ..Policy::default() },
        ..spec(1, 64)
    });
    let send = |guest: &mut Guest, source| {
        let before = guest.count(Counter::TxFrames) + guest.count(Counter::TxSpoofedMac);
        guest.queues[1].send(BUFFERS, &with_header(&from(source, None)), &[]);
        guest.kick(1);
        eventually("a frame", || guest.count(Counter::TxFrames) + guest.count(Counter::TxSpoofedMac) > before);
        receive(&guest.host[0]).is_some()
    };
    guest.start_fresh(COMMANDS);
    assert_eq!([MAC, OTHER].map(|source| send(&mut guest, source)), [true, false]);
    assert_eq!(set_address(&mut guest, OTHER), 0);
    assert_eq!([MAC, OTHER].map(|source| send(&mut guest, source)), [false, true]);
    guest.stop();
    guest.device.reset();
    guest.start_fresh(COMMANDS);
    assert_eq!([MAC, OTHER].map(|source| send(&mut guest, source)), [true, false]);
    // Live, in both directions.
    guest.device.set_policy(Policy::default(), RateLimits::default()).wait().unwrap();
    assert!(send(&mut guest, OTHER));
    guest.device.set_policy(Policy { spoof_check: true, ..Policy::default() }, RateLimits::default()).wait().unwrap();
    assert!(!send(&mut guest, OTHER));
    guest.stop();
}

#[test]
fn an_address_of_the_guest_applies_while_its_driver_runs() {
    let host = Policy { address: Some(MAC), spoof_check: true, trusted: false, ..Policy::default() };
    let mut guest = Guest::with(NetSpec { policy: host.clone(), ..spec(1, 64) });
    guest.start_fresh(COMMANDS);
    let send = |guest: &mut Guest, source| {
        let before = guest.count(Counter::TxFrames) + guest.count(Counter::TxSpoofedMac);
        guest.queues[1].send(BUFFERS, &with_header(&from(source, None)), &[]);
        guest.kick(1);
        eventually("a frame", || guest.count(Counter::TxFrames) + guest.count(Counter::TxSpoofedMac) > before);
        receive(&guest.host[0]).is_some()
    };
    assert_eq!(set_address(&mut guest, OTHER), 1, "the host has given another");
    let settings = HostSettings {
        mac: Some(MAC),
        policy: host.clone(),
        limits: RateLimits::default(),
        link_up: true,
        follows_tap: true,
    };
    guest.device.return_to(Some(settings));
    guest.device.set_mac_for_guest(OTHER).unwrap().wait().unwrap();
    let policy = Policy { address: Some(OTHER), port_vlan: None, ..host };
    guest.device.set_policy(policy, RateLimits::default()).wait().unwrap();
    assert_eq!([MAC, OTHER].map(|source| send(&mut guest, source)), [false, true]);
    let mut shown = [0; 6];
    guest.device.config_read(0, &mut shown);
    assert_eq!(shown, OTHER, "in the configuration");
    assert_eq!((set_address(&mut guest, MAC), set_address(&mut guest, OTHER)), (1, 0));
    assert_eq!(guest.device.set_mac_for_guest([1, 0, 0, 0, 0, 1]).err(), Some(MacError::NotUnicast));
    guest.stop();
    // A driver that resets its function keeps the address; a VF that ceased to exist does not.
    guest.device.reset();
    assert_eq!(guest.device.mac(), OTHER);
    guest.device.end_guest_settings();
    assert_eq!(guest.device.mac(), MAC);
    guest.start_fresh(COMMANDS);
    assert_eq!([MAC, OTHER].map(|source| send(&mut guest, source)), [true, false]);
    guest.stop();
    guest.device.reset();
    assert_eq!(guest.device.mac(), MAC);
}
