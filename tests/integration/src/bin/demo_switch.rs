//! The demonstration of a switch: two tenants with two VFs each reach their own VF and not the other tenant's, under a
//! VMM without any privilege.
//!
//! `cargo xtask demo switch` runs it, and provides the kernel and a working KVM.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use integration::{Api, DeviceMode, Guest, GuestSpec, Kernel, Pf, Tenant, reachability, vf_mac};
use serde_json::json;

/// The user `nobody`.
const NOBODY: u32 = 65534;
/// An address that the host gave to no function.
const STRANGER: &str = "52:54:00:99:99:99";
/// The VLANs of the VFs: A and B are one tenant's, C and D another's.
const VLANS: [u16; 4] = [100, 100, 200, 200];
const NAMES: [&str; 4] = ["A", "B", "C", "D"];
const NET: &str = "id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=4";

fn main() {
    let api = Api::new("demo-switch");
    let vfs: Vec<_> = VLANS.iter().enumerate().map(|(index, vlan)| vf(index, *vlan)).collect();
    println!(
        "\n$ id -u; cloud-hypervisor --kernel vmlinux --initramfs … --net {NET} \\\n    --net-vf {}",
        vfs.join(" ")
    );
    let spec = vfs.iter().fold(GuestSpec::new(Kernel::V6_12).net(NET), |spec, vf| spec.net_vf(vf));
    let spec = spec.arguments(&["--api-socket", &api.argument()]);
    let is_root = is_root();
    let _kvm = is_root.then(|| DeviceMode::set("/dev/kvm", 0o666));
    let mut guest = Guest::boot(if is_root { spec.user(NOBODY) } else { spec });
    println!("A Debian guest is up after {:.1} s: Linux {}", guest.boot_time().as_secs_f64(), guest.ok("uname -r"));
    println!("\nThe VMM is user {} with the capabilities {}", status(&guest, "Uid:"), status(&guest, "CapEff:"));

    let pf = Pf::find(&mut guest);
    println!("\nguest# echo {} > {}", VLANS.len(), pf.file("sriov_numvfs"));
    let tenants = Tenant::all(&mut guest, &pf, VLANS.len());
    let rows = reachability(&mut guest, &tenants);
    println!("\n{:5}{:6}{:19}{:11}reaches A B C D", "VF", "VLAN", "MAC", "IP");
    for (tenant, row) in tenants.iter().zip(&rows) {
        let index = tenant.index();
        let reaches = row.chars().map(|cell| format!("{cell} ")).collect::<String>();
        println!("{:5}{:<6}{:19}{:19}{}", NAMES[index], VLANS[index], vf_mac(index), tenant.address(), reaches.trim());
    }

    let spoofed = spoof(&mut guest, &tenants[0], &tenants[1], &api);
    println!("\nA sends from {STRANGER}: tx_spoofed_mac={spoofed}; B has seen none of it");
    guest.assert_kernel_has_no_complaint();

    println!("\nguest# poweroff");
    let exit = guest.power_off();
    println!("The VMM ended with exit code {}", exit.code.map_or("none".into(), |code| code.to_string()));
    if rows != [".+--", "+.--", "--.+", "--+."] || spoofed == 0 || exit.code != Some(0) {
        std::process::exit(1);
    }
}

/// The value of `--net-vf`.
fn vf(index: usize, vlan: u16) -> String {
    format!("pf=pf0,index={index},mac={},vlan={vlan}", vf_mac(index))
}

/// Gives `from` an address other than the host's, as a driver could without a request. Returns the number of its frames
/// that were dropped because of that; 0 if `to` has received one.
fn spoof(guest: &mut Guest, from: &Tenant, to: &Tenant, api: &Api) -> u64 {
    let set = |change: serde_json::Value| {
        let mut body = change;
        (body["pf"], body["index"]) = (json!("pf0"), json!(from.index()));
        api.put_json("vm.set-vf", &body);
    };
    let counter = |vf: &Tenant, name: &str| {
        api.get("vm.counters").body[format!("pf0v{}", vf.index())][name].as_u64().unwrap_or_default()
    };
    set(json!({"trust": true, "spoofchk": false}));
    from.change_address(guest, STRANGER);
    set(json!({"trust": false, "spoofchk": true}));
    let (before, seen) = (counter(from, "tx_spoofed_mac"), counter(to, "rx_frames"));
    from.reaches(guest, &to.address());
    let spoofed = counter(from, "tx_spoofed_mac") - before;
    if counter(to, "rx_frames") == seen { spoofed } else { 0 }
}

/// True if this runs as root. The VMM then runs as the user `nobody`.
fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|this| this.uid() == 0)
}

/// A field of the VMM's status.
fn status(guest: &Guest, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.vmm().id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.split_whitespace().next().unwrap_or("?").to_string()
}
