//! A tap as the uplink of a switch.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use virtio_devices::{
    BackendChange, Counter, FailureChange, GuestMap, HostNic, Interrupts, Memory, Net, NetSpec, PortSettings, Start,
    Switch, SwitchMode, SwitchSpec, Tap, VirtioDevice,
};
use vm_memory::GuestAddress;

use crate::driver::eventually;
use crate::frames::Machine;
use crate::host::*;
use crate::sample::{OTHER, frame, with_header};

fn nic(switch: &Switch, port: u16) -> Net {
    let spec = NetSpec::new(&format!("pf0v{port}"), [2, 0, 0, 0, 0, port as u8]);
    Net::new(spec, switch.port(port).unwrap()).unwrap()
}

/// Waits until the links of both ports are as expected.
fn wait(nics: &[Net; 2], expected: [bool; 2]) {
    let began = Instant::now();
    while nics.each_ref().map(HostNic::link_up) != expected {
        assert!(began.elapsed() < Duration::from_secs(20), "{expected:?} did not come about");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn switch_links_follow_the_tap_unless_set_to_stay_up() {
    new_namespace();
    ip("tuntap add dev tap0 mode tap vnet_hdr");
    let uplink = Some(Tap::open(&spec("tap0", 1)).unwrap());
    let (id, mode) = ("pf0".to_owned(), SwitchMode::Veb);
    let switch = Switch::new(SwitchSpec { id, mode, ports: 2, workers: 1, uplink, uplink_rate: None }).unwrap();
    switch.set_port(1, PortSettings { follows_uplink: false, ..PortSettings::default() }).wait().unwrap();
    let mut nics = [0, 1].map(|port| nic(&switch, port));
    let memory = Memory::new(GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap());
    let interrupts = Arc::new(Interrupts::new(3, 0));
    let workers = nics[0]
        .start(Start { memory: memory.into(), features: 1 << 32, queues: Vec::new(), interrupts, log: None })
        .unwrap();
    for _ in 0..2 {
        wait(&nics, [true, true]);
        ip("link set tap0 down");
        wait(&nics, [false, true]);
        ip("link set tap0 up");
    }
    wait(&nics, [true, true]);
    ip("link del tap0");
    wait(&nics, [false, true]);
    assert!(switch.uplink_gone());
    ip("tuntap add dev tap0 mode tap vnet_hdr");
    wait(&nics, [true, true]);
    assert!(!switch.uplink_gone() && switch.uplink_losses() == Some(1));
    workers.into_iter().for_each(|worker| worker.stop().join().unwrap());
}

#[test]
fn an_uplink_that_is_made_again_carries_frames() {
    new_namespace();
    ip("tuntap add dev tap0 mode tap vnet_hdr");
    let tap = Tap::open(&spec("tap0", 1)).unwrap();
    let handle = tap.handle();
    let (id, mode) = ("pf0".to_owned(), SwitchMode::Veb);
    let switch = SwitchSpec { id, mode, ports: 2, workers: 1, uplink: Some(tap), uplink_rate: None };
    let switch = Switch::new(switch).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    switch.observe_uplink_loss(Box::new(move |change| seen.lock().push(change)));
    let mut machine = Machine::of(nic(&switch, 1), "tap0");
    machine.start(machine.net.features());
    machine.transmit(&with_header(&frame(OTHER, 60)));
    let counters = switch.uplink_counters().unwrap();
    assert_eq!(counters.get(Counter::TxFrames), 1);
    for round in 1..3 {
        ip("link del tap0");
        eventually("the loss", || told.lock().last() == Some(&BackendChange::Lost));
        assert!(handle.pass().unwrap_err().to_string().contains("deleted"));
        ip("tuntap add dev tap0 mode tap vnet_hdr");
        eventually("the return", || told.lock().last() == Some(&BackendChange::Restored));
        eventually("the link", || machine.net.link_up());
        assert!(handle.pass().is_ok());
        // A frame for a link that is down until the next table is dropped.
        eventually("a frame", || {
            machine.transmit(&with_header(&frame(OTHER, 60)));
            counters.get(Counter::TxFrames) > round
        });
    }
    assert_eq!(*told.lock(), [BackendChange::Lost, BackendChange::Restored].repeat(2));
}

#[test]
fn an_uplink_without_a_driver_is_looked_at_when_asked() {
    new_namespace();
    ip("tuntap add dev tap0 mode tap vnet_hdr");
    let uplink = Some(Tap::open(&spec("tap0", 1)).unwrap());
    let (id, mode) = ("pf0".to_owned(), SwitchMode::Veb);
    let switch = Switch::new(SwitchSpec { id, mode, ports: 2, workers: 1, uplink, uplink_rate: None }).unwrap();
    let nic = nic(&switch, 1);
    for (state, up) in [("down", false), ("up", true)] {
        ip(&format!("link set tap0 {state}"));
        assert_eq!((nic.link_up(), switch.uplink_up(), switch.uplink_gone()), (up, Some(up), false));
    }
    ip("link del tap0");
    assert_eq!((nic.link_up(), switch.uplink_up(), switch.uplink_gone()), (false, Some(false), true));
}

#[test]
fn an_uplink_that_takes_no_frames_is_reported_once() {
    new_namespace();
    let uplink = Some(Tap::open(&spec("tap0", 1)).unwrap());
    let (id, mode) = ("pf0".to_owned(), SwitchMode::Veb);
    let switch = Switch::new(SwitchSpec { id, mode, ports: 2, workers: 1, uplink, uplink_rate: None }).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    switch.observe_uplink(Box::new(move |change| seen.lock().push(change)));
    // Its link stays up, so that it continues to send.
    switch.set_port(1, PortSettings { follows_uplink: false, ..PortSettings::default() }).wait().unwrap();
    let mut machine = Machine::of(nic(&switch, 1), "tap0");
    machine.start(machine.net.features());
    let mut transmit = || machine.transmit(&with_header(&frame(OTHER, 60)));
    transmit();
    ip("link set tap0 down");
    (0..3).for_each(|_| transmit());
    let failing = FailureChange::Failing(std::io::Error::from_raw_os_error(libc::EIO).to_string());
    assert_eq!(*told.lock(), std::slice::from_ref(&failing));
    ip("link set tap0 up");
    transmit();
    eventually("the end of the failures", || *told.lock() == [failing.clone(), FailureChange::Recovered]);
}
