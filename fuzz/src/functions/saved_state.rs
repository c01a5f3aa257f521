//! Saved states with any changes: of a PF with VFs, and of a NIC.
//!
//! Either a state is refused, and the device is in its power-on state, or it is restored, and the device's state is
//! equal to it. A restored device works as usual: a reset returns it to its power-on state.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use pci::{Placement, Reach, ResetKind, Rid, VfPlacement};
use serde_json::Value;
use virtio_devices::testing::{Driver, FakeDevice, Hosted, memory, nic};
use virtio_devices::{
    AddressesState, BucketsState, DeviceSpecific, DeviceState, FunctionState, Lifecycle, Memory, NetSpec, NetSriov,
    NicState, VirtioFunction, VirtioPci,
};

use crate::input::{Input, Seed};

const PF: Rid = Rid::from_bits(3 << 3);
const TOTAL_VFS: u16 = 3;
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
/// The queues of a NIC with one pair, and those of the VFs.
const QUEUES: &[u16] = &[16, 16, 64];
/// The offset of the status in a NIC's configuration (`virtio 1.4 §5.1.4`).
const LINK_STATUS: std::ops::Range<usize> = 6..8;
/// The bits that enable SR-IOV: VF Enable and VF MSE.
const ENABLE: u32 = 9;

// Changes to a node of the state.
const SET: u8 = 0;
const FLIP: u8 = 1;
const NULL: u8 = 2;
const REMOVE: u8 = 3;
const REPEAT: u8 = 4;
const COPY: u8 = 5;
const KINDS: u8 = 6;

thread_local! {
    static MEMORY: Memory = memory();
    /// Destination of a NIC's frames.
    static SOCKET: OwnedFd = UnixStream::pair().expect("a pair of sockets").0.into();
    /// The states that inputs change, created once.
    static STATES: RefCell<[Value; 2]> =
        [state_of_pf(), state_of_nic()].map(|state| serde_json::to_value(state).expect("a state is JSON")).into();
}

/// A device in its power-on state: a NIC, or a PF with VFs.
fn device(is_nic: bool) -> Box<dyn VirtioPci> {
    let memory = MEMORY.with(Memory::clone);
    if is_nic {
        let socket = SOCKET.with(|socket| socket.try_clone().expect("a descriptor is left"));
        let spec = NetSpec { queue_size: QUEUES[0], ..NetSpec::new("_net0", MAC) };
        let net = nic(spec, vec![socket]).expect("a NIC");
        return Box::new(VirtioFunction::plain(net, PF, memory).expect("a function"));
    }
    Box::new(pf())
}

fn pf() -> NetSriov<FakeDevice> {
    let vfs = VfPlacement { total_vfs: TOTAL_VFS, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
    let placement = Placement { segment: 0, rid: PF, vfs: Some(vfs) };
    let vfs = (0..TOTAL_VFS).map(|_| FakeDevice::new(QUEUES)).collect();
    NetSriov::new(FakeDevice::new(QUEUES), vfs, placement, &MEMORY.with(Memory::clone)).expect("a PF")
}

fn save(device: &mut dyn VirtioPci) -> DeviceState {
    assert!(device.pause().stopping.is_empty(), "a device without threads");
    device.save().expect("it is paused").expect("a device with registers")
}

/// The state of a PF in use, with two VFs of which one is in use, too.
fn state_of_pf() -> DeviceState {
    let mut device = Hosted::new(pf());
    let mut driver = Driver::new(&mut device, PF);
    driver.enable_msix(4);
    driver.init();
    let _ = driver.bar_write(2, 0x200, 4, 0x4433_2211);
    let _ = driver.config_write(0x110, 2, 2);
    let _ = driver.config_write(0x108, 2, ENABLE);
    let mut driver = Driver::of_vf(&mut device, Rid::from_bits(0x101), 0x2000);
    driver.init();
    device.pause();
    device.save().expect("it is paused").expect("a device with registers")
}

/// The state of a NIC whose driver has sent many commands.
fn state_of_nic() -> DeviceState {
    let mut fake =
        Hosted::new(VirtioFunction::plain(FakeDevice::new(QUEUES), PF, MEMORY.with(Memory::clone)).expect("a NIC"));
    let mut driver = Driver::new(&mut fake, PF);
    driver.enable_msix(4);
    driver.init();
    fake.pause();
    let mut state = fake.save().expect("it is paused").expect("a device with registers");
    // MAC, CTRL_VQ, CTRL_RX, CTRL_VLAN, CTRL_RX_EXTRA, GUEST_ANNOUNCE, CTRL_MAC_ADDR, and VERSION_1.
    let features = [5, 17, 18, 19, 20, 21, 23, 32].iter().fold(0u64, |features, bit| features | 1 << bit);
    state.function.transport.driver_features = [features as u32, (features >> 32) as u32, 0, 0];
    let addresses =
        |first: u8| AddressesState { addresses: (0..3).map(|n| [first, 1, 2, 3, 4, n]).collect(), overflow: false };
    state.function.device = DeviceSpecific::Net(NicState {
        mac: [0x52, 0x54, 0, 0, 0, 7],
        link_up: true,
        generation: 3,
        active_pairs: 1,
        offloads: 0,
        modes: [false, true, false, false, false, true],
        unicast: addresses(2),
        multicast: addresses(3),
        vlans: Some(vec![0, 64, 4095]),
        announce: true,
        buckets: BucketsState::default(),
        held: Vec::new(),
    });
    // The driver has read a NIC's configuration.
    state.function.told = None;
    let mut nic = device(true);
    nic.restore(&state).expect("a state of a NIC");
    save(nic.as_mut())
}

/// Collects the JSON pointers of all nodes of a tree below `at`.
fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    match value {
        Value::Array(values) => (0..).zip(values).for_each(|(n, value)| place(value, format!("{at}/{n}"), out)),
        Value::Object(values) => values.iter().for_each(|(key, value)| place(value, format!("{at}/{key}"), out)),
        _ => {}
    }
}

fn place(value: &Value, at: String, out: &mut Vec<String>) {
    places(value, &at, out);
    out.push(at);
}

/// Makes one change to a state.
pub(crate) fn change(state: &mut Value, input: &mut Input<'_>) {
    let (kind, n, other, value) = (input.u8() % KINDS, input.u16(), input.u16(), input.u32());
    let mut all = Vec::new();
    places(state, "", &mut all);
    let Some(at) = all.get(usize::from(n) % all.len().max(1)) else { return };
    let copy = all.get(usize::from(other) % all.len()).and_then(|at| state.pointer(at)).cloned();
    let parent = at.rsplit_once('/').and_then(|(parent, key)| Some((state.pointer_mut(parent)?, key)));
    match (kind, parent) {
        (REMOVE, Some((Value::Object(values), key))) => drop(values.remove(key)),
        (REMOVE, Some((Value::Array(values), key))) => drop(values.remove(key.parse().expect("an index"))),
        (REPEAT, Some((Value::Array(values), key))) => {
            let value = values[key.parse::<usize>().expect("an index")].clone();
            values.insert(usize::from(other) % (values.len() + 1), value);
        }
        _ => {
            let Some(node) = state.pointer_mut(at) else { return };
            *node = match (kind, &*node) {
                (FLIP, Value::Bool(bit)) => (!bit).into(),
                (FLIP, Value::Number(number)) => (number.as_u64().unwrap_or(0) ^ 1 << (value % 64)).into(),
                (NULL, _) => Value::Null,
                (COPY, _) => copy.unwrap_or_default(),
                (_, Value::Bool(_)) => (value & 1 == 1).into(),
                _ => value.into(),
            };
        }
    }
}

/// Runs the changes of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns true if the state was restored; `None` if the input is not a state.
fn run_to_end(input: &[u8]) -> Option<bool> {
    let mut input = Input::new(input);
    let is_nic = input.u8() & 1 == 1;
    let mut value = STATES.with_borrow(|states| states[usize::from(is_nic)].clone());
    while !input.is_empty() {
        change(&mut value, &mut input);
    }
    let mut state: DeviceState = serde_json::from_value(value).ok()?;
    let mut device = device(is_nic);
    let fresh = save(device.as_mut());
    if let Err(error) = device.restore(&state) {
        let text = error.to_string();
        assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
        assert_eq!(save(device.as_mut()), fresh, "{text}");
        return Some(false);
    }
    let mut now = save(device.as_mut());
    forget_announcement(&mut now.function, &mut state.function);
    if let (Some(now), Some(then)) = (&mut now.vfs, &mut state.vfs) {
        let pairs = now.changed.iter_mut().zip(&mut then.changed);
        pairs.for_each(|(now, then)| forget_announcement(&mut now.function, &mut then.function));
    }
    assert_eq!(now, state);
    // The windows and messages can be computed.
    let (mut windows, mut messages) = (Vec::new(), Vec::new());
    device.windows(&mut windows);
    device.messages(Reach::Device, &mut messages);
    assert!(windows.iter().all(|window| window.base.checked_add(window.len).is_some()), "{windows:x?}");
    assert!(messages.len() <= (1 + usize::from(TOTAL_VFS)) * (1 + QUEUES.len()));
    // A NIC's queues would start a thread.
    if !is_nic {
        assert!(device.resume().stopping.is_empty());
    }
    let _ = device.reset(ResetKind::Conventional);
    let mut after = save(device.as_mut());
    // The generation of a NIC's configuration continues, and its link stays, which the configuration shows.
    after.function.device.clone_from(&fresh.function.device);
    if let (Some(told), Some(fresh)) = (&mut after.function.told, &fresh.function.told) {
        told.generation = fresh.generation;
        if is_nic {
            told.config.0[LINK_STATUS].copy_from_slice(&fresh.config.0[LINK_STATUS]);
        }
    }
    assert_eq!(after, fresh, "a reset leaves something");
    Some(true)
}

/// Removes the differences from both states that result from an announced change of the configuration.
fn forget_announcement(now: &mut FunctionState, then: &mut FunctionState) {
    if now.told == then.told {
        return;
    }
    for state in [now, then] {
        state.told = None;
        state.transport.isr &= !2;
        let of_config = state.transport.config_vector;
        let vectors = state.transport.vectors.iter_mut().filter(|vector| vector.vector == of_config);
        vectors.for_each(|vector| vector.signalled = false);
    }
}

/// The number of a node, for a change to it.
fn number(is_nic: bool, at: &str) -> u16 {
    STATES.with_borrow(|states| place_of(&states[usize::from(is_nic)], at))
}

/// The number of the node of `state` at the JSON pointer `at`.
pub(crate) fn place_of(state: &Value, at: &str) -> u16 {
    let mut all = Vec::new();
    places(state, "", &mut all);
    all.iter().position(|place| place == at).expect("a node of the state") as u16
}

/// Seeds: the unchanged states; other values that a driver could have written or not; nodes that are missing or
/// duplicated.
pub fn seeds() -> Vec<Vec<u8>> {
    let start = |is_nic: bool| Seed::new().with([is_nic.into()]);
    let changed = |is_nic: bool, kind: u8, at: &str, value: u32| {
        let seed = start(is_nic).with([kind]).with(number(is_nic, at).to_le_bytes());
        seed.with([0, 0]).with(value.to_le_bytes())
    };
    vec![
        start(false).done(),
        start(true).done(),
        changed(false, SET, "/function/config/bars/2", 0x4000_000c).done(),
        changed(false, SET, "/function/config/command", 0xffff).done(),
        changed(false, FLIP, "/vfs/changed/0/function/transport/status", 2).done(),
        changed(false, SET, "/function/config/sriov/num_vfs", 1).done(),
        changed(false, REMOVE, "/vfs/changed/0", 0).done(),
        changed(false, NULL, "/function/positions", 0).done(),
        changed(true, SET, "/function/device/net/active_pairs", 2).done(),
        changed(true, REPEAT, "/function/device/net/vlans/1", 0).done(),
        changed(true, FLIP, "/function/device/net/modes/0", 0).done(),
        changed(true, REMOVE, "/function/device/net/multicast/addresses/0", 0).done(),
        changed(true, NULL, "/function/transport", 0).done(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_restored_and_refused() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let (restored, refused) = (Some(true), Some(false));
        let pf = [restored, restored, restored, refused, refused, refused, restored, restored];
        assert_eq!(done, [&pf[..], &[refused, refused, restored, restored, None]].concat());
    }
}
