//! A guest whose VF over vDPA has no link while it moves: its bond continues over the PF.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::time::Duration;

use integration::migration_wire::{Point, Then};
use integration::{Backend, Bridge, Guest, Kernel, Pf, Plan, Probes, Stream, Subnet};
use serde_json::json;

/// Document with the recipe for the bond.
const DOCUMENT: &str = include_str!("../../../../docs/migration.md");
/// First line of the recipe.
const FIRST_LINE: &str = "[ -e /sys/class/net/bond0 ] || ";
/// The network of the bond.
const SUBNET: Subnet = Subnet(0);
/// The time between two pings.
const PAUSE: Duration = Duration::from_millis(20);
/// Interval at which the bond checks links, from the recipe.
const MIIMON: Duration = Duration::from_millis(100);
/// Additional time for the bond, by section 9 of the design.
const MORE: Duration = Duration::from_millis(100);
/// Time that the lab adds: one emulated processor runs both VMMs, the guest, the backends and the pings.
const LAB: Duration = Duration::from_secs(10);

/// The commands of the recipe, one per line.
fn recipe() -> Vec<&'static str> {
    let lines = DOCUMENT.lines().skip_while(|line| !line.starts_with(FIRST_LINE));
    let commands: Vec<_> = lines.take_while(|line| *line != "```").collect();
    assert!(commands.len() > 4, "docs/migration.md has no recipe for a bond");
    commands
}

/// The interface that carries the bond's frames now.
fn active(guest: &mut Guest) -> String {
    let line = guest.ok("grep 'Currently Active Slave' /proc/net/bonding/bond0");
    line.rsplit(' ').next().unwrap().to_owned()
}

fn await_active(guest: &mut Guest, interface: &str) {
    guest.wait_for(&format!("grep -q 'Currently Active Slave: {interface}$' /proc/net/bonding/bond0"));
}

#[test]
fn a_bond_uses_the_pf_while_a_vdpa_vf_moves_without_a_link() {
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, &[Backend::Vdpa]));
    let bridge = Bridge::new("br0", SUBNET, &["apf", "bpf", "a0", "b0"]);
    let mut here = here.boot(Kernel::V6_12, |spec| spec.memory("size=512M").with_modules());
    let mut there = there.wait(&[]);
    let guest = &mut here.guest;
    let pf = Pf::find(guest);
    pf.set_num_vfs(guest, 1);
    assert_eq!(pf.vfs(guest)[0].interface(), "eth1");
    guest.load("bonding");
    recipe().into_iter().for_each(|command| _ = guest.ok(command));
    guest.join("bond0", SUBNET);
    await_active(guest, "eth1");
    guest.wait_for(&format!("ping -c 1 -W 1 {}", SUBNET.host()));
    let mut stream = Stream::open(guest, SUBNET);
    for round in 1..=2 {
        stream.assert_alive(b"before\n");
        assert_eq!(active(&mut here.guest), "eth1");
        let probes = Probes::start(&[SUBNET], PAUSE);
        // The first pages are held back: the guest runs here, its VF has no link.
        let wire = here.send_until(&there, Point::Frame(3, 0), &json!({"on_unlogged_backend": "link-down"}));
        await_active(&mut here.guest, "eth0");
        stream.assert_alive(b"in between\n");
        wire.goes(Then::Passes);
        let sent = here.moved(&there);
        (here, there) = (there, here);
        await_active(&mut here.guest, "eth1");
        stream.assert_alive(b"after\n");
        let answers = probes.end()[0];
        let downtime = Duration::from_micros(sent["downtime"]["total_us"].as_u64().unwrap());
        println!(
            "{round}: {} ms without an answer, {} ms of them downtime; {} answers",
            answers.gap.as_millis(),
            downtime.as_millis(),
            answers.answered
        );
        assert!(answers.gap <= downtime + MIIMON + MORE + LAB, "{answers:?}, with a downtime of {downtime:?}");
    }
    let failures = here.guest.ok("grep 'Link Failure Count' /proc/net/bonding/bond0");
    println!("{failures}");
    here.guest.assert_kernel_has_no_complaint();
    drop((there, bridge));
}
