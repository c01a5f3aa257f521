//! Guests that are saved with their VFs enabled, and restored elsewhere.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use integration::{Api, Backend, Backends, Guest, GuestSpec, HostTap, Kernel, Pf, Pings, Stream, Subnet, VmmCommand};
use rstest::rstest;
use serde_json::json;

/// The kind of each VF's backend.
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
/// Bytes of a ping, and seconds between two through the same VF.
const PING: (usize, f64) = (1000, 0.2);
/// Bytes that pass through each VF in each direction.
const BYTES: usize = 64 << 10;

/// The values of `backends` in a restore that give the VFs on taps other ones.
fn other_taps() -> Vec<String> {
    let taps = KINDS.iter().enumerate().filter(|(_, kind)| matches!(kind, Backend::Tap | Backend::VhostNet));
    taps.map(|(index, _)| format!("pf0/{index}@tap=snap{index}")).collect()
}

/// Facts that a restart would change: the kernel's own number, and a file in memory.
fn memories(guest: &mut Guest) -> String {
    guest.ok("cat /proc/sys/kernel/random/boot_id /tmp/nonce")
}

/// Facts about the VFs in the guest: their number, addresses, MAC addresses and interrupts.
fn functions(guest: &mut Guest, pf: &Pf) -> String {
    let num_vfs = pf.read(guest, "sriov_numvfs");
    let vfs = guest.ok("cd /sys/bus/pci/devices && for vf in $(ls | grep -v 0000:00:); do \
         echo $vf $(cat $vf/virtio*/net/*/address) $(ls $vf/msi_irqs | wc -l); done");
    format!("{num_vfs}\n{vfs}")
}

/// A guest with 8 VFs over four kinds of backends under traffic is saved, its VMM killed, and it continues from a copy
/// of the snapshot over other taps, without interruption.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_with_eight_vfs_resumes_from_a_snapshot_on_other_taps(#[case] kernel: Kernel) {
    let mut backends = Backends::start(&KINDS);
    let api = Api::new("saved");
    let spec = backends.spec(kernel).memory("size=512M").arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, KINDS.len());
    let vfs = pf.vfs(&mut guest);
    for (vf, tap) in vfs.iter().zip(backends.taps()) {
        let subnet = Subnet(vf.index as u8);
        tap.join(subnet);
        guest.join(vf.interface(), subnet);
        guest.ping(vf.interface(), subnet);
    }
    guest.ok("head -c 32 /dev/urandom | md5sum > /tmp/nonce");
    let (known, seen) = (memories(&mut guest), functions(&mut guest, &pf));
    let mut stream = Stream::open(&mut guest, Subnet(0));
    stream.assert_alive(b"before\n");
    let pings = Pings::start(&mut guest, &vfs, PING.0, PING.1);
    std::thread::sleep(Duration::from_secs(1));

    let hosts: Vec<_> = backends.taps().iter().map(|tap| address(tap.name())).collect();
    let saved = tempfile::tempdir().unwrap();
    let (first, other) = (saved.path().join("a"), saved.path().join("b"));
    fs::create_dir(&first).unwrap();
    assert_eq!(api.put("vm.pause").status, 204);
    let answer = api.put_json("vm.snapshot", &json!({ "destination_url": format!("file://{}", first.display()) }));
    assert_eq!(answer.status, 204, "{}", answer.body);
    let again = api.put_json("vm.snapshot", &json!({ "destination_url": format!("file://{}", first.display()) }));
    assert_eq!(again.status, 409, "{}", again.body);
    print_sizes(&first);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);
    copy(&first, &other);
    fs::remove_dir_all(&first).unwrap();

    backends.kill_vhost_user();
    backends.start_vhost_user(&[]);
    let api = Api::new("restored");
    let keys = format!("source_url=file://{},backends=[{}]", other.display(), other_taps().join(","));
    let command = VmmCommand::new().args(["--restore", &keys, "--api-socket", &api.argument()]);
    let mut guest = Guest::restored_by(command);
    let info = api.info();
    assert_eq!(info["state"], "Paused", "{info}");
    for (index, (kind, host)) in KINDS.iter().zip(hosts).enumerate() {
        let name = if matches!(kind, Backend::Tap | Backend::VhostNet) { "snap" } else { "pf0v" };
        let tap = HostTap::existing(&format!("{name}{index}"));
        // The guest's neighbours keep their addresses, which the guest has cached.
        assert!(Command::new("ip").args(["link", "set", tap.name(), "address", &host]).status().unwrap().success());
        tap.join(Subnet(index as u8));
    }
    assert_eq!(api.put("vm.resume").status, 204);
    assert_eq!((memories(&mut guest), functions(&mut guest, &pf)), (known, seen));
    stream.assert_alive(b"after\n");
    for vf in &vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    for (vf, (sent, answered)) in vfs.iter().zip(pings.end(&mut guest)) {
        println!("VF {}: {answered} of {sent} pings answered", vf.index);
        assert!(answered > 3, "VF {}: {answered} of {sent}", vf.index);
    }
    for vf in &vfs {
        guest.transfer(Subnet(vf.index as u8), BYTES);
    }
    guest.assert_kernel_has_no_complaint();
    pf.set_num_vfs(&mut guest, 0);
    pf.set_num_vfs(&mut guest, KINDS.len());
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}

/// A VF whose tap is in use by another program at the new place has no link there, while the others continue; a later
/// request gives it another tap, and its rings continue where they stopped.
#[test]
fn a_vf_with_a_missing_backend_has_no_link_until_it_gets_one() {
    let api = Api::new("whole");
    let spec = GuestSpec::new(Kernel::V6_12)
        .memory("size=512M")
        .net("id=pf0,tap=misspf,sriov_vfs=3")
        .net_vf("pf=pf0,index=0,tap=miss0")
        .net_vf("pf=pf0,index=1,tap=miss1,vhost=on")
        .net_vf("pf=pf0,index=2,tap=miss2")
        .arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 3);
    let vfs = pf.vfs(&mut guest);
    let mut hosts = Vec::new();
    for vf in &vfs {
        let (tap, subnet) = (HostTap::existing(&format!("miss{}", vf.index)), Subnet(vf.index as u8));
        tap.join(subnet);
        guest.join(vf.interface(), subnet);
        guest.ping(vf.interface(), subnet);
        hosts.push(address(tap.name()));
    }
    let seen = functions(&mut guest, &pf);
    let saved = tempfile::tempdir().unwrap();
    let url = format!("file://{}", saved.path().display());
    assert_eq!(api.put("vm.pause").status, 204);
    assert_eq!(api.put_json("vm.snapshot", &json!({ "destination_url": url })).status, 204);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);

    let _other = HostTap::busy("miss2");
    let api = Api::new("parted");
    let keys = format!("source_url={url},on_missing_backend=link-down");
    let command = VmmCommand::new().args(["--restore", &keys, "--api-socket", &api.argument()]);
    let mut guest = Guest::restored_by(command);
    assert_eq!(api.info()["state"], "Paused");
    let place = |index: usize, name: &str| {
        let tap = HostTap::existing(name);
        let set = ["link", "set", tap.name(), "address", &hosts[index]];
        assert!(Command::new("ip").args(set).status().unwrap().success());
        tap.join(Subnet(index as u8));
    };
    place(0, "miss0");
    place(1, "miss1");
    assert_eq!(api.put("vm.resume").status, 204);
    guest.await_carrier(vfs[2].interface(), false);
    let missing = api.vf(2);
    assert_eq!((&missing["backend"]["kind"], &missing["link"]), (&json!("missing"), &json!("down")), "{missing}");
    for vf in &vfs[..2] {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    // Frames sent in the meantime are completed, and the driver's commands are carried out.
    guest.ok(&format!("ip link set {} promisc on && ip link set {0} promisc off", vfs[2].interface()));
    let given = api.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 2, "tap": "late2"}));
    assert_eq!(given.status, 204, "{}", given.body);
    place(2, "late2");
    guest.await_carrier(vfs[2].interface(), true);
    for vf in &vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
        guest.transfer(Subnet(vf.index as u8), BYTES);
    }
    assert_eq!(functions(&mut guest, &pf), seen);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The MAC address of an interface of the host.
fn address(interface: &str) -> String {
    let text = fs::read_to_string(format!("/sys/class/net/{interface}/address")).unwrap();
    text.trim().to_string()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn print_sizes(folder: &Path) {
    use std::os::unix::fs::MetadataExt as _;
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let found = entry.metadata().unwrap();
        println!("{}: {} bytes, {} allocated", entry.file_name().display(), found.len(), found.blocks() * 512);
    }
}
