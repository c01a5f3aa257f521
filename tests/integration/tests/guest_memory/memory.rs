//! Memory added to a running guest.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use integration::{Api, Backend, Backends, Guest, Kernel, Pf, Pings, Subnet};
use rstest::rstest;
use serde_json::json;

const MIB: u64 = 1 << 20;
/// Linux's memory blocks of 128 MiB from 4 GiB on.
const FIRST_BLOCK: u64 = 32;
/// Number of bytes that pass through each VF in each direction once all memory is there.
const BYTES: usize = 512 << 10;
/// Bytes of a ping, and seconds between two through the same VF. Faster pings would use all of the lab's emulated
/// processor, which bringing memory online needs as well.
const PING: (usize, f64) = (1000, 0.1);

/// Resizes the guest to `size` MiB of memory, with `blocks` blocks from 4 GiB on, and brings these online, as udev can
/// do.
fn resize(guest: &mut Guest, api: &Api, size: u64, blocks: u64) {
    let answer = api.put_json("vm.resize", &json!({ "desired_ram": size * MIB }));
    assert_eq!(answer.status, 204, "{size} MiB: {}", answer.body);
    assert_info(api, size);
    let block = |n: u64| format!("/sys/devices/system/memory/memory{}", FIRST_BLOCK + n);
    for n in 0..blocks {
        guest.wait_for(&format!("[ -e {} ]", block(n)));
        // A kernel that brings memory online itself may do so at this moment, and then refuses the write.
        guest.ok(&format!(
            "grep -qx online {0}/state || echo online > {0}/state || grep -qx online {0}/state",
            block(n)
        ));
    }
    assert!(guest.run(&format!("[ -e {} ]", block(blocks))).status != 0, "no more memory than was asked for");
}

fn assert_info(api: &Api, size: u64) {
    let info = api.info();
    let memory = &info["config"]["memory"];
    assert_eq!((&memory["size"], &memory["hotplug_size"]), (&json!(size * MIB), &json!(2048 * MIB)));
    assert_eq!(info["memory_actual_size"], json!(size * MIB));
}

/// The guest's memory in MiB, as counted by Linux.
fn total(guest: &mut Guest) -> u64 {
    let line = guest.ok("grep MemTotal /proc/meminfo");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// G62: memory that is added while VFs over all kinds of backends carry traffic is reached by all of them, and stays
/// the guest's after a reboot.
#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn memory_is_added_while_vfs_over_all_backends_carry_traffic(#[case] kernel: Kernel) {
    let backends = Backends::start(&[Backend::Tap, Backend::VhostNet, Backend::VhostUser, Backend::Vdpa]);
    let api = Api::new("memory");
    let spec = backends.spec(kernel).memory("size=512M,hotplug_size=2G").kernel_argument("init_on_alloc=0");
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 4);
    let vfs = pf.vfs(&mut guest);
    let taps = backends.taps();
    for (vf, tap) in vfs.iter().zip(&taps) {
        let subnet = Subnet(vf.index as u8);
        tap.join(subnet);
        guest.join(vf.interface(), subnet);
        guest.ping(vf.interface(), subnet);
    }
    let pings = Pings::start(&mut guest, &vfs, PING.0, PING.1);
    assert!(total(&mut guest) < 512);

    resize(&mut guest, &api, 1024, 4);
    resize(&mut guest, &api, 2048, 12);
    assert!((1792..2048).contains(&total(&mut guest)));
    assert_eq!(api.put_json("vm.resize", &json!({ "desired_ram": 4096 * MIB })).status, 409);
    assert_info(&api, 2048);
    for (vf, (sent, answered)) in vfs.iter().zip(pings.end(&mut guest)) {
        println!("VF {}: {answered} of {sent} pings answered", vf.index);
        // The replies of the last second may still be on the way.
        assert!(sent > 0 && answered + 10 >= sent, "VF {}: {answered} of {sent} pings answered", vf.index);
    }
    // New buffers are above 4 GiB: Linux takes lower memory last.
    for vf in &vfs {
        guest.transfer(Subnet(vf.index as u8), BYTES);
    }
    guest.assert_kernel_has_no_complaint();

    guest.reboot();
    assert!((1792..2048).contains(&total(&mut guest)));
    assert_info(&api, 2048);
    pf.set_num_vfs(&mut guest, 4);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    // A reduction applies from the next start on.
    assert_eq!(api.put_json("vm.resize", &json!({ "desired_ram": 512 * MIB })).status, 204);
    assert!((1792..2048).contains(&total(&mut guest)));
    guest.reboot();
    assert!(total(&mut guest) < 512);
    pf.set_num_vfs(&mut guest, 4);
    for vf in pf.vfs(&mut guest) {
        vf.ping_through(&mut guest, &taps, vf.index, Subnet(vf.index as u8));
    }
    let errors = guest.vmm().errors();
    let reduction = "the guest keeps 2G of memory, and has 512M from its next boot on";
    assert!(errors.lines().count() == 1 && errors.contains(reduction), "{errors}");
    assert_eq!(guest.power_off().code, Some(0));
}
