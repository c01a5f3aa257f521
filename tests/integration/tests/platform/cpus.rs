//! vCPUs added to and removed from a running guest.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use integration::{Api, Flood, Guest, GuestSpec, Kernel, Pf, Subnet, spec_with_vfs, vf_taps};
use rstest::rstest;
use serde_json::json;

/// Time that the guest may take to release vCPUs.
const EJECT_LIMIT: Duration = Duration::from_secs(60);
/// The guest's online CPUs, as a list in Linux's format.
const ONLINE: &str = "/sys/devices/system/cpu/online";

fn resize(api: &Api, vcpus: u32) {
    let answer = api.put_json("vm.resize", &json!({ "desired_vcpus": vcpus }));
    assert_eq!(answer.status, 204, "{vcpus}: {}", answer.body);
    let info = api.info();
    let cpus = &info["config"]["cpus"];
    assert_eq!((&cpus["boot_vcpus"], &cpus["max_vcpus"]), (&json!(vcpus), &json!(4)));
}

/// The number of vCPU threads of the VMM.
fn running(guest: &Guest) -> usize {
    let threads = fs::read_dir(format!("/proc/{}/task", guest.vmm().id())).unwrap();
    let name = |path: PathBuf| fs::read_to_string(path.join("comm")).unwrap_or_default();
    threads.filter(|thread| name(thread.as_ref().unwrap().path()).starts_with("vcpu")).count()
}

/// Resizes the guest to vCPUs 0 to `last`, and brings the new ones online, as udev can do.
fn add(guest: &mut Guest, api: &Api, last: u32) {
    resize(api, last + 1);
    assert_eq!(running(guest), last as usize + 1);
    let cpu = |n: u32| format!("/sys/devices/system/cpu/cpu{n}/online");
    for n in 1..=last {
        guest.wait_for(&format!("[ -e {} ]", cpu(n)));
        guest.ok(&format!("read on < {0}; [ $on = 1 ] || echo 1 > {0}", cpu(n)));
    }
    assert_are_used(guest, last);
}

/// Panics unless exactly the vCPUs 0 to `last` are online, and each runs a busy loop that is bound to it.
fn assert_are_used(guest: &mut Guest, last: u32) {
    let all = if last == 0 { "0".to_owned() } else { format!("0-{last}") };
    assert_eq!(guest.ok(&format!("cat {ONLINE}")), all);
    assert_eq!(guest.ok("cat /sys/devices/system/cpu/present"), all);
    assert_eq!(guest.ok("cat /sys/devices/system/cpu/possible"), "0-3");
    for cpu in 0..=last {
        // Field 39 is the CPU that the process last ran on.
        let busy = "i=0; while [ $i -lt 500 ]; do i=$((i + 1)); done; cut -d\" \" -f39 /proc/self/stat";
        assert_eq!(guest.ok(&format!("taskset -c {cpu} sh -c '{busy}'")), cpu.to_string());
    }
}

/// Resizes the guest down to vCPUs 0 to `last`, and waits until it has released the others.
fn remove(guest: &mut Guest, api: &Api, last: u32) {
    resize(api, last + 1);
    wait_until_it_has_let_go(guest, last);
}

/// Waits until the guest has released all vCPUs above `last`.
fn wait_until_it_has_let_go(guest: &mut Guest, last: u32) {
    let deadline = Instant::now() + EJECT_LIMIT;
    while running(guest) > last as usize + 1 {
        assert!(Instant::now() < deadline, "the guest never released its vCPUs: {}", guest.run("dmesg | tail").text);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_are_used(guest, last);
}

fn assert_kernel_has_no_complaint(guest: &mut Guest) {
    guest.assert_kernel_has_no_complaint();
    // Linux logs these messages for AML code that it cannot run.
    assert_eq!(guest.run("dmesg | grep -E \"ACPI( BIOS)? (Error|Warning)|ACPI Exception\"").text, "");
}

/// A guest that reserves more vCPUs than it boots with can add and release them repeatedly, across a pause and a
/// reboot, while its VFs carry traffic.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn vcpus_come_and_go_while_vfs_carry_traffic(#[case] kernel: Kernel) {
    let api = Api::new("cpus");
    let spec = spec_with_vfs(kernel, 2).max_cpus(4).arguments(&["--api-socket", &api.argument()]);
    let mut guest = Guest::boot(spec);
    assert_are_used(&mut guest, 0);
    let pf = Pf::at("0000:00:01.0");
    pf.set_num_vfs(&mut guest, 2);
    let vfs = pf.vfs(&mut guest);
    let floods = Flood::through(&mut guest, &vfs, &vf_taps(2));

    add(&mut guest, &api, 2);
    // Bind virtio interrupts to a vCPU that will be removed: they are lost unless Linux moves them.
    guest.ok(
        "for irq in $(grep virtio /proc/interrupts | cut -d: -f1); do echo 4 > /proc/irq/$irq/smp_affinity; done; true",
    );
    assert_eq!(api.put_json("vm.resize", &json!({ "desired_vcpus": 5 })).status, 400);
    // A guest may release a vCPU without a request, and gets it back with the next resize to that number.
    guest.ok("echo 1 > /sys/bus/acpi/devices/ACPI0007:02/eject");
    wait_until_it_has_let_go(&mut guest, 1);
    add(&mut guest, &api, 2);
    remove(&mut guest, &api, 0);
    assert_eq!(api.put("vm.pause").status, 204);
    resize(&api, 2);
    assert_eq!(api.put("vm.resume").status, 204);
    add(&mut guest, &api, 1);
    drop(floods);
    for vf in &vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
    guest.ok("echo 0 > /proc/sys/kernel/unknown_nmi_panic");
    assert_eq!(api.put("vm.nmi").status, 204);
    assert_kernel_has_no_complaint(&mut guest);

    guest.reboot();
    assert_eq!(running(&guest), 2);
    assert_are_used(&mut guest, 1);
    remove(&mut guest, &api, 0);
    add(&mut guest, &api, 3);
    pf.set_num_vfs(&mut guest, 2);
    for vf in &pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &vf_taps(2), vf.index, Subnet(vf.index as u8));
    }
    assert_kernel_has_no_complaint(&mut guest);
    assert_eq!(guest.power_off().code, Some(0));
}

/// The CPUs of a list in Linux's format, such as `0-1,4`.
fn list(text: &str) -> Vec<u32> {
    let range = |part: &str| match part.split_once('-') {
        Some((first, last)) => first.parse().unwrap()..=last.parse().unwrap(),
        None => part.parse().unwrap()..=part.parse().unwrap(),
    };
    text.trim().split(',').flat_map(range).collect()
}

/// Linux finds the packages and the threads of a core as in the command line, even if a package's first vCPU number is
/// not a multiple of its size, and after one of its vCPUs was added.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_guest_sees_the_topology_that_was_given(#[case] kernel: Kernel) {
    let api = Api::new("topology");
    let spec = GuestSpec::new(kernel).cpus(5).max_cpus(6).topology([1, 3, 1, 2]);
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    let topology = |guest: &mut Guest, cpu: u32, file: &str| {
        guest.ok(&format!("cat /sys/devices/system/cpu/cpu{cpu}/topology/{file}"))
    };
    let packages = |guest: &mut Guest, cpus: std::ops::Range<u32>| -> Vec<u32> {
        cpus.map(|cpu| topology(guest, cpu, "physical_package_id").parse().unwrap()).collect()
    };
    assert_eq!(packages(&mut guest, 0..5), [0, 0, 0, 1, 1]);
    assert_eq!(list(&topology(&mut guest, 4, "package_cpus_list")), [3, 4]);
    assert_eq!(api.put_json("vm.resize", &json!({ "desired_vcpus": 6 })).status, 204);
    let online = "/sys/devices/system/cpu/cpu5/online";
    guest.wait_for(&format!("[ -e {online} ]"));
    let up = guest.run(&format!("read on < {online}; [ $on = 1 ] || echo 1 > {online}"));
    assert_eq!(up.status, 0, "{}: {}", up.text, guest.run("dmesg | tail").text);
    assert_eq!(list(&topology(&mut guest, 5, "package_cpus_list")), [3, 4, 5]);
    assert_kernel_has_no_complaint(&mut guest);
    assert_eq!(guest.power_off().code, Some(0));

    let mut guest = Guest::boot(GuestSpec::new(kernel).cpus(4).topology([2, 1, 1, 2]));
    assert_eq!(packages(&mut guest, 0..4), [0, 0, 1, 1]);
    // Linux looks for threads of AMD's CPUs only if their CPUID reports them.
    if guest.run("grep -qE 'topoext|GenuineIntel' /proc/cpuinfo").status == 0 {
        for (cpu, siblings) in [(0, [0, 1]), (3, [2, 3])] {
            assert_eq!(list(&topology(&mut guest, cpu, "thread_siblings_list")), siblings);
        }
    }
    assert_kernel_has_no_complaint(&mut guest);
    assert_eq!(guest.power_off().code, Some(0));
}
