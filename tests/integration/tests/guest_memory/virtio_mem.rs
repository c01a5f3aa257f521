//! Memory that a guest plugs and unplugs on the host's request (virtio-mem).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use integration::{
    Api, Backend, Backends, Flood, Guest, GuestSpec, HostTap, Kernel, Pf, Pings, Subnet, Usage, Vf, repetitions,
    resident as own,
};
use serde_json::json;

const MIB: u64 = 1 << 20;
const BOOT: u64 = 512;
const ALL: u64 = 2048;
const MEMORY: &str = "size=512M,hotplug_method=virtio-mem,hotplug_size=1536M";
const FOUR: [Backend; 4] = [Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa];
/// Time that a guest may take to plug or unplug memory. Linux tries a second time after 50 s.
const LIMIT: Duration = Duration::from_secs(180);
/// Number of frames in each direction that show that a VF carries traffic.
const ENOUGH: u64 = 10;
/// Bytes of a ping, and seconds between two through the same VF. Faster pings would use all of the lab's emulated
/// processor, which plugging and unplugging need as well.
const PING: (usize, f64) = (1000, 0.1);
/// Number of bytes that pass through each VF in each direction: during pings, and after a flood.
const BYTES: [usize; 2] = [256 << 10, 2 << 20];
/// By default, Debian's kernels clear every page that they allocate, and the driver allocates all that it unplugs. Each
/// page that was not used before then costs an exit and a page of the host. Under emulation, that takes minutes.
const NO_CLEARING: &str = "init_on_alloc=0";
/// Uses 24 MiB of the highest movable memory.
const FILL: &str = "mkdir -p /mnt && mount -t tmpfs -o size=100m tmpfs /mnt && \
                    dd if=/dev/zero of=/mnt/a bs=1M count=24 2>/dev/null";

/// Number of times that memory is plugged and unplugged, and the size in MiB: once to 1 GiB to save time, or to all of
/// it the number of times in the environment.
fn rounds() -> (usize, u64) {
    match repetitions("CH_MEMORY_ROUNDS", 0) {
        0 => (1, 1024),
        rounds => (rounds, ALL),
    }
}

fn await_that(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "{what} did not come about");
        thread::sleep(Duration::from_millis(200));
    }
}

/// The guest's present memory in MiB.
fn actual(api: &Api) -> u64 {
    api.info()["memory_actual_size"].as_u64().unwrap() / MIB
}

/// Requests `size` MiB. The configuration has the new size at once.
fn ask(api: &Api, size: u64) {
    let answer = api.put_json("vm.resize", &json!({ "desired_ram": size * MIB }));
    assert_eq!(answer.status, 204, "{size} MiB: {}", answer.body);
    let memory = api.info()["config"]["memory"].clone();
    assert_eq!((&memory["size"], &memory["hotplugged_size"]), (&json!(BOOT * MIB), &json!((size - BOOT) * MIB)));
}

/// Host memory of the VMM, in MiB.
fn resident(guest: &Guest) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.vmm().id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() / 1024
}

/// Waits until frames pass in both directions.
fn await_traffic(taps: &[HostTap]) {
    let before: Vec<_> = taps.iter().map(HostTap::counters).collect();
    for (tap, before) in taps.iter().zip(before) {
        await_that(&format!("traffic through {}", tap.name()), || {
            let now = tap.counters();
            now.from_guest >= before.from_guest + ENOUGH && now.to_guest >= before.to_guest + ENOUGH
        });
    }
}

fn transfer(guest: &mut Guest, vfs: &[Vf], bytes: usize) {
    for vf in vfs {
        guest.transfer(Subnet(vf.index as u8), bytes);
    }
}

/// G62: memory grows from 512 MiB to 1 or 2 GiB and back while VFs over all kinds of backends carry traffic. No frame
/// is lost, and each time the VMM uses about as much memory, as many files and as many threads as before. (Memory that
/// the guest has used is kept for the vDPA device, which may have pinned it.)
#[test]
fn memory_is_plugged_and_unplugged_while_backends_carry_traffic() {
    let backends = Backends::start(&FOUR);
    let api = Api::new("virtio-mem");
    // Only memory for movable pages is sure to be unplugged.
    let spec = backends
        .spec(Kernel::V6_12)
        .with_modules()
        .memory(MEMORY)
        .kernel_argument("memhp_default_state=online_movable")
        .kernel_argument(NO_CLEARING);
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_mem");
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, FOUR.len());
    let vfs = pf.vfs(&mut guest);
    let taps = backends.taps();
    for (vf, tap) in vfs.iter().zip(&taps) {
        let subnet = Subnet(vf.index as u8);
        tap.join(subnet);
        guest.join(vf.interface(), subnet);
        guest.ping(vf.interface(), subnet);
    }
    let pings = Pings::start(&mut guest, &vfs, PING.0, PING.1);
    assert_eq!(actual(&api), BOOT);
    let before = (resident(&guest), Usage::of(guest.vmm()));
    let mut without_the_guests = Vec::new();
    let (rounds, most) = rounds();
    for round in 1..=rounds {
        let began = Instant::now();
        ask(&api, most);
        transfer(&mut guest, &vfs, BYTES[0]);
        await_that("all memory", || actual(&api) == most);
        await_traffic(&taps);
        let plugged = began.elapsed();
        guest.ok(FILL);
        assert!(resident(&guest) >= before.0 + 20, "round {round}: {} MiB, {} before", resident(&guest), before.0);
        guest.ok("umount /mnt");
        let asked = Instant::now();
        ask(&api, BOOT);
        transfer(&mut guest, &vfs, BYTES[0]);
        await_that("the memory of the start", || actual(&api) == BOOT);
        await_traffic(&taps);
        let after = resident(&guest);
        let (unplugged, vmm) = (asked.elapsed(), own(guest.vmm(), BOOT << 10));
        await_that("as many files and threads as before", || Usage::of(guest.vmm()) == before.1);
        println!(
            "round {round}: plugged in {plugged:.1?}, unplugged in {unplugged:.1?}; {after} MiB resident, {vmm:.2} MB \
             without the guest's; {} files, {} threads",
            before.1.files, before.1.threads
        );
        assert!(after < before.0 + 100, "round {round}: {after} MiB, {} before", before.0);
        without_the_guests.push(vmm);
    }
    let (first, highest) = (without_the_guests[0], without_the_guests.iter().copied().fold(0.0, f64::max));
    assert!(highest < first + 0.5, "the VMM's own memory grew: {without_the_guests:.2?} MB");
    for (vf, (sent, answered)) in vfs.iter().zip(pings.end(&mut guest)) {
        println!("VF {}: {answered} of {sent} pings answered", vf.index);
        // The replies of the last second may still be on the way.
        assert!(sent > ENOUGH && answered + 10 >= sent, "VF {}: {answered} of {sent} pings answered", vf.index);
    }
    transfer(&mut guest, &vfs, BYTES[0]);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}

/// No host device can have pinned pages here, so they are returned.
#[test]
fn unplugged_memory_that_the_guest_used_returns_to_the_host() {
    let api = Api::new("virtio-mem-back");
    let spec = GuestSpec::new(Kernel::V6_12)
        .with_modules()
        .memory("size=256M,hotplug_method=virtio-mem,hotplug_size=256M,shared=on")
        .kernel_argument("memhp_default_state=online_movable")
        .kernel_argument(NO_CLEARING);
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    guest.load("virtio_mem");
    let resize = |size: u64| {
        assert_eq!(api.put_json("vm.resize", &json!({ "desired_ram": size * MIB })).status, 204);
        await_that(&format!("{size} MiB of memory"), || actual(&api) == size);
    };
    resize(512);
    let before = resident(&guest);
    guest.ok(FILL);
    let full = resident(&guest);
    assert!(full >= before + 20, "{full} MiB, {before} before");
    guest.ok("umount /mnt");
    resize(256);
    let after = resident(&guest);
    assert!(after + 16 <= full, "{after} of {full} MiB, {before} before");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}

/// Kernel memory in plugged blocks: the VFs' buffers are there, so backends reach it; and the guest may be unable to
/// unplug it, which the host sees.
#[test]
#[ignore = "a longer test: Linux takes minutes to give up"]
fn vfs_use_plugged_memory_and_a_reboot_takes_all_of_it_back() {
    let backends = Backends::start(&FOUR);
    let api = Api::new("virtio-mem-kernel");
    let spec =
        backends.spec(Kernel::V6_1).with_modules().memory(MEMORY).kernel_argument("memhp_default_state=online_kernel");
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    // Without a driver, nothing happens; a driver reads the earlier request.
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
    transfer(&mut guest, &vfs, BYTES[1]);
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
