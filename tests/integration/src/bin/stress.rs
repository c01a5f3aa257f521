//! Enables and disables VFs many times, with drivers bound and traffic flowing. The VMM's host resources and KVM
//! objects must be the same after the last cycle as after the first.
//!
//! Run by `cargo xtask lab stress` in a first-level machine. Arguments: the numbers of VFs, cycles, vCPUs and MiB of
//! guest memory.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed measurement panics and says where")]

use std::thread;
use std::time::{Duration, Instant};

use integration::{
    ArpTraffic, Guest, GuestSpec, HostTap, Kernel, KvmTrace, Pf, Sample, Subnet, read_into_memory, resident,
};

/// The PF's subnet. VF i has subnet i.
const PF_SUBNET: Subnet = Subnet(255);
/// Time that the guest may take to enable 255 VFs, bring them up or disable them on a busy machine.
const COMMAND_LIMIT: Duration = Duration::from_secs(600);
/// Time until each VF must have passed a frame in both directions.
const TRAFFIC_LIMIT: Duration = Duration::from_secs(300);
/// The pause between two frames into one VF's tap, and the shortest pause between frames into any tap.
const FRAME_PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(4));
/// Cycles between two lines of the report.
const REPORT: usize = 10;

/// The duration of each step of a cycle, by the machine's own clock.
struct Stopwatch {
    last: Instant,
    laps: Vec<String>,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        Stopwatch { last: Instant::now(), laps: Vec::new() }
    }

    fn lap(&mut self, name: &str) {
        self.laps.push(format!("{name} {:.1} s", self.last.elapsed().as_secs_f64()));
        self.last = Instant::now();
    }
}

struct Stress {
    guest: Guest,
    pf: Pf,
    pf_tap: HostTap,
    vf_taps: Vec<HostTap>,
    trace: KvmTrace,
    memory_kib: u64,
}

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|argument| argument.parse().unwrap()).collect();
    let &[vfs, cycles, cpus, mebibytes] = arguments.as_slice() else { panic!("usage: stress VFS CYCLES CPUS MIB") };
    let mut stress = Stress::boot(vfs, cpus, mebibytes);
    let _traffic = stress.start_traffic();
    Sample::print_heading(&format!("{vfs} VFs"));
    let never = stress.sample();
    stress.print("never enabled", &never);
    let started = Instant::now();
    let first = stress.cycle("cycle 1", true);
    let first_resident = stress.resident();
    let mut differ = 0;
    for cycle in 2..=cycles {
        let name = format!("cycle {cycle}");
        let counted = stress.cycle(&name, cycle % REPORT == 0 || cycle == cycles);
        if counted != first {
            differ += 1;
            println!("{name} differs: {counted:?} instead of {first:?}");
        }
    }
    let grown = stress.resident() - first_resident;
    stress.guest.assert_kernel_has_no_complaint();
    assert_eq!(stress.guest.vmm().errors(), "", "the VMM printed no errors");
    let took = started.elapsed().as_secs_f64();
    println!(
        "{cycles} cycles with {vfs} VFs in {took:.0} s of the machine's time; counts differed after {differ} of them"
    );
    assert_eq!(stress.guest.power_off().code, Some(0));
    println!("resident memory grew by {grown:.2} MB from the first cycle to the last");
    if differ > 0 {
        std::process::exit(1);
    }
}

impl Stress {
    fn boot(vfs: usize, cpus: usize, mebibytes: usize) -> Stress {
        assert!((1..=255).contains(&vfs), "VFS must be 1 to 255, since each tap has a subnet of its own");
        read_into_memory(Kernel::V6_12);
        let trace = KvmTrace::start();
        let spec = GuestSpec::new(Kernel::V6_12)
            .cpus(cpus as u32)
            .memory(&format!("size={mebibytes}M"))
            .kernel_argument("tsc=reliable")
            .net(&format!("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs={vfs}"));
        let mut guest = Guest::boot(spec);
        println!("the guest is up after {:.1} s", guest.boot_time().as_secs_f64());
        let pf = Pf::find(&mut guest);
        let (pf_tap, vf_taps) =
            (HostTap::existing("pf0"), (0..vfs).map(|index| HostTap::existing(&format!("pf0v{index}"))).collect());
        Stress { guest, pf, pf_tap, vf_taps, trace, memory_kib: mebibytes as u64 * 1024 }
    }

    /// Starts pings through the PF from the guest, and probes into each VF's tap, which the guest answers.
    fn start_traffic(&mut self) -> ArpTraffic {
        self.pf_tap.join(PF_SUBNET);
        for (index, tap) in (0..=u8::MAX).zip(&self.vf_taps) {
            tap.join(Subnet(index));
        }
        self.guest.join("eth0", PF_SUBNET);
        self.guest.ping("eth0", PF_SUBNET);
        self.guest.ok(&format!("ping -q -i 0.3 -I eth0 {} > /dev/null 2>&1 &", PF_SUBNET.host()));
        let pause = FRAME_PAUSES.1.max(FRAME_PAUSES.0 / self.vf_taps.len() as u32);
        ArpTraffic::start(&self.vf_taps, PF_SUBNET.guest(), pause)
    }

    /// Enables all VFs, waits until each has passed a frame in both directions, and disables them under traffic.
    /// Returns the counts with the VFs enabled and afterwards, and prints them if `print`.
    fn cycle(&mut self, name: &str, print: bool) -> (Sample, Sample) {
        let pf_before = self.pf_tap.counters();
        let mut clock = Stopwatch::start();
        self.set_num_vfs(self.vf_taps.len());
        clock.lap("enabled");
        let bound = self.guest.ok(&format!("set -- {}; echo $#", self.pf.file("virtfn*/virtio*/net/*")));
        assert_eq!(bound, self.vf_taps.len().to_string(), "VFs that have a netdev");
        // IFF_UP | IFF_BROADCAST | IFF_MULTICAST, without a process per NIC.
        let up = "for flags in /sys/class/net/eth*/flags; do echo 0x1003 > $flags || exit 1; done";
        self.guest.ok_within(up, COMMAND_LIMIT);
        clock.lap("up");
        self.await_traffic();
        clock.lap("traffic");
        let on = self.sample();
        clock.lap("counted");
        if print {
            self.print(&format!("{name}, on"), &on);
        }
        self.set_num_vfs(0);
        clock.lap("disabled");
        let off = self.sample();
        if print {
            self.print(&format!("{name}, off"), &off);
            println!("{name}: {}", clock.laps.join(", "));
        }
        assert!(self.pf_tap.counters().from_guest > pf_before.from_guest, "the PF still sends");
        (on, off)
    }

    fn set_num_vfs(&mut self, count: usize) {
        self.guest.ok_within(&format!("echo {count} > {}", self.pf.file("sriov_numvfs")), COMMAND_LIMIT);
    }

    fn await_traffic(&self) {
        let before: Vec<_> = self.vf_taps.iter().map(|tap| tap.counters().from_guest).collect();
        let deadline = Instant::now() + TRAFFIC_LIMIT;
        let answered = |tap: &HostTap, before: u64| tap.counters().from_guest > before;
        for (tap, before) in self.vf_taps.iter().zip(before) {
            while !answered(tap, before) {
                assert!(Instant::now() < deadline, "no frame from the guest passed {}", tap.name());
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn sample(&mut self) -> Sample {
        Sample::of(self.guest.vmm(), &mut self.trace)
    }

    fn resident(&self) -> f64 {
        resident(self.guest.vmm(), self.memory_kib)
    }

    fn print(&self, what: &str, sample: &Sample) {
        sample.print(what, self.resident());
    }
}
