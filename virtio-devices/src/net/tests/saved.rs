use std::os::fd::OwnedFd;

use crate::HostNic;
use pci::{Placement, Rid, VfIndex, VfPlacement};
use virtio_bindings::virtio_net::*;

use super::super::Net;
use super::super::counters::Counter;
use super::super::filter::{Filter, MAX_ADDRESSES, Mode};
use super::super::testing::*;
use crate::backend::Tap;
use crate::frames::net_protocol::Offloads;
use crate::testing::{Driver, Hosted};
use crate::{
    BucketState, DeviceSpecific, GuestMap, Lifecycle as _, Memory, NetSpec, NetSriov, NicState, Policy, RateLimit,
    RateLimits, VirtioDevice,
};

const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];
const PF: Rid = Rid::from_bits(3 << 3);
const VF: Rid = Rid::from_bits(0x101);
/// Bytes of a VF's slice of the registers' BAR.
const SLICE: u64 = 0x2000;

type Change = fn(&mut NicState);

fn nic() -> Net {
    let near = (0..2).map(|_| sockets().0).collect();
    Net::new(spec(2, 256), Tap::over_sockets(near)).unwrap()
}

/// A NIC whose driver has used every command.
fn commanded() -> Net {
    let net = nic();
    net.state.set_mac(OTHER);
    net.state.set_active_pairs(2);
    net.state.set_offloads(Offloads::CHECKSUM | Offloads::TSO6);
    net.state.set_link_up(false);
    net.state.change_filter(|filter| {
        filter.set_mode(Mode::Promiscuous, false);
        filter.set_mode(Mode::NoBroadcast, true);
        filter.unicast.add(MAC);
        (0..=MAX_ADDRESSES as u8).for_each(|n| filter.multicast.add([1, 2, 3, 4, 5, n]));
        filter.enable_vlans();
        for id in [4095, 0, 63, 64] {
            filter.set_vlan(id, true);
        }
    });
    net
}

fn state(net: &Net) -> NicState {
    let text = serde_json::to_string(&net.save()).unwrap();
    match serde_json::from_str(&text).unwrap() {
        DeviceSpecific::Net(state) => state,
        other => panic!("{other:?}"),
    }
}

/// The error of restoring a NIC to `state`, if there is one.
fn error(state: NicState, started: Option<u64>) -> Option<String> {
    nic().restore(&DeviceSpecific::Net(state), started).err().map(|error| error.to_string())
}

#[test]
fn the_commands_of_a_driver_are_restored() {
    let (old, mut new) = (commanded(), nic());
    let features = old.features();
    new.restore(&DeviceSpecific::Net(state(&old)), Some(features)).unwrap();
    assert_eq!(Filter::clone(&new.state.filter()), Filter::clone(&old.state.filter()));
    assert_eq!((new.mac(), new.link_up(), new.config_generation()), (OTHER, false, 2));
    assert_eq!((new.state.active_pairs(), new.state.offloads()), (2, Offloads::CHECKSUM | Offloads::TSO6));
    assert_eq!((new.save(), new.fresh), (old.save(), false));
    new.reset();
    assert_eq!(state(&new), NicState { link_up: false, generation: 3, ..super::super::saved::power_on(MAC) });
}

#[test]
fn reset_nic_saves_link_and_generation_and_a_new_one_nothing() {
    let mut net = nic();
    assert_eq!(net.save(), DeviceSpecific::PowerOn);
    net.reset();
    net.set_link(false).wait().unwrap();
    let saved = state(&net);
    assert_eq!((saved.generation, saved.link_up), (2, false));
    let mut new = nic();
    new.restore(&DeviceSpecific::Net(saved.clone()), None).unwrap();
    assert_eq!((new.save(), new.fresh), (net.save(), true));
    new.restore(&DeviceSpecific::PowerOn, None).unwrap();
    assert_eq!(new.save(), DeviceSpecific::PowerOn);
    let commanded = error(state(&commanded()), None).unwrap();
    assert_eq!(commanded, "saved state with an impossible value in a NIC that was not started");
}

#[test]
fn saved_state_without_the_feature_for_it_is_refused() {
    let changes: [(u32, Change); 7] = [
        (VIRTIO_NET_F_CTRL_MAC_ADDR, |state| state.mac = OTHER),
        (VIRTIO_NET_F_MQ, |state| state.active_pairs = 2),
        (VIRTIO_NET_F_GUEST_TSO6, |state| state.offloads = 1 << VIRTIO_NET_F_GUEST_TSO6),
        (VIRTIO_NET_F_CTRL_RX, |state| state.modes[1] = true),
        (VIRTIO_NET_F_CTRL_RX, |state| state.multicast.addresses.push(GROUP)),
        (VIRTIO_NET_F_CTRL_RX_EXTRA, |state| state.modes[2] = true),
        (VIRTIO_NET_F_CTRL_VLAN, |state| state.vlans = Some(vec![5])),
    ];
    for (feature, change) in changes {
        let mut saved = super::super::saved::power_on(MAC);
        change(&mut saved);
        let features = nic().features();
        assert_eq!(error(saved.clone(), Some(features)), None, "{saved:?}");
        let refused = error(saved, Some(features & !(1 << feature))).unwrap();
        assert!(refused.starts_with("saved state with an impossible value in a NIC's "), "{refused}");
    }
}

#[test]
fn saved_state_that_no_driver_could_command_is_refused() {
    let changes: [Change; 11] = [
        |state| state.mac = GROUP,
        |state| state.mac = [0; 6],
        |state| state.active_pairs = 0,
        |state| state.active_pairs = 3,
        |state| state.offloads |= 1 << VIRTIO_NET_F_CSUM,
        |state| state.unicast.overflow = true,
        |state| state.multicast.overflow = false,
        |state| state.multicast.addresses.truncate(3),
        |state| state.unicast.addresses = vec![MAC; 100_000],
        |state| state.vlans = Some(vec![4096]),
        |state| state.vlans = Some(vec![2, 1, 2]),
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut saved = state(&commanded());
        // The tables have one too few for `overflow` to be other than what it is.
        if n == 6 {
            saved.multicast.addresses.push(GROUP);
        }
        change(&mut saved);
        assert!(error(saved, Some(nic().features())).is_some(), "change {n}");
    }
    let mut net = nic();
    let other = net.restore(&DeviceSpecific::Config(vec![1]), Some(u64::MAX)).unwrap_err();
    assert_eq!(other.to_string(), "saved state of a device with different kinds of device");
}

/// A PF with two VFs over sockets. VF 1 has a driver with queues in memory.
struct Machine {
    device: Hosted<NetSriov<Net>>,
    peer: OwnedFd,
}

impl Machine {
    fn new(memory: &GuestMap) -> Self {
        let (near, mut peers): (Vec<_>, Vec<_>) = (0..3).map(|_| sockets()).unzip();
        let mut nics = near.into_iter().map(|near| Net::new(spec(1, 256), Tap::over_sockets(vec![near])).unwrap());
        let vfs = VfPlacement { total_vfs: 2, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
        let placement = Placement { segment: 0, rid: PF, vfs: Some(vfs) };
        let pf = nics.next().unwrap();
        let device = NetSriov::new(pf, nics.collect(), placement, &Memory::new(memory.clone())).unwrap();
        let device = Hosted::new(device);
        Self { device, peer: peers.remove(2) }
    }

    fn vf(&mut self) -> Driver<'_, Hosted<NetSriov<Net>>> {
        Driver::of_vf(&mut self.device, VF, SLICE)
    }

    fn count(&self, counter: Counter) -> u64 {
        self.device.vf(VfIndex(1)).unwrap().device().counters().get(counter)
    }

    fn join(&mut self) {
        self.device.join();
    }

    /// Enables the VFs and brings up VF 1's driver.
    fn bring_up(&mut self, queues: &[DriverQueue]) {
        let mut pf = Driver::new(&mut self.device, PF);
        let _ = pf.config_write(0x110, 2, 2);
        let _ = pf.config_write(0x108, 2, 9);
        let mut vf = self.vf();
        let _ = vf.set_bus_master(true);
        vf.negotiate();
        for (n, queue) in (0..).zip(queues) {
            let _ = vf.common_write(0x16, 2, n);
            let addresses = [(0x20, n << 16), (0x28, queue.avail() as u32), (0x30, queue.used() as u32)];
            for (register, address) in addresses {
                let _ = vf.common_write(register, 4, address);
            }
            let _ = vf.common_write(0x1c, 2, 1);
        }
        send(&self.peer, &[0]);
        let _ = self.vf().set_status(15);
        eventually("the start", || self.count(Counter::RxStale) == 1);
    }

    /// Sends a command of the driver.
    fn command(&mut self, queue: &mut DriverQueue, command: &[u8]) {
        let at = MEMORY - 4096;
        queue.memory_write(at, command);
        queue.add(&[(at, command.len() as u32, 0), (at - 1, 1, WRITE)]);
        let _ = self.vf().notify(2);
        eventually("an answer", || !queue.take_used().is_empty());
        assert_eq!(queue.bytes(at - 1, 1), [0]);
    }
}

/// G64, U4: traffic through a VF continues over another backend, without a notification of its driver.
#[test]
fn vf_continues_traffic_at_its_ring_positions_after_restore() {
    let memory = memory();
    let mut queues: Vec<_> = [256, 256, 64].iter().zip(0..).map(|(n, i)| DriverQueue::new(&memory, i, *n)).collect();
    let mut old = Machine::new(&memory);
    old.bring_up(&queues);
    let mac = [0x52, 0x54, 0, 0, 0, 9];
    old.command(&mut queues[2], &[&[1, 1][..], &mac].concat());
    old.command(&mut queues[2], &[0, 0, 0]);
    for n in 0..3 {
        queues[1].send(BUFFERS + (n << 12), &with_header(&frame(OTHER, 100)), &[12]);
        let _ = old.vf().notify(1);
        eventually("transmission", || receive(&old.peer).is_some());
    }
    queues[0].add(&[(BUFFERS + (1 << 20), 2048, WRITE)]);
    old.device.pause();
    old.join();
    let text = serde_json::to_string(&old.device.save().unwrap().unwrap()).unwrap();
    drop(old);

    let mut new = Machine::new(&memory);
    new.device.restore(&serde_json::from_str(&text).unwrap()).unwrap();
    // Frames that arrive before the resume are for this driver, and do not count as stale.
    send(&new.peer, &with_header(&frame(OTHER, 60)));
    send(&new.peer, &with_header(&frame(mac, 80)));
    queues[1].send(BUFFERS, &with_header(&frame(OTHER, 200)), &[12]);
    assert_eq!((new.vf().status(), new.count(Counter::RxFrames)), (15, 0));
    new.device.resume();
    eventually("reception", || new.count(Counter::RxFrames) == 1);
    assert_eq!(new.count(Counter::RxFiltered), 1, "its receive filter is still set");
    assert_eq!(queues[0].take_used().iter().map(|(_, len)| *len).collect::<Vec<_>>(), [92]);
    let mut sent = None;
    eventually("transmission", || {
        sent = receive(&new.peer);
        sent.is_some()
    });
    assert_eq!(sent, Some(with_header(&frame(OTHER, 200))), "the one that was not sent yet, once");
    eventually("the buffer's return", || queues[1].read_u16(queues[1].used() + 2) == 4);
    assert_eq!(queues[1].take_used().len(), 4);
    assert!(receive(&new.peer).is_none());
    new.device.pause();
    new.join();
}

/// A NIC whose guest may send 10 Mbit/s and 3 broadcasts a second, and receive 5 frames at once.
fn limited() -> Net {
    let second = std::time::Duration::from_secs(1);
    let limits = RateLimits { ops: Some(RateLimit { size: 5, one_time_burst: 0, refill: second }), bandwidth: None };
    let rate = std::num::NonZeroU32::new;
    let policy = Policy { max_tx_rate: rate(10), storm: rate(3), ..Policy::default() };
    let near = (0..2).map(|_| sockets().0).collect();
    Net::new(NetSpec { limits, policy, ..spec(2, 256) }, Tap::over_sockets(near)).unwrap()
}

#[test]
fn rests_of_rate_limits_are_restored_running_or_not() {
    let _clock = crate::os::clock::testing::StoppedClock::new();
    let old = limited();
    assert_eq!(old.save(), DeviceSpecific::PowerOn);
    old.use_up(1_000_000);
    old.policy.load().storm.take(0, 1);
    let saved = state(&old);
    // The buckets are the one of operations, which the limits have, and the one of the rate.
    assert_eq!(saved.buckets.transmit.len(), 2);
    assert_eq!(saved.buckets.receive, [BucketState { missing: 0, burst: 0 }]);
    for started in [None, Some(old.features())] {
        let mut new = limited();
        new.restore(&DeviceSpecific::Net(saved.clone()), started).unwrap();
        assert_eq!(state(&new).buckets, saved.buckets);
        let (old, new) = (old.policy.load(), new.policy.load());
        assert!(new.transmit.limited_for().is_some());
        assert_eq!(new.transmit.limited_for(), old.transmit.limited_for());
        assert_eq!(new.storm.limited_for(), None);
    }
    let refused = error(saved.clone(), None);
    assert_eq!(refused.as_deref(), Some("saved state of a device with different rate limits"));
    let mut wrong = saved;
    wrong.buckets.storm.push(BucketState { missing: 0, burst: 0 });
    assert!(limited().restore(&DeviceSpecific::Net(wrong.clone()), None).is_err());
    // A tap is not a shared uplink.
    wrong.buckets.storm.pop();
    wrong.buckets.uplink = Some(BucketState { missing: 1, burst: 0 });
    assert!(limited().restore(&DeviceSpecific::Net(wrong), None).is_err());
}
