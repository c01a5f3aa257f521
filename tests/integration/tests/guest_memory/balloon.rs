//! Memory that a guest returns to the host through its balloon.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::time::{Duration, Instant};

use integration::{Api, Guest, GuestSpec, Kernel};
use rstest::rstest;
use serde_json::json;

const MIB: u64 = 1 << 20;
/// Time that a guest may take to return memory.
const LIMIT: Duration = Duration::from_secs(120);
/// Fills 96 MiB of memory.
const FILL: &str = "mkdir -p /mnt; mount -t tmpfs -o size=128m tmpfs /mnt; \
                    dd if=/dev/urandom of=/mnt/a bs=1M count=1 2>/dev/null; \
                    for n in $(seq 96); do cat /mnt/a; done > /mnt/b";
/// Checks that memory filled by [`FILL`] still has its contents.
const CHECK: &str = "for n in $(seq 96); do cat /mnt/a; done | cmp - /mnt/b";

/// Memory of the process `id`, in MiB.
fn resident(guest: &Guest) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.vmm().id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() / 1024
}

fn await_that(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn guest(kernel: Kernel, api: &Api, memory: &str, balloon: &str) -> Guest {
    let spec = GuestSpec::new(kernel).with_modules().memory(memory).arguments(&["--balloon", balloon]);
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_balloon");
    guest
}

fn counter(api: &Api, name: &str) -> u64 {
    api.get("vm.counters").body["__balloon"][name].as_u64().unwrap()
}

#[rstest]
#[ignore = "a longer test: private memory"]
#[case::linux_6_1_private(Kernel::V6_1, "size=256M")]
#[case::linux_6_12_shared(Kernel::V6_12, "size=256M,shared=on")]
fn a_guest_returns_memory_to_the_host_and_gets_it_back(#[case] kernel: Kernel, #[case] memory: &str) {
    let api = Api::new("balloon");
    let mut guest = guest(kernel, &api, memory, "size=0");
    let actual = || api.info()["memory_actual_size"].as_u64().unwrap() / MIB;
    let resize = |mebibytes: u64| {
        let answer = api.put_json("vm.resize", &json!({ "desired_balloon": mebibytes * MIB }));
        assert_eq!(answer.status, 204, "{}", answer.body);
        await_that("the balloon's size", || actual() == 256 - mebibytes);
    };
    guest.ok(FILL);
    guest.ok("umount /mnt");
    let full = resident(&guest);
    assert!(full > 96, "{full}");

    resize(128);
    let inflated = resident(&guest);
    assert!(inflated < full - 32, "{inflated} of {full} MiB are still resident");
    let kib = guest.ok("awk '/^MemTotal/ { print $2 }' /proc/meminfo").parse::<u64>().unwrap();
    assert!(kib < 128 << 10, "the guest still uses {kib} KiB");
    assert_eq!(counter(&api, "inflated_pages"), 128 * 256);
    assert_eq!(counter(&api, "discarded_bytes"), 128 * MIB);

    // Memory from a deflated balloon is like any other.
    resize(0);
    guest.ok(FILL);
    guest.ok(CHECK);
    assert!(resident(&guest) > inflated + 32);

    // A guest that restarts has all of its memory, until the next request.
    guest.ok("umount /mnt");
    resize(64);
    guest.reboot();
    assert_eq!(actual(), 256);
    guest.load("virtio_balloon");
    await_that("the balloon's size", || actual() == 192);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[case::linux_6_1_shared(Kernel::V6_1, "size=256M,shared=on")]
#[ignore = "a longer test: private memory"]
#[case::linux_6_12_private(Kernel::V6_12, "size=256M")]
fn free_page_reporting_returns_freed_memory_to_the_host(#[case] kernel: Kernel, #[case] memory: &str) {
    let api = Api::new("reporting");
    let mut guest = guest(kernel, &api, memory, "size=0,free_page_reporting=on");
    guest.ok(FILL);
    let full = resident(&guest);
    guest.ok("umount /mnt");
    await_that("free memory at the host", || resident(&guest) < full - 64);
    assert!(counter(&api, "reported_bytes") > 64 * MIB);
    assert_eq!(api.info()["memory_actual_size"], json!(256 * MIB), "the guest still has it");
    guest.ok(FILL);
    guest.ok(CHECK);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
