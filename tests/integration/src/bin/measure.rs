//! How long a guest takes to start, and what the VMM keeps in memory besides the guest's.
//!
//! Run by `cargo xtask lab boot-time` in a first-level machine whose clock counts instructions: its figures then depend
//! on no machine and no load. `std`'s clock is that machine's.

#![expect(clippy::unwrap_used, reason = "a measurement that goes wrong ends in a panic that says where")]

use std::fs;

use integration::{Guest, GuestSpec, Image, Kernel, initramfs, kernel_file};

/// The guest's memory in KiB; the mapping of this size is the guest's own.
const GUEST_KIB: u64 = 256 * 1024;

fn main() {
    let runs: usize = std::env::args().nth(1).and_then(|argument| argument.parse().ok()).unwrap_or(3);
    // A clock that counts instructions leaps while the machine waits for its disk: the files must be in memory, and the first
    // start, which reads the rest, does not count.
    for kernel in [Kernel::V6_1, Kernel::V6_12] {
        for file in [kernel_file(kernel, Image::Vmlinux), initramfs(kernel, false)] {
            fs::read(file).unwrap();
        }
    }
    Guest::boot(spec("tap=m0")).power_off();
    let mut times = Vec::new();
    for run in 1..=runs {
        let mut guest = Guest::boot(spec("tap=m0"));
        times.push(guest.boot_time().as_secs_f64());
        println!("start {run}: {:.3} s from exec to the guest's init", guest.boot_time().as_secs_f64());
        if run == 1 {
            println!("resident without guest memory, 1 NIC: {:.2} MB", resident(&mut guest));
        }
        guest.power_off();
    }
    times.sort_by(f64::total_cmp);
    println!(
        "median of {runs}: {:.3} s (1 vCPU, 256 MiB, one tap NIC, Debian 6.1 cloud kernel as vmlinux)",
        times[runs / 2]
    );
    let mut guest = Guest::boot(spec("id=pf0,tap=m0,sriov_vfs=8"));
    println!("start with 8 reserved VFs: {:.3} s", guest.boot_time().as_secs_f64());
    println!("resident without guest memory, 1 NIC with 8 reserved VFs: {:.2} MB", resident(&mut guest));
    guest.power_off();
    for num_vfs in [7, 64] {
        measure_vfs(num_vfs);
    }
}

/// How long Linux 6.12 takes to enable and bind VFs, and to disable them, by its own clock.
fn measure_vfs(num_vfs: u32) {
    let net = format!("id=pf0,tap=m0,sriov_vfs={num_vfs}");
    let spec = GuestSpec::new(Kernel::V6_12).kernel_argument("tsc=reliable").memory("size=512M").net(&net);
    let mut guest = Guest::boot(spec);
    let mut timed = |value: u32| {
        let command = format!(
            "now() {{ sed -n 's/^now at \\([0-9]*\\) nsecs/\\1/p' /proc/timer_list; }}; a=$(now); \
             echo {value} > /sys/bus/pci/devices/0000:00:01.0/sriov_numvfs; b=$(now); echo $(( (b - a) / 1000 ))"
        );
        guest.run(&command).text.trim().parse::<f64>().unwrap() / 1000.0
    };
    let (enable, disable) = (timed(num_vfs), timed(0));
    let per_vf = |ms: f64, sleep: f64| (ms - sleep) / f64::from(num_vfs);
    println!(
        "{num_vfs} VFs: enabled and bound in {enable:.0} ms ({:.2} ms a VF beyond Linux's sleep of 100 ms), disabled in \
         {disable:.0} ms ({:.2} ms a VF beyond its 1,000 ms)",
        per_vf(enable, 100.0),
        per_vf(disable, 1000.0)
    );
    guest.power_off();
}

fn spec(net: &str) -> GuestSpec {
    // Where the clock counts instructions, Linux would distrust it: its own checks compare it with nothing else.
    GuestSpec::new(Kernel::V6_1).kernel_argument("tsc=reliable").net(net)
}

/// The sum of `Rss` over all mappings in `/proc/<pid>/smaps` but those that are as large as the guest's memory, in MB.
fn resident(guest: &mut Guest) -> f64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.vmm().id())).unwrap();
    let (mut size, mut total) = (0, 0);
    for line in smaps.lines() {
        let kib = |key: &str| -> Option<u64> { line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse().ok() };
        if let Some(value) = kib("Size:") {
            size = value;
        }
        if let Some(value) = kib("Rss:")
            && size < GUEST_KIB
        {
            total += value;
        }
    }
    total as f64 * 1024.0 / 1e6
}
