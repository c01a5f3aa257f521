//! A guest whose VFs are vDPA devices that pin memory and use an IOMMU. Each VF must reach the network of its device at
//! first, after a reset, after the VFs were disabled and enabled, after a reboot, and after a pause once its driver has
//! reset it. If a device has doorbell pages, the guest must ring them without VM exits.
//!
//! Run by `cargo xtask lab vp-vdpa` in a first-level machine whose NIC N answers at 10.N.0.1. Arguments: the number of
//! NICs, and their emulator.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed check panics and says where")]

use std::fs;

use integration::{Api, DoorbellExits, Guest, GuestSpec, Kernel, Pf};

/// Pings through each VF while its doorbells' exits are counted.
const PINGS: u64 = 20;
/// The guest's memory, all of which each device pins.
const MEMORY_MIB: u64 = 256;
/// QEMU's emulation of cmpxchg16b, which AMD's IOMMU needs in the first-level machine, sometimes leaves garbage in the
/// flags register. The guest works without the instruction.
const WITHOUT_CMPXCHG16B: &str = "clearcpuid=cx16";

struct Check {
    guest: Guest,
    api: Api,
    nics: usize,
    exits: DoorbellExits,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let nics: usize = arguments.next().and_then(|nics| nics.parse().ok()).unwrap_or(0);
    assert!((1..=8).contains(&nics), "usage: vp_vdpa NICS [EMULATOR], with 1 to 8 NICs");
    let emulator = arguments.next().unwrap_or_default();
    for kernel in [Kernel::V6_1, Kernel::V6_12] {
        let mut check = Check::boot(kernel, nics);
        let guest = check.guest.ok("uname -r");
        let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        println!("{nics} NICs of {emulator}, vp_vdpa on Linux {}, guest Linux {guest}:", host.trim());
        check.run();
    }
}

impl Check {
    fn boot(kernel: Kernel, nics: usize) -> Check {
        let spec = GuestSpec::new(kernel).memory(&format!("size={MEMORY_MIB}M")).kernel_argument(WITHOUT_CMPXCHG16B);
        let spec = spec.net(&format!("id=pf0,tap=pf0,sriov_vfs={nics}"));
        let spec = (0..nics).fold(spec, |spec, n| spec.net_vf(&format!("pf=pf0,index={n},vdpa=/dev/vhost-vdpa-{n}")));
        let api = Api::new("vp-vdpa");
        let guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
        Check { guest, api, nics, exits: DoorbellExits::count() }
    }

    fn run(mut self) {
        let pf = Pf::find(&mut self.guest);
        let pinned = self.status("VmPin:");
        println!("  the devices pin {} MiB", pinned / 1024);
        assert!(pinned >= self.nics as u64 * MEMORY_MIB * 1024, "each device pins the guest's memory");
        pf.set_num_vfs(&mut self.guest, self.nics);
        self.assert_all_answer(&pf, "enabled for the first time", true);
        for vf in pf.vfs(&mut self.guest) {
            self.guest.reset_function(&vf.address);
        }
        self.assert_all_answer(&pf, "after a function level reset", false);
        pf.set_num_vfs(&mut self.guest, 0);
        pf.set_num_vfs(&mut self.guest, self.nics);
        self.assert_all_answer(&pf, "disabled and enabled", false);
        self.guest.reboot();
        pf.set_num_vfs(&mut self.guest, self.nics);
        self.assert_all_answer(&pf, "after the guest started again", false);
        assert_eq!(self.guest.vmm().errors(), "", "the VMM complains");
        self.pause();
        for vf in pf.vfs(&mut self.guest) {
            self.guest.reset_function(&vf.address);
        }
        self.assert_all_answer(&pf, "paused, and reset by their drivers", false);
        self.guest.assert_kernel_has_no_complaint();
        assert_eq!(self.guest.power_off().code, Some(0));
    }

    /// Pauses and resumes the guest. No device can continue where its queues stopped, so each VF requests a reset.
    fn pause(&mut self) {
        for endpoint in ["vm.pause", "vm.resume"] {
            let answer = self.api.put(endpoint);
            assert_eq!(answer.status, 204, "{endpoint}: {}", answer.body);
        }
        // Device status (virtio 1.4 §2.1): DEVICE_NEEDS_RESET.
        let needing =
            "n=0; for f in /sys/bus/virtio/devices/*/status; do [ $(($(cat $f) & 0x40)) = 0 ] || n=$((n + 1)); done";
        self.guest.wait_for(&format!("{needing}; [ $n = {} ]", self.nics));
        let errors = self.guest.vmm().errors();
        assert_eq!(
            errors.lines().filter(|line| line.contains("refuses what the driver")).count(),
            self.nics,
            "{errors}"
        );
    }

    /// Pings through each VF, and compares the exits for doorbells with the number that its device's pages allow.
    fn assert_all_answer(&mut self, pf: &Pf, when: &str, print: bool) {
        for (n, vf) in pf.vfs(&mut self.guest).iter().enumerate() {
            let interface = vf.interface();
            self.guest.ok(&format!("ip link set {interface} up; ip addr replace 10.{n}.0.15/24 dev {interface}"));
            self.guest.wait_for(&format!("ping -c 1 -W 2 10.{n}.0.1"));
            let (pages, before) = (self.doorbell_pages(n), self.exits.so_far());
            self.guest.ok(&format!("ping -c {PINGS} -i 0.1 -W 5 10.{n}.0.1"));
            let exits = self.exits.so_far() - before;
            if print {
                println!("  VF {n}: {pages} doorbells are pages; {PINGS} pings, {exits} exits to ring");
            }
            match pages {
                0 => assert!(exits >= PINGS, "VF {n} {when}: without pages, doorbells cause exits: {exits}"),
                3 => assert_eq!(exits, 0, "VF {n} {when}: with pages, doorbells cause no exits"),
                pages => panic!("VF {n} {when} has {pages} pages of 3"),
            }
        }
        println!("  {when}: all VFs answer");
    }

    /// Number of doorbell pages of VF `n`'s device that the VMM has mapped.
    fn doorbell_pages(&self, n: usize) -> usize {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.guest.vmm().id())).unwrap();
        maps.lines().filter(|line| line.ends_with(&format!("/dev/vhost-vdpa-{n}"))).count()
    }

    /// The value of `key` in the VMM's `/proc` status.
    fn status(&self, key: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.guest.vmm().id())).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next());
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {key} in {status}"))
    }
}
