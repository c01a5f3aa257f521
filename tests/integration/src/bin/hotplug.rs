//! Adds a PF with 8 VFs to a running guest and removes it with its VFs enabled and bound, many times, while another
//! PF's VFs carry pings. The VMM's host resources and KVM objects must be the same after the last round as after the
//! first, and the pings must lose no more than without these rounds.
//!
//! Run by `cargo xtask lab hotplug` in a first-level machine. Arguments: the guest's kernel, and the number of
//! rounds.

#![expect(clippy::panic, reason = "a failed measurement panics and says where")]

use std::thread;
use std::time::{Duration, Instant};

use integration::{
    Api, Guest, HostTap, Kernel, KvmTrace, Pf, Pings, Sample, Subnet, Vf, read_into_memory, resident, spec_with_vfs,
    vf_taps,
};
use serde_json::json;

/// VFs of the PF that stays. They carry the pings.
const STAYING: usize = 2;
/// VFs of the PF that is added and removed.
const COMING: usize = 8;
/// The slot of that PF, and the subnet of its first VF.
const SLOT: &str = "0000:00:09.0";
const FIRST_SUBNET: u8 = 100;
/// Time for which the pings run at first, before devices are added or removed.
const QUIET: Duration = Duration::from_secs(30);
/// The guest's memory, which does not count as the VMM's.
const GUEST_KIB: u64 = 256 * 1024;
/// Rounds between two lines of the report.
const REPORT: usize = 10;

struct Hotplug {
    guest: Guest,
    api: Api,
    vfs: Vec<Vf>,
    trace: KvmTrace,
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let kernel = |version: &str| [Kernel::V6_1, Kernel::V6_12].into_iter().find(|kernel| kernel.version() == version);
    let (Some(kernel), Some(rounds @ 1..)) = (
        arguments.first().and_then(|version| kernel(version)),
        arguments.get(1).and_then(|rounds| rounds.parse::<usize>().ok()),
    ) else {
        panic!("usage: hotplug 6.1|6.12 ROUNDS")
    };
    let mut hotplug = Hotplug::boot(kernel);
    Sample::print_heading(&format!("{COMING} VFs"));
    let never = hotplug.sample();
    hotplug.print("never there", &never);
    let pings = hotplug.start_pings();
    thread::sleep(QUIET);
    let quiet = pings.end(&mut hotplug.guest);

    let pings = hotplug.start_pings();
    let started = Instant::now();
    let first = hotplug.round("round 1", true);
    let first_resident = hotplug.resident();
    let mut differ = 0;
    for round in 2..=rounds {
        let name = format!("round {round}");
        let counted = hotplug.round(&name, round % REPORT == 0 || round == rounds);
        if counted != first {
            differ += 1;
            println!("{name} differs: {counted:?} instead of {first:?}");
        }
    }
    let (took, grown) = (started.elapsed().as_secs_f64(), hotplug.resident() - first_resident);
    let busy = pings.end(&mut hotplug.guest);
    hotplug.guest.assert_kernel_has_no_complaint();
    println!("{rounds} rounds in {took:.0} s of the machine's time; counts differed after {differ} of them");
    println!("pings of the VFs that stay, sent and answered: {quiet:?} before the rounds, {busy:?} during the rounds");
    println!("resident memory grew by {grown:.2} MB from the first round to the last");
    assert_eq!(hotplug.guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(hotplug.guest.power_off().code, Some(0));
    let lost = |pings: &[(u64, u64)]| pings.iter().map(|(sent, answered)| sent - answered).max();
    if differ > 0 || lost(&busy) > lost(&quiet) {
        std::process::exit(1);
    }
}

impl Hotplug {
    fn boot(kernel: Kernel) -> Hotplug {
        read_into_memory(kernel);
        let (trace, api) = (KvmTrace::start(), Api::new("hotplug"));
        let spec = spec_with_vfs(kernel, STAYING).kernel_argument("tsc=reliable");
        let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
        println!("the guest is up after {:.1} s", guest.boot_time().as_secs_f64());
        let pf = Pf::at("0000:00:01.0");
        pf.set_num_vfs(&mut guest, STAYING);
        let vfs = pf.vfs(&mut guest);
        let taps = vf_taps(STAYING);
        for vf in &vfs {
            vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
        }
        Hotplug { guest, api, vfs, trace }
    }

    /// Starts pings through each VF that stays.
    fn start_pings(&mut self) -> Pings {
        Pings::start(&mut self.guest, &self.vfs, 56, 0.2)
    }

    /// Runs a round: adds the PF, enables its VFs, pings through each, and removes the PF. Returns the counts with the
    /// VFs enabled and after the removal, and prints them if `print`.
    fn round(&mut self, name: &str, print: bool) -> (Sample, Sample) {
        let hot = json!({ "id": "hp0", "tap": "hp0", "sriov_vfs": COMING, "pci_device_id": 9 });
        let answer = self.api.put_json("vm.add-net", &hot);
        assert_eq!(answer.status, 200, "{name}: {}", answer.body);
        let pf = Pf::at(SLOT);
        self.guest.wait_for(&format!("ls {}", pf.file("virtio*/net/*/address")));
        pf.set_num_vfs(&mut self.guest, COMING);
        let vfs = pf.vfs(&mut self.guest);
        assert_eq!(vfs.len(), COMING);
        let taps: Vec<_> = (0..COMING).map(|index| HostTap::existing(&format!("hp0v{index}"))).collect();
        for vf in &vfs {
            vf.ping_through(&mut self.guest, &taps, vf.index, Subnet(FIRST_SUBNET + vf.index as u8));
        }
        let on = self.sample();
        if print {
            self.print(&format!("{name}, on"), &on);
        }
        self.api.remove_device("hp0");
        let off = self.sample();
        if print {
            self.print(&format!("{name}, off"), &off);
        }
        (on, off)
    }

    fn sample(&mut self) -> Sample {
        Sample::of(self.guest.vmm(), &mut self.trace)
    }

    fn resident(&self) -> f64 {
        resident(self.guest.vmm(), GUEST_KIB)
    }

    fn print(&self, what: &str, sample: &Sample) {
        sample.print(what, self.resident());
    }
}
