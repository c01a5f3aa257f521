//! The demonstration: a guest enables the 8 VFs of its NIC, and each carries traffic over a tap of its own.
//!
//! Run by `cargo xtask demo`, which provides a KVM that works and the kernels.

use std::time::Instant;

use integration::{Guest, GuestSpec, HostTap, Kernel, Pf, Subnet, Vf};

const VFS: usize = 8;
const NET: &str = "id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=8";

fn main() {
    println!("\n$ cloud-hypervisor --kernel vmlinux --initramfs … --cpus boot=1 --memory size=256M --net {NET}");
    let mut guest = Guest::boot(GuestSpec::new(Kernel::V6_12).with_lspci().net(NET));
    println!("A Debian guest is up after {:.1} s: Linux {}", guest.boot_time().as_secs_f64(), guest.ok("uname -r"));
    let pf = Pf::find(&mut guest);

    println!("\nguest# echo {VFS} > {}", pf.file("sriov_numvfs"));
    let started = Instant::now();
    pf.set_num_vfs(&mut guest, VFS);
    println!("(done in {:.1} s)", started.elapsed().as_secs_f64());
    println!("\nguest# lspci -tv\n{}", guest.ok("lspci -tv"));

    println!("\n{:4}{:14}{:19}{:11}{:9}ping", "VF", "address", "MAC", "netdev", "tap");
    let taps: Vec<HostTap> = (0..VFS).map(|index| HostTap::existing(&format!("pf0v{index}"))).collect();
    let pinged = ping_all(&mut guest, &pf, &taps);

    println!("\nguest# echo 0 > {}", pf.file("sriov_numvfs"));
    pf.set_num_vfs(&mut guest, 0);
    println!("{} VFs left", pf.vfs(&mut guest).len());
    println!("\nguest# echo {VFS} > {}    # again", pf.file("sriov_numvfs"));
    pf.set_num_vfs(&mut guest, VFS);
    let again = ping_all(&mut guest, &pf, &taps);
    guest.assert_kernel_has_no_complaint();

    println!("\nguest# poweroff");
    let exit = guest.power_off();
    println!("The VMM ended with exit code {}", exit.code.map_or("none".into(), |code| code.to_string()));
    println!("\n{pinged} of {VFS} VFs pinged, {again} of {VFS} after they were disabled and enabled again");
    if (pinged, again, exit.code) != (VFS, VFS, Some(0)) {
        std::process::exit(1);
    }
}

/// Pings through each VF, which must use its own tap and none other, and prints a line for each.
fn ping_all(guest: &mut Guest, pf: &Pf, taps: &[HostTap]) -> usize {
    let vfs = pf.vfs(guest);
    for vf in &vfs {
        let subnet = Subnet(vf.index as u8);
        vf.ping_through(guest, taps, vf.index, subnet);
        let times = guest.ping(vf.interface(), subnet);
        let Vf { index, address, mac, .. } = vf;
        println!("{index:<4}{address:14}{mac:19}{:11}{:9}{}", vf.interface(), taps[*index].name(), round_trip(&times));
    }
    vfs.len()
}

/// The shortest round trip in what `ping` printed.
fn round_trip(ping: &str) -> String {
    let summary = ping.lines().find(|line| line.starts_with("round-trip"));
    let shortest = summary.and_then(|line| line.split(" = ").nth(1)).and_then(|times| times.split('/').next());
    shortest.map_or_else(|| "?".into(), |time| format!("{time} ms"))
}
