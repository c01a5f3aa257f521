//! The owner of an address among several drivers, over a pause and in another process.

use super::rig::*;
use crate::VirtioDevice;

const SHARED: [u8; 6] = [0x52, 0x54, 0, 0, 9, 9];

/// Four ports. The third VF had the shared address before the first: neither got its own from the host.
fn lan() -> Lan {
    let mut lan = Lan::running(&Config::closed(4));
    for port in [3, 1] {
        lan.nics[port].set_tables(&[SHARED], &[]);
        lan.settle();
    }
    lan
}

/// The ports that a frame for the shared address reaches.
fn holders(lan: &mut Lan) -> Vec<usize> {
    lan.nics[0].send(&frame(mac(0), SHARED, 64));
    (1..4).filter(|port| !lan.nics[*port].received().is_empty()).collect()
}

#[test]
fn the_first_driver_keeps_an_address_over_a_pause() {
    let mut lan = lan();
    assert_eq!(holders(&mut lan), [3]);
    for _ in 0..3 {
        lan.nics[0].net.hold_frames(true);
        lan.nics.iter_mut().for_each(Nic::stop);
        // A worker does this, or a change by the host.
        lan.settle();
        lan.nics[0].net.hold_frames(true);
        lan.nics.iter_mut().for_each(|nic| nic.start(FEATURES));
        lan.nics[0].net.hold_frames(false);
        assert_eq!(holders(&mut lan), [3]);
    }
    lan.nics[3].set_tables(&[], &[]);
    lan.settle();
    assert_eq!(holders(&mut lan), [1], "it was given up");
    lan.nics[3].set_tables(&[SHARED], &[]);
    lan.settle();
    assert_eq!(holders(&mut lan), [1]);
}

#[test]
fn the_first_driver_keeps_an_address_in_another_process() {
    let mut old = lan();
    old.nics[0].net.hold_frames(true);
    old.nics.iter_mut().for_each(Nic::stop);
    old.settle();
    let saved: Vec<_> = old.nics.iter().map(|nic| nic.net.save()).collect();
    let mut new = Lan::new(&Config::closed(4));
    for (nic, saved) in new.nics.iter_mut().zip(&saved) {
        nic.net.restore(saved, Some(FEATURES)).unwrap();
    }
    new.settle();
    for (nic, saved) in new.nics.iter().zip(&saved) {
        assert_eq!(&nic.net.save(), saved, "what is saved again is the same");
    }
    new.nics[0].net.hold_frames(true);
    for nic in &mut new.nics {
        nic.start(FEATURES);
        nic.provide(64, 2048);
    }
    new.nics[0].net.hold_frames(false);
    assert_eq!(holders(&mut new), [3]);
    // A later claim has the lowest precedence.
    new.nics[2].set_tables(&[SHARED], &[]);
    new.nics[3].set_tables(&[], &[]);
    new.settle();
    assert_eq!(holders(&mut new), [1]);
}

#[test]
fn addresses_that_a_nic_cannot_hold_are_refused() {
    let old = lan();
    let crate::DeviceSpecific::Net(state) = old.nics[3].net.save() else { panic!("it has a table") };
    let held = |address, since| crate::HeldAddress { address, since };
    assert!(state.held.iter().any(|held| held.address == SHARED));
    let refuses = |held: Vec<crate::HeldAddress>| {
        let mut new = Lan::new(&Config::closed(4));
        let state = crate::NicState { held, ..state.clone() };
        new.nics[3].net.restore(&crate::DeviceSpecific::Net(state), Some(FEATURES)).is_err()
    };
    assert!(!refuses(vec![]) && !refuses(vec![held(SHARED, 7)]));
    for wrong in [vec![held(mac(9), 7)], vec![held(SHARED, 7), held(SHARED, 8)], vec![held(SHARED, u64::MAX)]] {
        assert!(refuses(wrong.clone()), "{wrong:?}");
    }
}
