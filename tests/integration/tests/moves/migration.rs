//! Guests that move from one VMM to another with their VFs enabled.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::time::Duration;

use integration::migration_wire::{Point, Then};
use integration::{
    Announcements, Backend, Bridge, Difference, Guest, Kernel, Pf, Plan, Probes, Site, Stream, Subnet, Usage, Vf,
    repetitions, vf_mac,
};
use rstest::rstest;
use serde_json::{Value, json};

/// The kind of each VF's backend, for backends with a dirty log.
const LOGGED: [Backend; 6] =
    [Backend::Tap, Backend::Tap, Backend::VhostNet, Backend::VhostNet, Backend::VhostUser, Backend::VhostUser];
/// The same kinds, and two without a dirty log: their VFs have no link during the migration.
const ALL: [Backend; 8] = [
    Backend::Tap,
    Backend::Tap,
    Backend::VhostNet,
    Backend::VhostNet,
    Backend::VhostUser,
    Backend::VhostUser,
    Backend::Vdpa,
    Backend::Vdpa,
];
/// Bytes that pass through each VF in each direction.
const BYTES: usize = 64 << 10;
/// The time between two pings to the same VF.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest time in which a VF may not answer. The lab's machine has one processor for both VMMs, the guest and all
/// backends; `cargo xtask bench migration` measures.
const LONGEST: Duration = Duration::from_secs(20);

/// Number of moves of the guest; `CH_MIGRATIONS=200` for a longer run.
fn rounds() -> usize {
    repetitions("CH_MIGRATIONS", 4)
}

/// Facts that a restart would change: the kernel's own number, and a file in memory.
fn memories(guest: &mut Guest) -> String {
    guest.ok("cat /proc/sys/kernel/random/boot_id /tmp/nonce && md5sum /tmp/blob")
}

/// Facts about the VFs in the guest: their number, addresses, MAC addresses and interrupts.
fn functions(guest: &mut Guest, pf: &Pf) -> String {
    let num_vfs = pf.read(guest, "sriov_numvfs");
    let vfs = guest.ok("cd /sys/bus/pci/devices && for vf in $(ls | grep -v 0000:00:); do \
         echo $vf $(cat $vf/virtio*/net/*/address) $(ls $vf/msi_irqs | wc -l) $(md5sum < $vf/config); done");
    format!("{num_vfs}\n{vfs}")
}

/// A bridge for each VF, between its taps at both places.
fn bridges(count: usize) -> Vec<Bridge> {
    let bridge = |index: usize| {
        let ports = [format!("a{index}"), format!("b{index}")];
        Bridge::new(&format!("br{index}"), Subnet(index as u8), &ports.each_ref().map(String::as_str))
    };
    (0..count).map(bridge).collect()
}

/// Enables the VFs, whose interfaces join their networks.
fn enable(guest: &mut Guest, count: usize) -> (Pf, Vec<Vf>) {
    let pf = Pf::find(guest);
    pf.set_num_vfs(guest, count);
    let vfs = pf.vfs(guest);
    for vf in &vfs {
        let subnet = Subnet(vf.index as u8);
        guest.join(vf.interface(), subnet);
        // The bridge forwards frames some time after the tap has a carrier.
        guest.wait_for(&format!("ping -c 1 -W 1 -I {} {}", vf.interface(), subnet.host()));
    }
    (pf, vfs)
}

/// The parts of the downtime, in ms, and what was sent.
fn told(sent: &Value) -> String {
    let part = |name: &str| sent["downtime"][name].as_u64().unwrap() as f64 / 1000.0;
    let parts = ["total", "stop", "save", "send", "load", "handover"]
        .map(|name| format!("{name} {:.1}", part(&format!("{name}_us"))));
    format!(
        "downtime in ms: {}; {} passes, {} bytes, {} pages, {} zero pages",
        parts.join(", "),
        sent["pass"],
        sent["transferred_bytes"],
        sent["pages"],
        sent["zero_pages"]
    )
}

/// The resident memory of a VMM in KiB, including the guest's.
fn memory_of(site: &Site) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", site.guest.vmm().id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A guest with VFs over several kinds of backends under traffic moves to another VMM with other backends and back,
/// repeatedly, without interruption.
#[rstest]
#[ignore = "a longer test: a second kernel, and links that are down in the meantime"]
#[case::linux_6_1_with_vdpa(Kernel::V6_1, &ALL)]
#[ignore = "a longer test: links that are down in the meantime"]
#[case::linux_6_12_with_vdpa(Kernel::V6_12, &ALL)]
#[case::linux_6_12(Kernel::V6_12, &LOGGED)]
fn a_guest_with_vfs_moves_to_another_vmm_and_back_under_traffic(#[case] kernel: Kernel, #[case] kinds: &[Backend]) {
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, kinds));
    let bridges = bridges(kinds.len());
    let mut here = here.boot(kernel, |spec| spec.memory("size=512M"));
    let mut there = there.wait(&[]);
    let (pf, vfs) = enable(&mut here.guest, kinds.len());
    here.guest.ok("head -c 32 /dev/urandom | md5sum > /tmp/nonce; head -c 8000000 /dev/urandom > /tmp/blob");
    let (known, seen) = (memories(&mut here.guest), functions(&mut here.guest, &pf));
    let mut stream = Stream::open(&mut here.guest, Subnet(0));
    stream.assert_alive(b"before\n");
    let subnets: Vec<_> = vfs.iter().map(|vf| Subnet(vf.index as u8)).collect();
    let announcements: Vec<_> = bridges.iter().map(|bridge| Announcements::on(bridge.name())).collect();
    let how = if kinds.contains(&Backend::Vdpa) { json!({"on_unlogged_backend": "link-down"}) } else { json!({}) };
    let mut usage = Vec::new();
    for round in 1..=rounds() {
        let probes = Probes::start(&subnets, PAUSE);
        let sent = if round == 1 {
            let (sent, differing) = here.move_compared_to(&there, &how);
            assert_equal_but_for_the_wall_clock(&differing);
            sent
        } else {
            here.move_to(&there, &how)
        };
        (here, there) = (there, here);
        if round == 1 {
            assert_announced(&announcements);
        }
        stream.assert_alive(format!("after {round}\n").as_bytes());
        probes.await_answers(LONGEST);
        let answers = probes.end();
        let gaps: Vec<_> = answers.iter().map(|answers| answers.gap.as_millis()).collect();
        println!("{round}: {}; ms without an answer: {gaps:?}", told(&sent));
        for (kind, answers) in kinds.iter().zip(&answers) {
            // VFs without a link answer once they have it again.
            let is_live = answers.gap < LONGEST || *kind == Backend::Vdpa;
            assert!(answers.answered > 0 && is_live, "{kind:?}: {answers:?}");
        }
        // In a longer run, most rounds are short.
        if round <= 4 || round % 10 == 0 {
            assert_eq!((memories(&mut here.guest), functions(&mut here.guest, &pf)), (known.clone(), seen.clone()));
        }
        if round % 2 == 0 {
            let now = [&here, &there].map(|site| (Usage::of(site.guest.vmm()), memory_of(site)));
            if round <= 4 || round % 10 == 0 {
                println!("{round}: files and threads, resident KiB: {now:?}");
            }
            usage.push(now);
        }
    }
    for vf in &vfs {
        here.guest.transfer(Subnet(vf.index as u8), BYTES);
    }
    here.guest.assert_kernel_has_no_complaint();
    pf.set_num_vfs(&mut here.guest, 0);
    pf.set_num_vfs(&mut here.guest, kinds.len());
    for site in [&here, &there] {
        assert_eq!(site.guest.vmm().errors(), "", "the VMM printed no errors");
    }
    assert_flat(&usage);
    drop(bridges);
}

/// Asserts that no page differs when the guest is handed over. When the target's KVM gets the guest's
/// `MSR_KVM_WALL_CLOCK`, it writes the time of the guest's boot into the guest's memory again, and a version: 12 bytes.
fn assert_equal_but_for_the_wall_clock(differing: &[Difference]) {
    let is_clock = |difference: &Difference| difference.bytes.len() <= 12;
    assert!(matches!(differing, [] | [_]) && differing.iter().all(is_clock), "pages differ: {differing:?}");
}

/// Asserts that the guest has announced each VF's address at its new place (`VIRTIO_NET_F_GUEST_ANNOUNCE`).
fn assert_announced(announcements: &[Announcements]) {
    for (index, announcements) in announcements.iter().enumerate() {
        let mac = announcements.of(Subnet(index as u8).guest(), LONGEST);
        assert_eq!(mac, Some(vf_mac(index)), "VF {index}");
    }
}

/// Asserts that neither VMM uses more resources at the end than after the first rounds.
fn assert_flat(usage: &[[(Usage, u64); 2]]) {
    let (Some(first), Some(last)) = (usage.get(1).or(usage.first()), usage.last()) else { return };
    for ((before, memory), (after, grown)) in first.iter().zip(last) {
        assert!(after.files <= before.files && after.threads <= before.threads, "{before:?} became {after:?}");
        // This includes the guest's memory, which grows with the pages that the guest touches.
        assert!(*grown < memory + (32 << 10), "{memory} KiB became {grown} KiB");
    }
}

/// Failure in the middle of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Harm {
    /// The connections are lost.
    Cut,
    /// A client ends it at the source.
    Cancel,
    /// The target is killed.
    TargetDies,
    /// The process that serves the vhost-user VF at the target is killed.
    PeerOfTargetDies,
    /// Death of the peer at the source.
    PeerOfSourceDies,
}

/// The migration of a guest with VFs over three kinds of backends fails: whatever the fault and its time, all VFs carry
/// traffic at the source. The last attempt succeeds.
#[test]
#[ignore = "a longer test: some twenty migrations that fail"]
fn vfs_carry_traffic_at_the_source_whatever_ends_a_migration() {
    const KINDS: [Backend; 3] = [Backend::Tap, Backend::VhostNet, Backend::VhostUser];
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, &KINDS));
    let bridges = bridges(KINDS.len());
    let mut here = here.boot(Kernel::V6_12, |spec| spec);
    let mut there = there.wait(&[]);
    let (_, vfs) = enable(&mut here.guest, KINDS.len());
    let mut stream = Stream::open(&mut here.guest, Subnet(0));
    for harm in [Harm::Cut, Harm::Cancel, Harm::TargetDies, Harm::PeerOfTargetDies, Harm::PeerOfSourceDies] {
        // While preparing, copying, after the first pass, once paused, and when the target has everything.
        for point in [Point::Frame(1, 0), Point::Frame(3, 0), Point::Frame(4, 0), Point::Frame(5, 0), Point::READY] {
            let wire = here.send_until(&there, point, &json!({}));
            let then = match harm {
                Harm::Cut => Then::IsCut,
                Harm::Cancel => {
                    assert_eq!(here.api.put("vm.cancel-migration").status, 204);
                    Then::IsCut
                }
                Harm::TargetDies => {
                    there.guest.vmm().signal(libc::SIGKILL);
                    Then::IsCut
                }
                Harm::PeerOfTargetDies => {
                    there.backends.kill_vhost_user();
                    Then::Passes
                }
                Harm::PeerOfSourceDies => {
                    here.backends.kill_vhost_user();
                    Then::Passes
                }
            };
            wire.goes(then);
            let ended = here.ended();
            println!("{harm:?} at {point:?}: {} {}", ended["state"], ended["error"]);
            match harm {
                Harm::TargetDies => there.restart(),
                Harm::PeerOfTargetDies => there.backends.start_vhost_user(&[]),
                Harm::PeerOfSourceDies => here.backends.start_vhost_user(&[]),
                _ => assert!(there.ended()["state"] != "finished"),
            }
            if ended["state"] == "finished" {
                assert!(matches!(harm, Harm::PeerOfTargetDies | Harm::PeerOfSourceDies), "{ended}");
                (here, there) = (there, here);
            }
            here.api.await_lost(2, false);
            for vf in &vfs {
                here.guest.ping(vf.interface(), Subnet(vf.index as u8));
            }
            stream.assert_alive(b"still\n");
        }
    }
    here.move_to(&there, &json!({}));
    (here, there) = (there, here);
    for vf in &vfs {
        here.guest.transfer(Subnet(vf.index as u8), BYTES);
    }
    here.guest.assert_kernel_has_no_complaint();
    drop((there, bridges));
}

/// Requests that the backend has accepted may complete after the memory was copied.
#[test]
#[ignore = "a longer test: a unit test shows what the backend receives"]
fn a_guest_whose_backend_hangs_at_the_stop_stays_at_the_source() {
    const KINDS: [Backend; 1] = [Backend::VhostUser];
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, &KINDS));
    let bridges = bridges(KINDS.len());
    let mut here = here.boot(Kernel::V6_12, |spec| spec);
    let there = there.wait(&[]);
    let (_, vfs) = enable(&mut here.guest, KINDS.len());
    let wire = here.send_until(&there, Point::Frame(3, 0), &json!({}));
    here.backends.vhost_user().signal(libc::SIGSTOP);
    wire.goes(Then::Passes);
    let ended = here.ended();
    assert!(ended["error"].to_string().contains("may still write to the guest's memory"), "{ended}");
    here.backends.vhost_user().signal(libc::SIGCONT);
    there.ended();
    here.api.await_lost(0, false);
    here.guest.ping(vfs[0].interface(), Subnet(0));
    here.move_to(&there, &json!({}));
    let mut guest = there.guest;
    guest.ping(vfs[0].interface(), Subnet(0));
    drop((here.guest, bridges));
}
