//! Errors that need root, taps and KVM: a VMM that lacks a resource reports that in one line and leaves nothing behind.

use integration::{DeviceMode, Exit, GuestSpec, HostTap, Kernel, interface_exists};

/// A user without privileges.
const NOBODY: u32 = 65534;

fn spec(net: &str) -> GuestSpec {
    GuestSpec::new(Kernel::V6_12).net(net)
}

fn assert_refused_in_one_line(exit: &Exit, words: &[&str]) {
    assert_eq!(exit.code, Some(1), "{}", exit.errors);
    assert_eq!(exit.errors.trim_end().lines().count(), 1, "the error is one line: {}", exit.errors);
    for word in words {
        assert!(exit.errors.contains(word), "{word:?} is not in: {}", exit.errors);
    }
}

#[test]
fn a_tap_that_another_program_uses_is_named() {
    let tap = HostTap::busy("busy0");
    let exit = spec("tap=busy0").command().run();
    assert_refused_in_one_line(&exit, &["--net", tap.name()]);
}

#[test]
fn a_vf_tap_in_use_is_named_and_the_other_taps_are_removed() {
    let tap = HostTap::busy("pf0v2");
    let exit = spec("id=pf0,tap=pf0,sriov_vfs=4").command().run();
    assert_refused_in_one_line(&exit, &[tap.name()]);
    for name in ["pf0", "pf0v0", "pf0v1", "pf0v3"] {
        assert!(!interface_exists(name), "{name} is left behind");
    }
}

#[test]
fn a_user_who_may_not_make_a_tap_gets_the_remedy() {
    let _devices = ["/dev/kvm", "/dev/net/tun"].map(|path| DeviceMode::set(path, 0o666));
    let exit = spec("tap=never0").command().user(NOBODY).run();
    assert_refused_in_one_line(&exit, &["--net", "never0", "CAP_NET_ADMIN"]);
    assert!(!interface_exists("never0"));
}

#[test]
fn a_user_who_may_not_open_the_tun_device_gets_the_remedy() {
    let _devices = [DeviceMode::set("/dev/kvm", 0o666), DeviceMode::set("/dev/net/tun", 0o600)];
    let exit = spec("tap=never0").command().user(NOBODY).run();
    assert_refused_in_one_line(&exit, &["--net", "/dev/net/tun"]);
}

#[test]
fn a_user_who_may_not_open_kvm_gets_the_remedy() {
    let _kvm = DeviceMode::set("/dev/kvm", 0o600);
    let exit = GuestSpec::new(Kernel::V6_12).command().user(NOBODY).run();
    assert_refused_in_one_line(&exit, &["/dev/kvm"]);
}

#[test]
fn a_missing_kvm_is_reported_and_no_tap_is_left() {
    let exit = spec("tap=never1").command().without_kvm().run();
    assert_refused_in_one_line(&exit, &["/dev/kvm"]);
    assert!(!interface_exists("never1"));
}
