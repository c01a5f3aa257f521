//! Taps that can be used, changes to them, and the errors for those that cannot be used.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

use virtio_devices::{Tap, TapError, TapSpec};

use crate::driver::eventually;
use crate::host::*;

fn error(result: Result<Tap, TapError>) -> String {
    result.map(|tap| tap.name().to_owned()).unwrap_err().to_string()
}

pub(crate) fn fds(tap: &Tap) -> Vec<OwnedFd> {
    tap.queues().iter().map(|queue| queue.lock().as_fd().try_clone_to_owned().unwrap()).collect()
}

#[test]
fn a_tap_that_did_not_exist_is_known_as_made() {
    new_namespace();
    assert!(Tap::open(&spec("tap7", 1)).unwrap().handle().was_made());
    ip("tuntap add dev tap7 mode tap vnet_hdr");
    assert!(!Tap::open(&spec("tap7", 1)).unwrap().handle().was_made());
}

#[test]
fn created_tap_is_configured_and_removed_with_its_descriptors() {
    new_namespace();
    let address = |text: &str| Some(text.parse::<IpAddr>().unwrap());
    let spec = TapSpec {
        ip: address("192.168.249.1"),
        mask: address("255.255.255.0"),
        host_mac: Some([0x52, 0x54, 0, 0xff, 0, 1]),
        mtu: Some(9000),
        ..spec("tap0", 1)
    };
    let tap = Tap::open(&spec).unwrap();
    let shown = ip("addr show tap0");
    for part in ["mtu 9000", "192.168.249.1/24", "52:54:00:ff:00:01", ",UP"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert_eq!((tap.name(), tap.mtu(), tap.queues().len()), ("tap0", Some(9000), 1));
    assert!(ip("-d link show tap0").contains("vnet_hdr on"));
    drop(tap);
    wait_gone("tap0");
}

#[test]
fn an_ipv6_address_is_set_by_its_mask() {
    new_namespace();
    let address = |text: &str| Some(text.parse::<IpAddr>().unwrap());
    let spec = TapSpec { ip: address("fd00::1"), mask: address("ffff:ffff:ffff:ffff::"), ..spec("tap0", 1) };
    let _tap = Tap::open(&spec).unwrap();
    assert!(ip("addr show tap0").contains("fd00::1/64"));
}

#[test]
fn without_a_name_the_first_free_number_is_taken() {
    new_namespace();
    let spec = TapSpec { name: None, ..spec("", 1) };
    let (first, second) = (Tap::open(&spec).unwrap(), Tap::open(&spec).unwrap());
    assert_eq!((first.name(), second.name()), ("vmtap0", "vmtap1"));
    let queues = Tap::open(&TapSpec { queue_pairs: 4, ..spec }).unwrap();
    assert_eq!((queues.name(), queues.queues().len()), ("vmtap2", 4));
}

#[test]
fn a_failure_leaves_no_tap() {
    new_namespace();
    let address = |text: &str| Some(text.parse::<IpAddr>().unwrap());
    let mut wrong = spec("tap0", 2);
    (wrong.ip, wrong.mask) = (address("10.0.0.1"), address("255.0.255.0"));
    assert_eq!(
        error(Tap::open(&wrong)),
        "255.0.255.0 is not a mask for 10.0.0.1; give one of the same family, such as 255.255.255.0"
    );
    wait_gone("tap0");
    (wrong.ip, wrong.mask) = (address("10.0.0.1"), address("ffff::"));
    assert!(error(Tap::open(&wrong)).contains("is not a mask"));
    wait_gone("tap0");
    wrong = TapSpec { mtu: Some(20), ..spec("tap0", 2) };
    assert!(error(Tap::open(&wrong)).starts_with("cannot set the MTU of the tap tap0: "));
    wait_gone("tap0");
}

#[test]
fn a_tap_that_exists_is_used_and_stays() {
    new_namespace();
    ip("tuntap add tap0 mode tap");
    ip("link set tap0 mtu 1400");
    let tap = Tap::open(&spec("tap0", 1)).unwrap();
    assert_eq!(tap.mtu(), Some(1400));
    assert!(ip("link show tap0").contains(",UP"));
    drop(tap);
    assert!(exists("tap0"));
    // Until a process that another test starts has closed its descriptors, it is in use.
    eventually("the tap to be free", || Tap::open(&spec("tap0", 1)).is_ok());
}

#[test]
fn a_tap_in_use_is_refused_by_name_whatever_its_queues() {
    new_namespace();
    for (name, queues) in [("single", 1), ("multi", 4)] {
        let _first = Tap::open(&spec(name, queues)).unwrap();
        let expected = format!("{name} is in use by another process; stop that one, or name another tap");
        assert_eq!(error(Tap::open(&spec(name, queues))), expected);
    }
}

#[test]
fn a_tap_of_the_other_kind_is_refused_with_the_way_out() {
    new_namespace();
    ip("tuntap add qone mode tap");
    ip("tuntap add qmany mode tap multi_queue");
    ip("tuntap add tun0 mode tun");
    // With a carrier, it counts as in use before it is asked what it is.
    ip("link set lo down");
    let multi = error(Tap::open(&spec("qmany", 1)));
    assert!(multi.starts_with("qmany is a multi-queue tap; add num_queues=4"), "{multi}");
    let single = error(Tap::open(&spec("qone", 2)));
    assert!(single.starts_with("qone is a single-queue tap; use num_queues=2"), "{single}");
    for other in ["lo", "tun0"] {
        for queues in [1, 2] {
            let refused = error(Tap::open(&spec(other, queues)));
            assert!(refused.starts_with(&format!("{other} exists and is not a tap")), "{refused}");
        }
    }
    // Asking left nothing attached.
    drop(Tap::open(&spec("qmany", 2)).unwrap());
    drop(Tap::open(&spec("qone", 1)).unwrap());
}

#[test]
fn a_prepared_tap_needs_no_privilege_and_others_do() {
    new_namespace();
    ip("tuntap add own mode tap user 0");
    ip("tuntap add down mode tap user 0");
    ip("tuntap add other mode tap user 12345");
    ip("link set own up mtu 1400");
    let tap = without_privilege(|| Tap::open(&TapSpec { mtu: Some(1400), ..spec("own", 1) })).unwrap();
    assert_eq!(tap.mtu(), Some(1400));
    drop(tap);
    for (spec, expected) in [
        (spec("other", 1), "no permission to use the existing tap other; make it this user's"),
        (spec("fresh", 1), "no permission to create the tap fresh; create it for this user (ip tuntap add fresh"),
        (spec("down", 1), "cannot set the state (up) of the tap down: "),
        (TapSpec { mtu: Some(1300), ..spec("own", 1) }, "cannot set the MTU of the tap own: "),
    ] {
        let refused = without_privilege(|| error(Tap::open(&spec)));
        assert!(refused.starts_with(expected) && refused.contains("CAP_NET_ADMIN"), "{refused}");
        assert!(!refused.contains('\n'));
    }
    wait_gone("fresh");
}

#[test]
fn descriptors_that_are_passed_in_must_be_the_queues_of_one_tap() {
    new_namespace();
    let (one, two) = (Tap::open(&spec("one", 2)).unwrap(), Tap::open(&spec("two", 2)).unwrap());
    let passed = Tap::from_fds(fds(&one)).unwrap();
    assert_eq!((passed.name(), passed.queues().len()), ("one", 2));
    let mixed = fds(&one).into_iter().take(1).chain(fds(&two).into_iter().take(1)).collect();
    assert_eq!(
        error(Tap::from_fds(mixed)),
        "the file descriptors of fd= belong to different taps, one and two; a NIC has one tap"
    );
    let single = Tap::open(&spec("single", 1)).unwrap();
    let twice = fds(&single).into_iter().chain(fds(&single)).collect();
    assert!(error(Tap::from_fds(twice)).contains("without all flags"));
    let file = std::fs::File::open("/dev/null").unwrap().into();
    let second = fds(&one).into_iter().take(1).chain([file]).collect();
    assert!(error(Tap::from_fds(second)).starts_with("file descriptor 1 (counted from 0) of fd= is not a tap"));
}

#[test]
fn passed_taps_mtu_is_not_read_from_a_local_namesake() {
    new_namespace();
    let elsewhere = Tap::open(&TapSpec { mtu: Some(9000), ..spec("tap0", 1) }).unwrap();
    another_network();
    let _here = Tap::open(&TapSpec { mtu: Some(1400), ..spec("tap0", 1) }).unwrap();
    let passed = Tap::from_fds(fds(&elsewhere)).unwrap();
    assert_eq!((passed.name(), passed.mtu()), ("tap0", None));
}

#[test]
fn further_queues_are_detached_until_the_driver_uses_them() {
    new_namespace();
    let tap = Tap::open(&spec("tap0", 4)).unwrap();
    let attached: Vec<_> = tap.queues().iter().map(|queue| queue.lock().attached()).collect();
    assert_eq!(attached, [true, false, false, false]);
    assert!(ip("link show tap0").contains("LOWER_UP"));
}
