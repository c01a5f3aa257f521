//! Measures how long a guest takes to boot and to enable VFs, how many VM exits that causes, and how much memory the
//! VMM itself uses.
//!
//! Run by `cargo xtask lab boot-time` in a first-level machine whose clock counts instructions: the figures depend on
//! no other machine and no load. `std`'s clock is that machine's. Arguments: the number of runs, and optionally the
//! only number of VFs to measure, or 0 to measure starts only.

#![expect(clippy::unwrap_used, reason = "a failed measurement panics and says where")]

use std::time::Duration;

use integration::{Guest, GuestSpec, Kernel, KvmExits, KvmTrace, Pf, predicted_vf_address, read_into_memory, resident};

/// The guest's memory in KiB when boots are measured.
const GUEST_KIB: u64 = 256 * 1024;
/// The numbers of VFs to measure.
const VFS: [usize; 3] = [7, 64, 255];
/// Most VFs that can have a driver: a vCPU has some 200 interrupt vectors, and a VF needs three. More vCPUs would not
/// help, since the machine has one processor and the clock would count their waiting for each other.
const MOST_BOUND: usize = 64;
/// Time that Linux sleeps after it has set VF Enable, and after it has cleared it, in ms (`PCIe 6.2 §9.3.3.3.1`).
const SLEEPS: (f64, f64) = (100.0, 1000.0);

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().unwrap());
    let (runs, only) = (arguments.next().unwrap_or(3), arguments.next());
    read_into_memory(Kernel::V6_1);
    read_into_memory(Kernel::V6_12);
    if only.is_none_or(|only| only == 0) {
        measure_starts(runs);
    }
    for vfs in VFS.into_iter().filter(|vfs| only.is_none_or(|only| only == *vfs)) {
        let (mut guest, pf) = boot_with_vfs(vfs);
        measure_steps(&mut guest, &pf, vfs, runs);
        if vfs <= MOST_BOUND {
            measure_vfs(&mut guest, &pf, vfs, runs);
        }
        guest.power_off();
    }
}

/// Measures how long a guest takes to start its init, and the VMM's resident memory then.
fn measure_starts(runs: usize) {
    // The first boot only fills the page cache.
    Guest::boot(spec("tap=m0")).power_off();
    for (what, net) in [
        ("1 NIC", "tap=m0"),
        ("8 reserved VFs", "id=pf0,tap=m0,sriov_vfs=8"),
        ("1024 reserved VFs", "id=pf0,tap=m0,sriov_vfs=1024"),
    ] {
        let mut memory = 0.0;
        let mut start = || {
            let guest = Guest::boot(spec(net));
            memory = resident(guest.vmm(), GUEST_KIB);
            let time = guest.boot_time().as_secs_f64();
            guest.power_off();
            time
        };
        let times = Times::new((0..runs).map(|_| start()).collect());
        println!("{what}: {times} s from exec to the guest's init; resident without guest memory {memory:.2} MB");
    }
}

fn boot_with_vfs(vfs: usize) -> (Guest, Pf) {
    let net = format!("id=pf0,tap=m0,sriov_vfs={vfs}");
    let memory = format!("size={}M", 512 + 4 * vfs);
    let spec = GuestSpec::new(Kernel::V6_12).kernel_argument("tsc=reliable").memory(&memory).net(&net);
    let mut guest = Guest::boot(spec);
    println!("{vfs} VFs reserved: the guest is up after {:.3} s", guest.boot_time().as_secs_f64());
    let pf = Pf::find(&mut guest);
    (guest, pf)
}

/// Measures how long Linux takes to enable and bind VFs and to disable them, by the guest's clock, and how many exits
/// that causes with configuration space as memory and without.
fn measure_vfs(guest: &mut Guest, pf: &Pf, vfs: usize, runs: usize) {
    let (enable, disable): (Vec<_>, Vec<_>) = (0..runs)
        .map(|_| {
            let enable = set_num_vfs(guest, pf, vfs);
            assert_eq!(pf.vfs(guest).iter().filter(|vf| vf.interface.is_some()).count(), vfs, "VFs that have a netdev");
            (enable, set_num_vfs(guest, pf, 0))
        })
        .unzip();
    for (what, times, sleep) in
        [("enabled and bound", Times::new(enable), SLEEPS.0), ("disabled", Times::new(disable), SLEEPS.1)]
    {
        let per_vf = (times.median() - sleep) / vfs as f64;
        println!("{vfs} VFs {what}: {times} ms; {per_vf:.2} ms a VF beyond Linux's sleep of {sleep} ms");
    }
    let mut trace = KvmTrace::start();
    print_exits("configuration space as memory", guest, &mut trace, pf, vfs);
    open_config_window(guest, pf);
    print_exits("configuration space by exits", guest, &mut trace, pf, vfs);
}

/// Measures each step by itself: enabling VFs without drivers, binding as many as possible by hand, unbinding them,
/// and disabling all.
fn measure_steps(guest: &mut Guest, pf: &Pf, vfs: usize, runs: usize) {
    let bound = vfs.min(MOST_BOUND);
    let addresses: Vec<_> = (0..bound).map(predicted_vf_address).collect();
    let write_each = |file: &str| {
        let addresses = addresses.join(" ");
        format!("for vf in {addresses}; do echo $vf > /sys/bus/pci/drivers/virtio-pci/{file}; done")
    };
    let mut steps = [
        ("enabled without drivers", vfs, SLEEPS.0, Vec::new()),
        ("bound", bound, 0.0, Vec::new()),
        ("unbound", bound, 0.0, Vec::new()),
        ("disabled without drivers", vfs, SLEEPS.1, Vec::new()),
    ];
    let autoprobe = pf.file("sriov_drivers_autoprobe");
    for _ in 0..runs {
        guest.ok(&format!("echo 0 > {autoprobe}"));
        let enable = set_num_vfs(guest, pf, vfs);
        guest.ok(&format!("echo 1 > {autoprobe}"));
        let (bind, unbind) = (timed(guest, &write_each("bind")), timed(guest, &write_each("unbind")));
        let times = [enable, bind, unbind, set_num_vfs(guest, pf, 0)];
        steps.iter_mut().zip(times).for_each(|((.., all), time)| all.push(time));
    }
    for (what, count, sleep, times) in steps {
        let times = Times::new(times);
        let per_vf = (times.median() - sleep) / count as f64;
        println!("of {vfs} VFs {count} {what}: {times} ms; {per_vf:.2} ms a VF beyond Linux's sleep of {sleep} ms");
    }
}

/// Counts the exits while VFs are enabled and bound, and disables them again.
fn print_exits(what: &str, guest: &mut Guest, trace: &mut KvmTrace, pf: &Pf, vfs: usize) {
    let (exits, events) = (KvmExits::now(), trace.events());
    set_num_vfs(guest, pf, vfs);
    let (exits, enabled) = (KvmExits::now() - exits, trace.events());
    set_num_vfs(guest, pf, 0);
    let disabled = trace.events() - enabled;
    let enabled = enabled - events;
    let per_vf = |count: u64| count as f64 / vfs as f64;
    println!(
        "{vfs} VFs enabled, {what}: exits a VF {:.0}, of which MMIO {:.0}; configuration reads {:.1}, writes {:.1}",
        per_vf(exits.all),
        per_vf(exits.mmio),
        per_vf(enabled.config_reads),
        per_vf(enabled.config_writes)
    );
    for (what, calls) in [("enabled", enabled), ("disabled", disabled)] {
        println!(
            "{vfs} VFs {what}: system calls a VF: routes {:.2}, irqfds {:.2}, ioeventfds {:.2}",
            per_vf(calls.route_calls),
            per_vf(calls.irqfd_calls),
            per_vf(calls.ioeventfd_calls)
        );
    }
}

/// Starts an access through the PF's `pci_cfg_data` (`virtio 1.4 §4.1.4.9`). While it is set up, the configuration
/// space of the PF and its VFs is not memory, so each read of it causes an exit.
fn open_config_window(guest: &mut Guest, pf: &Pf) {
    const CAPABILITIES: usize = 0x34;
    const VENDOR: u8 = 9;
    const PCI_CFG: u8 = 5;
    let config = pf.file("config");
    let bytes = guest.ok(&format!("od -An -v -tx1 {config}"));
    let bytes: Vec<u8> = bytes.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    let mut at = usize::from(bytes[CAPABILITIES]);
    while (bytes[at], bytes[at + 3]) != (VENDOR, PCI_CFG) {
        at = usize::from(bytes[at + 1]);
        assert_ne!(at, 0, "the PF has no VIRTIO_PCI_CAP_PCI_CFG");
    }
    // Length 4 at offset 0 of BAR 0.
    guest.ok(&format!("printf '\\004' | dd of={config} bs=1 seek={} conv=notrunc", at + 12));
}

/// Writes `value` to `sriov_numvfs`. Returns how many ms that took by the guest's clock.
fn set_num_vfs(guest: &mut Guest, pf: &Pf, value: usize) -> f64 {
    timed(guest, &format!("echo {value} > {}", pf.file("sriov_numvfs")))
}

/// Runs `command`. Returns how many ms that took by the guest's clock.
fn timed(guest: &mut Guest, command: &str) -> f64 {
    let command = format!(
        "now() {{ sed -n 's/^now at \\([0-9]*\\) nsecs/\\1/p' /proc/timer_list; }}; a=$(now); {command}; b=$(now); \
         echo $(( (b - a) / 1000 ))"
    );
    guest.ok_within(&command, Duration::from_secs(300)).trim().parse::<f64>().unwrap() / 1000.0
}

/// The durations of repeated runs, in ascending order.
struct Times(Vec<f64>);

impl Times {
    fn new(mut times: Vec<f64>) -> Times {
        times.sort_by(f64::total_cmp);
        Times(times)
    }

    fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (least, most) = (self.0[0], self.0[self.0.len() - 1]);
        let digits = if most < 10.0 { 3 } else { 1 };
        write!(f, "{:.digits$} (median of {}, {least:.digits$} to {most:.digits$})", self.median(), self.0.len())
    }
}

fn spec(net: &str) -> GuestSpec {
    // Under a clock that counts instructions, Linux would distrust the TSC, as it can compare it with nothing else.
    GuestSpec::new(Kernel::V6_1).kernel_argument("tsc=reliable").net(net)
}
