//! VFs over every kind of backend, and the loss and return of backends.

use std::net::UdpSocket;
use std::process::Command;
use std::thread;
use std::time::Duration;

use integration::{Api, Backend, Backends, Exit, Flood, Guest, Kernel, Pf, Subnet, vf_mac};
use rstest::rstest;
use serde_json::json;

/// Two VFs with each kind.
const KINDS: [Backend; 8] = [
    Backend::Tap,
    Backend::Tap,
    Backend::VhostNet,
    Backend::VhostNet,
    Backend::VhostUser,
    Backend::VhostUser,
    Backend::Vdpa,
    Backend::Vdpa,
];
/// Number of bytes that pass through each VF in each direction.
const BYTES: usize = 8 << 20;

fn subnet(index: usize) -> Subnet {
    Subnet(index as u8)
}

fn assert_all_answer(guest: &mut Guest, pf: &Pf, backends: &Backends) {
    let taps = backends.taps();
    for vf in pf.vfs(guest) {
        assert_eq!(vf.mac, vf_mac(vf.index), "VF {}", vf.index);
        vf.ping_through(guest, &taps, vf.index, subnet(vf.index));
    }
}

fn assert_refused(exit: &Exit, words: &[&str]) {
    assert_eq!(exit.code, Some(1), "{}", exit.errors);
    assert_eq!(exit.errors.trim_end().lines().count(), 1, "the error is one line: {}", exit.errors);
    for word in words {
        assert!(exit.errors.contains(word), "{word:?} is not in: {}", exit.errors);
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn vfs_over_all_backends_survive_disable_flr_and_reboot(#[case] kernel: Kernel) {
    let backends = Backends::start(&KINDS);
    let mut guest = Guest::boot(backends.spec(kernel));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 8);
    assert_all_answer(&mut guest, &pf, &backends);
    for index in 0..8 {
        guest.transfer(subnet(index), BYTES);
    }
    pf.set_num_vfs(&mut guest, 0);
    pf.set_num_vfs(&mut guest, 8);
    assert_all_answer(&mut guest, &pf, &backends);
    for vf in pf.vfs(&mut guest) {
        guest.reset_function(&vf.address);
    }
    assert_all_answer(&mut guest, &pf, &backends);
    guest.reboot();
    pf.set_num_vfs(&mut guest, 8);
    assert_all_answer(&mut guest, &pf, &backends);
    for index in [0, 2, 4, 6] {
        guest.transfer(subnet(index), BYTES / 8);
    }
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Some kinds of threads work only for such backends.
#[test]
fn every_thread_of_vfs_over_all_backends_has_a_seccomp_filter() {
    let backends = Backends::start(&[Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa]);
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 4);
    assert_all_answer(&mut guest, &pf, &backends);
    let modes = guest.vmm().seccomp_modes();
    // A worker for the tap's queues, and one for each other backend.
    let workers = |kind: &str| modes.keys().filter(|name| name.contains(kind)).count();
    assert!(workers("_qp0") >= 1 && workers("_vq0") >= 3, "{modes:?}");
    assert!(modes.values().all(|mode| mode == "2"), "{modes:?}");
    assert_eq!(guest.power_off().code, Some(0));
}

/// G63: a lost backend affects its own VF and no other.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_killed_vhost_user_peer_takes_its_link_down_until_restarted(#[case] kernel: Kernel) {
    let mut backends = Backends::start(&[Backend::VhostUser, Backend::Tap]);
    let api = Api::new("backends");
    let mut guest = Guest::boot(backends.spec(kernel).arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    let taps = backends.taps();
    let floods: Vec<_> =
        vfs.iter().map(|vf| Flood::start(&mut guest, vf.interface(), &taps[vf.index], subnet(vf.index))).collect();
    for _ in 0..2 {
        backends.kill_vhost_user();
        api.await_lost(0, true);
        assert_eq!(api.vf(0)["link"], "down");
        guest.await_carrier(vfs[0].interface(), false);
        guest.ping(vfs[1].interface(), subnet(1));
        backends.start_vhost_user(&[]);
        api.await_lost(0, false);
        guest.await_carrier(vfs[0].interface(), true);
        guest.ping(vfs[0].interface(), subnet(0));
    }
    drop(floods);
    guest.transfer(subnet(0), BYTES / 8);
    assert_eq!(pf.vfs(&mut guest), vfs, "the drivers stayed bound");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_tap_deleted_under_vhost_net_is_lost_until_it_exists_again() {
    let backends = Backends::start(&[Backend::VhostNet, Backend::Tap]);
    let api = Api::new("deleted");
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12).arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    let taps = backends.taps();
    vfs.iter().for_each(|vf| vf.ping_through(&mut guest, &taps, vf.index, subnet(vf.index)));
    let name = taps[0].name();
    ip(&["link", "delete", name]);
    api.await_lost(0, true);
    assert_eq!(api.vf(0)["link"], "down");
    guest.await_carrier(vfs[0].interface(), false);
    guest.ping(vfs[1].interface(), subnet(1));
    ip(&["tuntap", "add", "name", name, "mode", "tap"]);
    api.await_lost(0, false);
    guest.await_carrier(vfs[0].interface(), true);
    taps[0].join(subnet(0));
    guest.ping(vfs[0].interface(), subnet(0));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
    ip(&["link", "delete", name]);
}

/// Runs iproute2's `ip`: busybox's lacks these commands.
fn ip(arguments: &[&str]) {
    let status = Command::new("/usr/sbin/ip").args(arguments).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {}", arguments.join(" "));
}

#[test]
fn a_peer_that_stalls_lies_or_falls_silent_harms_only_its_vf() {
    let mut backends = Backends::start(&[Backend::VhostUser, Backend::VhostUser, Backend::Tap]);
    let api = Api::new("backends");
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12).arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 3);
    assert_all_answer(&mut guest, &pf, &backends);
    let vfs = pf.vfs(&mut guest);
    backends.vhost_user().command("stall vf0");
    assert_ne!(guest.run(&format!("ping -c 2 -W 1 -I {} {}", vfs[0].interface(), subnet(0).host())).status, 0);
    guest.ping(vfs[1].interface(), subnet(1));
    backends.vhost_user().command("resume vf0");
    guest.ping(vfs[0].interface(), subnet(0));
    backends.vhost_user().command("mute vf0");
    // Unbinding stops the queues, for which the VMM requests their positions from the peer.
    guest.unbind(&vfs[0].address);
    guest.ping(vfs[1].interface(), subnet(1));
    guest.ping(vfs[2].interface(), subnet(2));
    // Linux may hang on a queue with false contents. That affects only the guest and the peer: the VMM must keep
    // working.
    backends.vhost_user().command("lie id vf1");
    let host = UdpSocket::bind((subnet(1).host(), 0)).expect("the host's address is configured");
    host.send_to(b"to be given to the guest", (subnet(1).guest(), 9)).expect("the host knows the guest's address");
    thread::sleep(Duration::from_secs(2));
    assert_eq!(api.get("vmm.ping").status, 200);
    assert_eq!(api.vf(2)["state"], "Running");
    assert_eq!(guest.stop_by(libc::SIGTERM).code, Some(0));
}

#[test]
fn the_link_of_a_peer_is_the_link_of_its_vf() {
    let mut backends = Backends::start(&[Backend::Vdpa]);
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 1);
    assert_all_answer(&mut guest, &pf, &backends);
    let interface = pf.vfs(&mut guest)[0].interface().to_owned();
    for up in [false, true] {
        backends.vduse().command(&format!("link {} vf0", if up { "up" } else { "down" }));
        guest.await_carrier(&interface, up);
    }
    guest.ping(&interface, subnet(0));
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_killed_vduse_daemon_harms_only_its_own_vf() {
    let mut backends = Backends::start(&[Backend::Vdpa, Backend::Tap]);
    let api = Api::new("backends");
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12).arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    assert_all_answer(&mut guest, &pf, &backends);
    let vfs = pf.vfs(&mut guest);
    backends.kill_vduse();
    // The VMM notices only at its next request to the device.
    guest.unbind(&vfs[0].address);
    guest.ping(vfs[1].interface(), subnet(1));
    assert_eq!(api.get("vmm.ping").status, 200);
    assert_eq!(guest.power_off().code, Some(0));
}

/// 32 devices are opened, owned and mapped when the PF is added: enabling the VFs changes no mapping.
#[test]
fn enabling_thirty_two_vdpa_vfs_issues_no_iotlb_update() {
    let mut backends = Backends::start(&[Backend::Vdpa; 32]);
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12));
    let pf = Pf::find(&mut guest);
    let mut updates = || -> Vec<u64> {
        (0..32).map(|index| backends.vduse().count(&format!("vf{index}"), "iotlb_updates")).collect()
    };
    let before = updates();
    pf.set_num_vfs(&mut guest, 32);
    pf.await_netdevs(&mut guest, 32);
    assert_eq!(updates(), before);
    for vf in pf.vfs(&mut guest) {
        guest.ok(&format!("ip link set {} up", vf.interface()));
    }
    assert_eq!(updates(), before, "IOTLB updates after DRIVER_OK");
    let vfs = pf.vfs(&mut guest);
    let taps = backends.taps();
    for index in [0, 17, 31] {
        vfs[index].ping_through(&mut guest, &taps, index, subnet(index));
    }
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_backend_that_is_missing_or_unfit_is_refused_in_one_line() {
    let backends = Backends::start_with(&[Backend::VhostUser], &["--never-answer"], &[]);
    assert_refused(&backends.spec(Kernel::V6_12).command().run(), &["index=0", "socket=", "answer"]);
    drop(backends);
    let backends = Backends::start_with(&[Backend::Tap, Backend::Vdpa], &[], &["--queues", "1"]);
    assert_refused(&backends.spec(Kernel::V6_12).command().run(), &["index=1", "/dev/vhost-vdpa-", "queues"]);
    drop(backends);
    for (vf, words) in [
        ("vhost_user=on,socket=/nowhere/vf0.sock", ["index=0", "/nowhere/vf0.sock"]),
        ("vdpa=/dev/vhost-vdpa-99", ["index=0", "/dev/vhost-vdpa-99"]),
    ] {
        let spec = Backends::start(&[]).spec(Kernel::V6_12).arguments(&["--net", "id=pf1,tap=pf1,sriov_vfs=1"]);
        let exit = spec.net_vf(&format!("pf=pf1,index=0,{vf}")).command().run();
        assert_refused(&exit, &words);
        assert!(!integration::interface_exists("pf1"));
    }
}

#[test]
fn vfs_of_one_pf_may_have_backends_with_different_features() {
    let kinds = [Backend::VhostUser, Backend::Tap];
    let backends = Backends::start_with(&kinds, &["--without-feature", "mrg_rxbuf"], &[]);
    let mut guest = Guest::boot(backends.spec(Kernel::V6_12));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    assert_all_answer(&mut guest, &pf, &backends);
    guest.transfer(subnet(0), BYTES / 8);
    let features =
        |guest: &mut Guest, index| guest.ok(&format!("cat {}", pf.file(&format!("virtfn{index}/virtio*/features"))));
    let (without, with) = (features(&mut guest, 0), features(&mut guest, 1));
    assert_eq!((without.as_bytes()[15], with.as_bytes()[15]), (b'0', b'1'), "{without} {with}");
    assert_eq!(guest.power_off().code, Some(0));
}

#[test]
fn a_backend_that_needs_shared_memory_is_refused_without_it() {
    let backends = Backends::start(&[Backend::Vdpa]);
    let api = Api::new("backends");
    let spec = Backends::start(&[]).spec(Kernel::V6_12).arguments(&["--api-socket", &api.argument()]);
    let guest = Guest::boot(spec);
    let added = api.put_json("vm.add-vdpa", &json!({ "id": "vd0", "path": backends.node(0) }));
    assert_eq!(added.status, 400, "{}", added.body);
    assert!(added.body.to_string().contains("shared=on"), "{}", added.body);
    assert_eq!(guest.power_off().code, Some(0));
}
