//! Guests with an X550 whose VFs are on, which move to another VMM or continue from a snapshot; and VFs behind the
//! virtual IOMMU.

#![expect(clippy::panic, reason = "a test fails by panicking, also in its helpers")]

use std::time::Duration;

use integration::{
    Announcements, Api, Bridge, Guest, HostTap, Kernel, Pf, Plan, Probes, Stream, Subnet, Tenant, VmmCommand, X550,
};
use serde_json::{Value, json};

/// Number of VFs.
const VFS: usize = 4;
/// The network of the PF.
const SUBNET: Subnet = Subnet(91);
/// The time between two pings, and the longest without an answer.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(20);

/// The settings of the guest's administrator, and the PF's counts of its VFs.
fn shown(guest: &mut Guest) -> Value {
    let text = guest.ok(&format!("{} -j link show eth0", integration::IP));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Enables the VFs, the first two of which get tenants that flood each other, with policies. VF 2 is in the guest's
/// first namespace, in [`SUBNET`].
fn enable(guest: &mut Guest) -> Vec<Tenant> {
    guest.load_x550();
    guest.ok("ip link set eth0 up");
    guest.await_carrier("eth0", true);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(guest, VFS);
    let vfs = pf.vfs(guest);
    let tenants: Vec<_> = vfs[..2].iter().map(|vf| Tenant::with(guest, vf)).collect();
    guest.ok(&format!("{ip} link set eth0 vf 3 vlan 9; {ip} link set eth0 vf 0 trust on", ip = integration::IP));
    guest.join(vfs[2].interface(), SUBNET);
    guest.await_carrier(vfs[2].interface(), true);
    guest.wait_for(&format!("ping -c 1 -W 1 -I {} {}", vfs[2].interface(), SUBNET.host()));
    tenants.iter().for_each(|tenant| tenant.await_carrier(guest, true));
    tenants[0].flood(guest, &tenants[1].address());
    tenants
}

/// Each VF is as it was, and carries traffic.
fn assert_goes_on(guest: &mut Guest, tenants: &[Tenant], before: &Value) {
    assert_eq!(&shown(guest), before);
    assert!(tenants[0].reaches(guest, &tenants[1].address()));
    assert!(tenants[1].reaches(guest, &tenants[0].address()));
    guest.ok(&format!("ping -c 2 -i 0.2 -W 5 {}", SUBNET.host()));
}

#[test]
fn an_x550_with_vfs_moves_and_returns_under_traffic() {
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, &[]));
    let bridge = Bridge::new("x550br", SUBNET, &["apf", "bpf"]);
    let mut here = here.boot_over(|tap| X550::spec(Kernel::Generic).net(&X550::option(tap, VFS)));
    let mut there = there.wait(&[]);
    let tenants = enable(&mut here.guest);
    let before = shown(&mut here.guest);
    let mut stream = Stream::open(&mut here.guest, SUBNET);
    stream.assert_alive(b"before\n");
    for round in 1..=2 {
        let announcements = Announcements::on(bridge.name());
        let probes = Probes::start(&[SUBNET], PAUSE);
        let sent = here.move_to(&there, &json!({}));
        (here, there) = (there, here);
        assert!(announcements.of(SUBNET.guest(), LONGEST).is_some() || round > 0, "{sent}");
        stream.assert_alive(format!("after {round}\n").as_bytes());
        probes.await_answers(LONGEST);
        let answers = probes.end();
        println!("{round}: {answers:?}; {}", sent["downtime"]);
        assert!(answers[0].gap < LONGEST, "{answers:?}");
        assert_goes_on(&mut here.guest, &tenants, &before);
    }
    // VFs go and come as if nothing had happened.
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut here.guest, 0);
    pf.set_num_vfs(&mut here.guest, VFS);
    assert_eq!(pf.vfs(&mut here.guest).len(), VFS);
    here.guest.assert_x550_has_no_complaint();
}

#[test]
fn an_x550_with_vfs_on_continues_from_a_snapshot() {
    let api = Api::new("saved");
    let uplink = HostTap::persistent("up0");
    let spec = X550::spec(Kernel::Generic).net(&X550::option("up0", VFS));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    uplink.join(SUBNET);
    let tenants = enable(&mut guest);
    let before = shown(&mut guest);
    let saved = tempfile::tempdir().expect("a folder for a snapshot");
    let url = format!("file://{}", saved.path().display());
    assert_eq!(api.put("vm.pause").status, 204);
    let answer = api.put_json("vm.snapshot", &json!({ "destination_url": url }));
    assert_eq!(answer.status, 204, "{}", answer.body);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);

    let api = Api::new("restored");
    let command = VmmCommand::new().args(["--restore", &format!("source_url={url}"), "--api-socket", &api.argument()]);
    let mut guest = Guest::restored_by(command);
    assert_eq!(api.info()["state"], "Paused");
    assert_eq!(api.put("vm.resume").status, 204);
    assert_goes_on(&mut guest, &tenants, &before);
    // New VFs, and the PF's own registers.
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 0);
    guest.ok("ip link set eth0 down; ip link set eth0 up");
    guest.await_carrier("eth0", true);
    pf.set_num_vfs(&mut guest, VFS);
    assert_eq!(pf.vfs(&mut guest).len(), VFS);
    guest.assert_x550_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The groups by number, with the devices in each.
fn groups(guest: &mut Guest) -> Vec<String> {
    let listed = guest.ok("for group in /sys/kernel/iommu_groups/*/devices; do echo $(ls $group); done");
    let mut groups: Vec<_> = listed.lines().map(str::to_owned).collect();
    groups.sort();
    groups
}

#[test]
fn vfs_of_an_x550_are_behind_the_iommu_each_in_its_group() {
    let mut nic = X550::boot_with(Kernel::Generic, VFS, |spec| {
        spec.arguments(&["--platform", "iommu=on"]).kernel_argument("iommu.strict=1")
    });
    nic.guest.load_vfio();
    let tenants = nic.tenants(VFS);
    let expected: Vec<_> = (0..VFS).map(|vf| format!("0000:01:00.{vf}")).collect();
    assert_eq!(groups(&mut nic.guest), expected);
    let count = |nic: &X550, name: &str| nic.api.get("vm.counters").body["__iommu"][name].as_u64().unwrap_or_default();
    let maps = count(&nic, "maps");
    assert_eq!(nic.reachability(&tenants), X550::everyone(VFS));
    assert!(count(&nic, "maps") > maps, "the kernel maps each buffer");
    // A VF goes to programs and back.
    nic.guest.give_to_vfio("0000:01:00.3");
    nic.guest.ok("[ -e /dev/vfio/$(basename $(readlink /sys/bus/pci/devices/0000:01:00.3/iommu_group)) ]");
    nic.guest.return_to("ixgbevf", "0000:01:00.3");
    assert_eq!((count(&nic, "faults"), count(&nic, "refused")), (0, 0));
    nic.guest.assert_x550_has_no_complaint();
    assert_eq!(nic.guest.power_off().code, Some(0));
}
