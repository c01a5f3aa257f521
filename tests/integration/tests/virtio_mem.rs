//! Memory that a guest plugs and unplugs as the host asks (virtio-mem).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use integration::{Api, Backend, Backends, Flood, Guest, HostTap, Kernel, Pf, Subnet, Usage, Vf};
use serde_json::json;

const MIB: u64 = 1 << 20;
const BOOT: u64 = 512;
const ALL: u64 = 2048;
const MEMORY: &str = "size=512M,hotplug_method=virtio-mem,hotplug_size=1536M";
const FOUR: [Backend; 4] = [Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa];
/// How long a guest may take to plug or unplug memory.
const LIMIT: Duration = Duration::from_secs(120);
/// How many frames in each direction show that a VF carries traffic.
const ENOUGH: u64 = 20;
/// How many bytes pass through each VF in each direction at the end.
const BYTES: usize = 2 << 20;
/// Uses 24 MiB of memory, of the highest that can be moved.
const FILL: &str = "mkdir -p /mnt && mount -t tmpfs -o size=100m tmpfs /mnt && \
                    dd if=/dev/zero of=/mnt/a bs=1M count=24 2>/dev/null";

/// How often memory is plugged and unplugged: 2 times, or as the environment says.
fn rounds() -> usize {
    std::env::var("CH_MEMORY_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap())
}

fn await_that(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "{what} did not come about");
        thread::sleep(Duration::from_millis(200));
    }
}

/// The guest's memory in MiB, as it has it now.
fn actual(api: &Api) -> u64 {
    api.info()["memory_actual_size"].as_u64().unwrap() / MIB
}

/// Asks for `size` MiB. The configuration says so at once.
fn ask(api: &Api, size: u64) {
    let answer = api.put_json("vm.resize", &json!({ "desired_ram": size * MIB }));
    assert_eq!(answer.status, 204, "{size} MiB: {}", answer.body);
    let memory = api.info()["config"]["memory"].clone();
    assert_eq!((&memory["size"], &memory["hotplugged_size"]), (&json!(BOOT * MIB), &json!((size - BOOT) * MIB)));
}

fn resize(api: &Api, size: u64) {
    ask(api, size);
    await_that(&format!("{size} MiB of memory"), || actual(api) == size);
}

/// What the VMM has of the host's memory, in MiB.
fn resident(guest: &Guest) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.vmm().id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() / 1024
}

/// Waits until frames pass in both directions.
fn await_traffic(taps: &[HostTap]) {
    for tap in taps {
        let before = tap.counters();
        await_that(&format!("traffic through {}", tap.name()), || {
            let now = tap.counters();
            now.from_guest >= before.from_guest + ENOUGH && now.to_guest >= before.to_guest + ENOUGH
        });
    }
}

fn transfer(guest: &mut Guest, vfs: &[Vf]) {
    for vf in vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
        guest.transfer(Subnet(vf.index as u8), BYTES);
    }
}

/// G62: memory goes from 512 MiB to 2 GiB and back while VFs over all kinds of backends carry traffic. Each time, the
/// host gets back what the guest has used, and the VMM uses as many files and threads as before.
#[test]
#[ignore = "a longer test: under emulation, Linux takes minutes to give so much memory back under traffic"]
fn memory_comes_and_goes_while_vfs_over_all_kinds_of_backends_carry_traffic() {
    let backends = Backends::start(&FOUR);
    let api = Api::new("virtio-mem");
    // Only memory for pages that can be moved is sure to be unplugged.
    let spec = backends
        .spec(Kernel::V6_12)
        .with_modules()
        .memory(MEMORY)
        .kernel_argument("memhp_default_state=online_movable");
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_mem");
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, FOUR.len());
    let vfs = pf.vfs(&mut guest);
    let taps = backends.taps();
    let floods = Flood::through(&mut guest, &vfs, &taps);
    assert_eq!(actual(&api), BOOT);
    let before = (resident(&guest), Usage::of(guest.vmm()));
    for round in 1..=rounds() {
        resize(&api, ALL);
        await_traffic(&taps);
        guest.ok(FILL);
        let full = resident(&guest);
        assert!(full >= before.0 + 20, "round {round}: {full} MiB, {} before", before.0);
        guest.ok("umount /mnt");
        resize(&api, BOOT);
        await_traffic(&taps);
        let after = resident(&guest);
        assert!(
            after + 16 <= full && after < before.0 + 100,
            "round {round}: {after} of {full} MiB, {} before",
            before.0
        );
        await_that("as many files and threads as before", || Usage::of(guest.vmm()) == before.1);
    }
    drop(floods);
    transfer(&mut guest, &vfs);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}

/// Kernel memory in what is plugged: the VFs' buffers are there, so backends reach it; and the guest may not be able to
/// unplug it, which the host sees.
#[test]
fn vfs_use_plugged_memory_and_a_reboot_takes_all_of_it_back() {
    let backends = Backends::start(&FOUR);
    let api = Api::new("virtio-mem-kernel");
    let spec =
        backends.spec(Kernel::V6_1).with_modules().memory(MEMORY).kernel_argument("memhp_default_state=online_kernel");
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    // Without a driver, nothing happens; it finds what was asked for before.
    ask(&api, ALL);
    assert_eq!(actual(&api), BOOT);
    guest.load("virtio_mem");
    await_that("all memory", || actual(&api) == ALL);
    // Linux takes memory below 4 GiB last.
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, FOUR.len());
    let vfs = pf.vfs(&mut guest);
    let floods = Flood::through(&mut guest, &vfs, &backends.taps());
    ask(&api, BOOT);
    await_traffic(&backends.taps());
    assert!((BOOT..=ALL).contains(&actual(&api)));
    drop(floods);
    transfer(&mut guest, &vfs);
    let answer = api.put_json("vm.resize", &json!({ "desired_ram": (ALL + 2) * MIB }));
    assert_eq!(answer.status, 400, "{}", answer.body);
    ask(&api, 1024);

    guest.reboot();
    assert_eq!(actual(&api), BOOT);
    guest.load("virtio_mem");
    await_that("what was asked for last", || actual(&api) == 1024);
    pf.set_num_vfs(&mut guest, FOUR.len());
    let taps = backends.taps();
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}
