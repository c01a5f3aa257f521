//! A guest governs its own VFs by `vfctl`, within the limits of its host.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::time::Duration;

use integration::{
    Api, Backend, Backends, Guest, GuestSpec, Kernel, Output, Pf, Plan, Subnet, Tenant, VmmCommand, guest_tools,
    reachability, vf_mac,
};
use rstest::rstest;
use serde_json::{Value, json};

/// Limits of the host.
const ALLOWED: [&str; 5] = ["vlan:100-199", "mac", "max_tx_rate:1000", "link", "spoofchk"];
/// Time that the program may take. A program starts slowly under emulation.
const LIMIT: Duration = Duration::from_secs(60);
/// Tenants reach each other if no VF has a VLAN, and if VFs 0 and 1 have the same.
const ALL: [&str; 4] = [".+++", "+.++", "++.+", "+++."];
const BY_VLAN: [&str; 4] = [".+--", "+.--", "--.+", "--+."];

/// The key with the host's limits.
fn limits() -> String {
    format!("guest_control=[{}]", ALLOWED.join(","))
}

/// `spec` with the programs for guests on a disk, and with modules.
fn with_programs(spec: GuestSpec) -> GuestSpec {
    spec.with_modules().disk(&format!("path={},readonly=on,pci_device_id=9", guest_tools().display()))
}

/// A guest whose four VFs are ports of a switch with the keys `more`.
fn on_a_switch(kernel: Kernel, more: &str) -> GuestSpec {
    let net = format!("id=pf0,switch=veb{more},mac=52:54:00:00:00:01,sriov_vfs=4");
    let spec = with_programs(GuestSpec::new(kernel)).net(&format!("{net},{}", limits()));
    (0..4).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index))))
}

/// Boots a guest of [`on_a_switch`] without an uplink.
fn boot(kernel: Kernel, api: &Api) -> Guest {
    let mut guest = Guest::boot(on_a_switch(kernel, "").arguments(&["--api-socket", &api.argument()]));
    unpack(&mut guest);
    guest
}

/// Unpacks the programs, and loads the driver of the channel, after each boot.
fn unpack(guest: &mut Guest) {
    guest.load("virtio_blk");
    guest.load("virtio_console");
    guest.ok_within("mkdir -p /run /tmp/tools && tar -xf /dev/vda -C /tmp/tools", LIMIT);
    // The ports have names once the VMM has answered the driver.
    guest.wait_for("grep -qx sriov.control /sys/class/virtio-ports/*/name");
    guest.wait_for("grep -qx sriov.events /sys/class/virtio-ports/*/name");
}

fn vfctl(guest: &mut Guest, arguments: &str) -> String {
    guest.ok_within(&format!("/tmp/tools/vfctl {arguments}"), LIMIT)
}

/// The VFs of the only PF in JSON.
fn listed(guest: &mut Guest) -> Vec<Value> {
    let pfs: Value = serde_json::from_str(&vfctl(guest, "list")).unwrap();
    pfs[0]["vfs"].as_array().unwrap().clone()
}

/// The settings that the guest has made, of each VF.
fn set_by_guest(guest: &mut Guest) -> Vec<Value> {
    listed(guest).into_iter().map(|vf| vf["set"].clone()).collect()
}

/// A value of the policy of each VF, as the host shows it.
pub(crate) fn on_host(api: &Api, key: &str) -> Vec<Value> {
    let vfs = api.info()["sriov"][0]["vfs"].as_array().unwrap().clone();
    vfs.into_iter().map(|vf| vf["policy"][key].clone()).collect()
}

/// The table has the limits, and a line for each VF with its network interface.
fn assert_table(guest: &mut Guest) {
    let text = vfctl(guest, "--text list");
    let mut lines = text.lines();
    let head = lines.next().unwrap();
    assert!(head.starts_with("eth0 (0000:00:01.0): the host allows "), "{text}");
    assert!(ALLOWED.iter().all(|limit| head.contains(limit)), "{text}");
    let cells: Vec<Vec<_>> = lines.map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(cells[0], ["VF", "ADDRESS", "NETDEV", "MAC", "VLAN", "RATE", "LINK", "SPOOFCHK", "DRIVER", "SET"]);
    assert_eq!(cells.len(), 5, "{text}");
    for (index, cells) in cells[1..].iter().enumerate() {
        let (name, address, mac) = (format!("eth0/{index}"), format!("01:00.{index}"), vf_mac(index));
        assert_eq!((cells[0], cells[1], cells[3], cells[4]), (&*name, &*address, &*mac, "-"), "{text}");
        assert!(cells[2].starts_with("eth") && cells[8] == "virtio-pci" && cells[9] == "-", "{text}");
    }
}

/// A value beyond the limits is refused with the host's sentence, and changes nothing.
fn assert_refused(guest: &mut Guest, api: &Api) {
    for (setting, line) in [
        ("vlan=300", "vfctl: eth0/2: vlan=300: the host allows 100-199"),
        // All settings of a request are made, or none.
        ("link=down vlan=300", "vfctl: eth0/2: vlan=300: the host allows 100-199"),
    ] {
        let Output { status, text } = guest.run_within(&format!("/tmp/tools/vfctl set eth0/2 {setting}"), LIMIT);
        assert_eq!((status, text.trim_end()), (1, line), "{setting}");
    }
    assert_eq!(on_host(api, "vlan")[2], json!(0));
    assert_eq!(on_host(api, "link")[2], json!("auto"));
}

/// A change by the host reaches the program that watches.
fn assert_watched(guest: &mut Guest, api: &Api) {
    guest.ok("/tmp/tools/vfctl watch --text > /tmp/notices 2>&1 & echo $! > /tmp/watching");
    guest.wait_for("ls -l /proc/$(cat /tmp/watching)/fd | grep -q /dev/vport");
    let change = json!({"pf": "pf0", "index": 3, "max_tx_rate": 500});
    assert_eq!(api.put_json("vm.set-vf", &change).status, 204);
    guest.wait_for("grep -q '^0000:01:00.3.* by host: max_tx_rate 0 -> 500$' /tmp/notices");
    guest.ok("kill $(cat /tmp/watching)");
}

/// The guest sets a VLAN that separates its tenants, no other than the host allows, and all ends with the VFs and with
/// the run of the guest.
#[rstest]
#[case::generic_6_12(Kernel::Generic)]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::Backports)]
fn a_guest_governs_its_vfs_within_limits(#[case] kernel: Kernel) {
    let api = Api::new("guest-control");
    let mut guest = boot(kernel, &api);
    let pf = Pf::at("0000:00:01.0");
    assert!(vfctl(&mut guest, "--text list eth0").contains("\nno VF is enabled; enable some by writing their number"));
    pf.set_num_vfs(&mut guest, 4);
    assert_table(&mut guest);
    let vfs = pf.vfs(&mut guest);
    let first: Vec<_> = vfs.iter().map(|vf| Tenant::with(&mut guest, vf)).collect();
    assert_eq!(reachability(&mut guest, &first), ALL);

    for index in [0, 1] {
        let set: Value = serde_json::from_str(&vfctl(&mut guest, &format!("set eth0/{index} vlan=120"))).unwrap();
        assert_eq!((&set["vlan"], &set["set"]), (&json!(120), &json!(["vlan"])));
    }
    assert_eq!(reachability(&mut guest, &first), BY_VLAN);
    assert_eq!(on_host(&api, "vlan"), [120, 120, 0, 0]);
    assert_refused(&mut guest, &api);
    assert_watched(&mut guest, &api);
    vfctl(&mut guest, "reset eth0/1");
    assert_eq!(on_host(&api, "vlan"), [120, 0, 0, 0]);

    // VF Enable ends what the guest set, and keeps what the host set.
    first.into_iter().for_each(|tenant| tenant.end(&mut guest));
    pf.set_num_vfs(&mut guest, 0);
    assert_eq!(on_host(&api, "vlan"), [0; 4]);
    let second = Tenant::all(&mut guest, &pf, 4);
    assert_eq!(set_by_guest(&mut guest), [json!([]), json!([]), json!([]), json!([])]);
    assert_eq!(on_host(&api, "max_tx_rate"), [0, 0, 0, 500]);
    assert_eq!(reachability(&mut guest, &second), ALL);

    // So does a reboot.
    vfctl(&mut guest, "set eth0/0 vlan=120 max_tx_rate=100");
    assert_eq!(on_host(&api, "max_tx_rate"), [100, 0, 0, 500]);
    guest.reboot();
    unpack(&mut guest);
    pf.set_num_vfs(&mut guest, 4);
    assert_eq!(set_by_guest(&mut guest), [json!([]), json!([]), json!([]), json!([])]);
    assert_eq!((on_host(&api, "vlan"), on_host(&api, "max_tx_rate")[0].clone()), (vec![json!(0); 4], json!(0)));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The program's error. It must fail.
fn refused(guest: &mut Guest, arguments: &str) -> String {
    let Output { status, text } = guest.run_within(&format!("/tmp/tools/vfctl {arguments}"), LIMIT);
    assert_eq!(status, 1, "{arguments}: {text}");
    text.trim_end().to_owned()
}

/// Of VFs whose packets another program carries, a guest can set the link. Other settings are refused with the reason
/// that the host gets.
#[rstest]
#[case::generic_6_12(Kernel::Generic)]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::Backports)]
fn what_a_backend_cannot_enforce_is_refused_to_a_guest(#[case] kernel: Kernel) {
    let backends = Backends::start(&[Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa]);
    let api = Api::new("guest-control-backends");
    let spec = with_programs(backends.spec_with(&format!("tap=pf0,{}", limits()), kernel));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    unpack(&mut guest);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 4);
    let (vfs, taps) = (pf.vfs(&mut guest), backends.taps());
    for vf in &vfs {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }

    vfctl(&mut guest, "set eth0/0 vlan=120 max_tx_rate=100");
    assert_eq!(
        (on_host(&api, "vlan"), on_host(&api, "max_tx_rate")[0].clone()),
        (vec![json!(120), json!(0), json!(0), json!(0)], json!(100))
    );
    for (index, who, key) in [
        (1, "vhost-net carries", "vhost"),
        (2, "another process (vhost_user=on) carries", "vhost_user"),
        (3, "a vDPA device carries", "vdpa"),
    ] {
        for setting in ["vlan=120", "max_tx_rate=100"] {
            let why =
                format!("{who} this function's packets past this program; leave {key} out, or set it on the host");
            let said = refused(&mut guest, &format!("set eth0/{index} {setting}"));
            assert!(said.starts_with(&format!("vfctl: eth0/{index}: {setting}: {why}")), "{said}");
        }
    }
    assert_eq!(on_host(&api, "vlan"), [120, 0, 0, 0]);
    // The host wants a tag now.
    let ping = format!("ping -c 2 -i 0.2 -W 1 -I {} {}", vfs[0].interface(), Subnet(0).host());
    assert_ne!(guest.run(&ping).status, 0);
    vfctl(&mut guest, "reset eth0/0");
    for vf in &vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }

    for (link, up) in [("down", false), ("up", true)] {
        for vf in &vfs {
            vfctl(&mut guest, &format!("set eth0/{} link={link}", vf.index));
            guest.await_carrier(vf.interface(), up);
        }
    }
    for vf in &vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Asserts that the guest's settings are the same, and have the same effect.
fn assert_kept(guest: &mut Guest, api: &Api, tenants: &[Tenant]) {
    assert_eq!(set_by_guest(guest), [json!(["vlan"]), json!(["vlan"]), json!([]), json!([])]);
    assert_eq!(on_host(api, "vlan"), [120, 120, 0, 0]);
    assert_eq!(reachability(guest, tenants), BY_VLAN);
    assert_eq!(refused(guest, "set eth0/2 vlan=300"), "vfctl: eth0/2: vlan=300: the host allows 100-199");
}

/// The settings and the channel are those of the guest, wherever it is.
#[test]
fn what_a_guest_has_set_moves_with_it_and_is_restored() {
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, &[]));
    let mut here = here.boot_over(|tap| on_a_switch(Kernel::Generic, &format!(",tap={tap}")).memory("size=512M"));
    let mut there = there.wait(&[]);
    unpack(&mut here.guest);
    let pf = Pf::at("0000:00:01.0");
    let tenants = Tenant::all(&mut here.guest, &pf, 4);
    for index in [0, 1] {
        vfctl(&mut here.guest, &format!("set eth0/{index} vlan=120"));
    }
    assert_kept(&mut here.guest, &here.api, &tenants);

    here.move_to(&there, &json!({}));
    assert_kept(&mut there.guest, &there.api, &tenants);

    let saved = tempfile::tempdir().unwrap();
    let url = format!("file://{}", saved.path().display());
    assert_eq!(there.api.put("vm.pause").status, 204);
    assert_eq!(there.api.put_json("vm.snapshot", &json!({ "destination_url": url })).status, 204);
    assert_eq!(there.guest.stop_by(libc::SIGKILL).code, None);
    let api = Api::new("guest-control-restored");
    let command = VmmCommand::new().args(["--restore", &format!("source_url={url}"), "--api-socket", &api.argument()]);
    let mut guest = Guest::restored_by(command);
    assert_eq!(api.put("vm.resume").status, 204);
    assert_kept(&mut guest, &api, &tenants);
    vfctl(&mut guest, "reset eth0/0");
    assert_eq!(on_host(&api, "vlan"), [0, 120, 0, 0]);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
