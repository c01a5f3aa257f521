//! A switch between a PF and its VFs in Linux guests: each VF is in its own network namespace, so that packets between
//! them leave the kernel.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use integration::{
    Api, DeviceMode, Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Tenant, Usage, interface_exists, reachability,
    repetitions, resident, vf_mac,
};
use rstest::rstest;
use serde_json::{Value, json};

/// An address that the host gave to no function.
const STRANGER: &str = "52:54:00:99:99:99";
/// A user without any rights.
const NOBODY: u32 = 65534;
/// The VLANs of VF 0 and 1, and of VF 2 and 3.
const VLANS: [u16; 4] = [100, 100, 200, 200];

fn counter(api: &Api, function: &str, name: &str) -> u64 {
    let counters = api.get("vm.counters").body;
    counters[function][name].as_u64().unwrap_or_else(|| panic!("no {name} of {function}: {counters}"))
}

fn set(api: &Api, index: usize, change: &Value) {
    let mut body = change.clone();
    (body["pf"], body["index"]) = (json!("pf0"), json!(index));
    assert_eq!(api.put_json("vm.set-vf", &body).status, 204, "{change}");
}

/// A guest with four VFs on a switch without an uplink, in two VLANs. Its VMM has no privilege.
fn boot(kernel: Kernel, api: &Api) -> Guest {
    let spec = GuestSpec::new(kernel).net("id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=4");
    let spec = VLANS.iter().enumerate().fold(spec, |spec, (index, vlan)| {
        spec.net_vf(&format!("pf=pf0,index={index},mac={},vlan={vlan}", vf_mac(index)))
    });
    Guest::boot(spec.user(NOBODY).arguments(&["--api-socket", &api.argument()]))
}

/// A frame from an address that is not the VF's is counted, and no other VF sees one.
fn assert_spoofed_frames_are_dropped(guest: &mut Guest, tenants: &[Tenant], api: &Api) {
    assert!(!tenants[2].change_address(guest, STRANGER), "the address was given");
    set(api, 2, &json!({"trust": true, "spoofchk": false}));
    assert!(tenants[2].change_address(guest, STRANGER));
    set(api, 2, &json!({"trust": false, "spoofchk": true}));
    let (spoofed, received) = (counter(api, "pf0v2", "tx_spoofed_mac"), counter(api, "pf0v3", "rx_frames"));
    assert!(!tenants[2].reaches(guest, &tenants[3].address()));
    assert!(counter(api, "pf0v2", "tx_spoofed_mac") > spoofed);
    assert_eq!(counter(api, "pf0v3", "rx_frames"), received);
    assert!(tenants[2].change_address(guest, &vf_mac(2)), "the one that was given");
    assert!(tenants[2].reaches(guest, &tenants[3].address()));
}

const BY_VLAN: [&str; 4] = [".+--", "+.--", "--.+", "--+."];

/// G60: MAC addresses and frames between VFs, according to a policy.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::Backports)]
fn tenants_of_a_closed_switch_reach_their_own_vlan_only(#[case] kernel: Kernel) {
    let _kvm = DeviceMode::set("/dev/kvm", 0o666);
    let api = Api::new("switch");
    let mut guest = boot(kernel, &api);
    assert!(!interface_exists("pf0") && !interface_exists("pf0v0"), "the host has no tap of it");
    let pf = Pf::at("0000:00:01.0");
    let first = Tenant::all(&mut guest, &pf, 4);
    assert_eq!(reachability(&mut guest, &first), BY_VLAN);
    assert_spoofed_frames_are_dropped(&mut guest, &first, &api);
    first.into_iter().for_each(|tenant| tenant.end(&mut guest));

    // The policy also applies to new VFs and after a reboot.
    pf.set_num_vfs(&mut guest, 0);
    let second = Tenant::all(&mut guest, &pf, 4);
    assert_eq!(reachability(&mut guest, &second), BY_VLAN);
    guest.reboot();
    let third = Tenant::all(&mut guest, &pf, 4);
    assert_eq!(reachability(&mut guest, &third), BY_VLAN);

    // The host's changes apply at once, and only to that VF.
    set(&api, 2, &json!({"vlan": 100}));
    assert_eq!(reachability(&mut guest, &third), [".++-", "+.+-", "++.-", "---."]);
    set(&api, 2, &json!({"isolated": true}));
    assert_eq!(reachability(&mut guest, &third), [".+--", "+.--", "--.-", "---."]);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Each of eight VFs reaches each other, without a tap and without any privilege of the VMM.
#[test]
#[ignore = "a longer test: of more VFs"]
fn eight_vfs_on_an_unprivileged_closed_switch_reach_each_other() {
    let _kvm = DeviceMode::set("/dev/kvm", 0o666);
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=8");
    let mut guest = Guest::boot(spec.user(NOBODY));
    let tenants = Tenant::all(&mut guest, &Pf::at("0000:00:01.0"), 8);
    let expected: Vec<_> = (0..8).map(|own| "+".repeat(own) + "." + &"+".repeat(7 - own)).collect();
    assert_eq!(reachability(&mut guest, &tenants), expected);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// The addresses of the PF and of the uplink, in addition to those of tenants.
const PF: &str = "10.88.0.100";
const UPLINK: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 200);

/// Reachability between the PF, three VFs and the uplink: a row for each, as in [`reachability`].
fn matrix(guest: &mut Guest, interface: &str, tenants: &[Tenant], tap: &HostTap) -> Vec<String> {
    let uplink = UPLINK.to_string();
    let addresses: Vec<_> =
        std::iter::once(PF.to_string()).chain(tenants.iter().map(Tenant::address)).chain([uplink]).collect();
    let mut reaches = |from: usize, to: usize| match (from.checked_sub(1).map(|vf| tenants.get(vf)), &addresses[to]) {
        (None, to) => guest.run(&format!("ping -c 3 -i 0.3 -W 2 -I {interface} {to}")).status == 0,
        (Some(Some(tenant)), to) => tenant.reaches(guest, to),
        (Some(None), to) => tap.reaches(to),
    };
    let mut row = |from: usize| {
        let cell = |to| {
            if from == to {
                '.'
            } else if reaches(from, to) {
                '+'
            } else {
                '-'
            }
        };
        (0..addresses.len()).map(cell).collect::<String>()
    };
    // The uplink first: the host caches the addresses of others once they have sent ARP requests.
    let last = row(addresses.len() - 1);
    (0..addresses.len() - 1).map(row).chain([last]).collect()
}

/// The PF, three VFs and the uplink, each to each: with broadcasts, which find the address, and with unicast.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::Backports)]
fn switch_ports_reach_what_mode_and_isolation_allow(#[case] kernel: Kernel) {
    for (mode, expected) in [
        ("veb", [".++++", "+.+++", "++.++", "+++.+", "++++."]),
        // No device behind the uplink sends frames back.
        ("vepa", [".---+", "-.--+", "--.-+", "---.+", "++++."]),
    ] {
        let api = Api::new("switch-matrix");
        let net = format!("id=pf0,switch={mode},tap=up0,mac=52:54:00:00:00:01,sriov_vfs=3");
        let spec = (0..3).fold(GuestSpec::new(kernel).net(&net), |spec, index| {
            spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index)))
        });
        let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
        let (pf, tap) = (Pf::at("0000:00:01.0"), HostTap::existing("up0"));
        tap.join_at(UPLINK);
        let tenants = Tenant::all(&mut guest, &pf, 3);
        let interface = guest.ok(&format!("ls {}", pf.file("virtio*/net"))).trim().to_string();
        guest.ok(&format!("ip addr add {PF}/24 dev {interface} && ip link set {interface} up"));
        assert_eq!(matrix(&mut guest, &interface, &tenants, &tap), expected, "{mode}");
        if mode == "veb" {
            [1, 2].iter().for_each(|index| set(&api, *index, &json!({"isolated": true})));
            let isolated = [".++++", "+.--+", "+-.-+", "+--.+", "++++."];
            assert_eq!(matrix(&mut guest, &interface, &tenants, &tap), isolated);
        }
        guest.assert_kernel_has_no_complaint();
        assert_eq!(guest.power_off().code, Some(0));
    }
}

/// The tap of the PF is the switch's uplink, and no function's own.
#[test]
fn vfs_reach_the_host_over_the_uplink_and_each_other_without_it() {
    let api = Api::new("switch-uplink");
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,switch=veb,tap=up0,mac=52:54:00:00:00:01,sriov_vfs=3");
    let spec = (0..3).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index))));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    let (pf, tap) = (Pf::at("0000:00:01.0"), HostTap::existing("up0"));
    assert!(!interface_exists("up0v0"), "the VFs have no taps");
    tap.join(Subnet(0));
    pf.set_num_vfs(&mut guest, 3);
    let vfs = pf.vfs(&mut guest);
    guest.join(vfs[0].interface(), Subnet(0));
    guest.ping(vfs[0].interface(), Subnet(0));
    let [one, two] = [1, 2].map(|index| Tenant::with(&mut guest, &vfs[index]));
    // The first ping finds the address with a broadcast, which the uplink gets as well.
    assert!(one.reaches(&mut guest, &two.address()));
    let before = (tap.counters().from_guest, counter(&api, "pf0v2", "rx_frames"));
    assert!(one.reaches(&mut guest, &two.address()));
    assert_eq!(tap.counters().from_guest, before.0);
    assert!(counter(&api, "pf0v2", "rx_frames") >= before.1 + 3);
    assert!(counter(&api, "__uplink_pf0", "rx_frames") > 0);
    // An isolated VF reaches the host, but no other VF.
    set(&api, 0, &json!({"isolated": true}));
    guest.ping(vfs[0].interface(), Subnet(0));
    set(&api, 1, &json!({"isolated": true}));
    assert!(!one.reaches(&mut guest, &two.address()));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Time that a transfer in a guest may take.
const TRANSFER: Duration = Duration::from_secs(120);
/// The VLAN of both VFs in the test of offloads, and its interface on the host.
const PORT_VLAN: u16 = 5;
/// Bits of the features that a driver has negotiated: GUEST_CSUM and GUEST_TSO4.
const TAKEN: [usize; 2] = [1, 7];

/// Sends the guest's file `/tmp/out` from the tenant to the host and back, over two connections.
fn there_and_back(guest: &mut Guest, tenant: &Tenant, len: usize) {
    let listener = TcpListener::bind((UPLINK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let host = thread::spawn(move || {
        let mut data = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut data).unwrap();
        let (mut back, _) = listener.accept().unwrap();
        back.write_all(&data).unwrap();
        back.shutdown(Shutdown::Write).unwrap();
        let _ = back.read(&mut [0]);
        data.len()
    });
    tenant.ok_within(guest, &format!("nc {UPLINK} {port} < /tmp/out"), TRANSFER);
    tenant.ok_within(guest, &format!("nc {UPLINK} {port} 0<> /tmp/endless > /tmp/in"), TRANSFER);
    assert_eq!(host.join().unwrap(), len);
    guest.ok("cmp /tmp/out /tmp/in && rm /tmp/in");
}

/// VF 0 offloads segmentation and checksums to the device, VF 1 does and accepts neither. The tag of their VLAN is
/// inserted before the place that the sender's header points to, and removed; the host sees it.
#[test]
fn streams_arrive_valid_without_offloads_and_across_a_port_vlan() {
    let api = Api::new("switch-offloads");
    let net = "id=pf0,switch=veb,tap=up0,mac=52:54:00:00:00:01,sriov_vfs=2";
    let vf = |index| format!("pf=pf0,index={index},mac={},vlan={PORT_VLAN}", vf_mac(index));
    let plain = format!("{},offload_csum=off,offload_tso=off,offload_ufo=off", vf(1));
    let spec = GuestSpec::new(Kernel::V6_12).net(net).net_vf(&vf(0)).net_vf(&plain);
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    let (pf, tap) = (Pf::at("0000:00:01.0"), HostTap::existing("up0"));
    let tagged = format!("{}.{PORT_VLAN}", tap.name());
    tap.join_at(Ipv4Addr::new(10, 89, 0, 1));
    for command in [
        format!("link add link {} name {tagged} type vlan id {PORT_VLAN}", tap.name()),
        format!("addr add {UPLINK}/24 dev {tagged}"),
        format!("link set {tagged} up"),
    ] {
        assert!(Command::new("ip").args(command.split(' ')).status().unwrap().success(), "ip {command}");
    }
    let tenants = Tenant::all(&mut guest, &pf, 2);
    for (index, takes) in [(0, "1"), (1, "0")] {
        let features = guest.ok(&format!("cat {}", pf.file(&format!("virtfn{index}/virtio*/features"))));
        assert!(TAKEN.iter().all(|bit| features.trim().get(*bit..=*bit) == Some(takes)), "VF {index}: {features}");
    }
    let len = 4 << 20;
    guest.ok("mkfifo /tmp/endless");
    guest.ok_within("dd if=/dev/urandom of=/tmp/out bs=64k count=64 2> /dev/null", TRANSFER);
    for (from, to) in [(0, 1), (1, 0)] {
        tenants[to].listen(&mut guest, 7000, "/tmp/in");
        tenants[from].ok_within(&mut guest, &format!("nc {} 7000 < /tmp/out", tenants[to].address()), TRANSFER);
        guest.ok("cmp /tmp/out /tmp/in && rm /tmp/in");
    }
    let segmented = |api: &Api| counter(api, "pf0v1", "sw_segmented");
    let of_vf = segmented(&api);
    assert!(of_vf > 10 && counter(&api, "pf0v1", "sw_checksummed") > 0, "{of_vf} segments of VF 0");
    there_and_back(&mut guest, &tenants[1], len);
    assert!(segmented(&api) > of_vf, "segments of the host");
    there_and_back(&mut guest, &tenants[0], len);
    assert_eq!(counter(&api, "pf0v0", "sw_segmented"), 0, "it takes them as they are");
    for tenant in &tenants {
        assert_eq!(tenant.wrong_checksums(&mut guest), 0, "VF {}", tenant.index());
    }
    assert_eq!(["rx_bad_offloads", "tx_bad_headers"].map(|name| counter(&api, "pf0v1", name)), [0, 0]);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

/// Number of times that VFs are enabled and disabled: a few, as each takes ten seconds on a busy machine, or the number
/// in the environment.
fn cycles() -> usize {
    repetitions("CH_SWITCH_CYCLES", 10)
}

/// Resources that must not grow from cycle to cycle: files and threads of the VMM, and its own memory in MB.
fn used(guest: &Guest) -> (Usage, f64) {
    (Usage::of(guest.vmm()), resident(guest.vmm(), 256 << 10))
}

/// The VFs are disabled while packets pass in both directions.
#[test]
fn switch_vfs_enabled_and_disabled_under_load_leak_nothing() {
    let api = Api::new("switch-cycles");
    let spec = GuestSpec::new(Kernel::V6_12).net("id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=2");
    let spec = (0..2).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index))));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::at("0000:00:01.0");
    let mut all = Vec::new();
    for cycle in 1..=cycles() {
        let tenants = Tenant::all(&mut guest, &pf, 2);
        assert!(tenants[0].reaches(&mut guest, &tenants[1].address()), "cycle {cycle}");
        let running = used(&guest).0;
        let before = [0, 1].map(|index| counter(&api, &format!("pf0v{index}"), "rx_frames"));
        tenants[0].flood(&mut guest, &tenants[1].address());
        tenants[1].flood(&mut guest, &tenants[0].address());
        let began = Instant::now();
        while (0..2).any(|index| counter(&api, &format!("pf0v{index}"), "rx_frames") < before[index] + 200) {
            assert!(began.elapsed() < Duration::from_secs(60), "cycle {cycle}: no load");
        }
        pf.set_num_vfs(&mut guest, 0);
        tenants.into_iter().for_each(|tenant| tenant.end(&mut guest));
        let (usage, memory) = used(&guest);
        println!("cycle {cycle}: {running:?} with VFs, {usage:?} without, {memory:.2} MB");
        all.push((running, usage, memory));
    }
    let (running, usage, memory) = all[0];
    assert!(all.iter().all(|other| (other.0, other.1) == (running, usage)), "{all:?}");
    assert!(all.iter().all(|other| other.2 < memory + 0.5), "the VMM's own memory grew: {all:?}");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
