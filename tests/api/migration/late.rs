//! Live migrations that are ended on their way: before the target replies, over a slow network, while a disk is handed
//! over.

use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::migration::chaos::{Harm, Moving, TO_OTHERS, assert_runs, ended};
use crate::migration::storage::{locks, raw_image, source as disk_source, writes};
use crate::migration::{counts, progress, receive, send, source, url, wait_for_state, writer};
use crate::migration_wire::{Point, Then, Wire};
use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, wait_for};

/// Maximum downtime of a cancelled guest (acceptance A8), on a busy machine.
const CANCEL: Duration = Duration::from_secs(6);

/// Ends a migration at its source, and returns how long that took.
fn cancel(client: &mut Client) -> Duration {
    let began = Instant::now();
    client.put("vm.cancel-migration").expect(204);
    wait_for_state(client, "cancelled");
    began.elapsed()
}

#[test]
fn a_cancel_ends_a_migration_without_a_receiver() {
    let (vmm, mut client) = source();
    let path = vmm.files.path("migration");
    for (phase, room) in [("connecting", 0), ("greeting", 16)] {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, room).unwrap();
        // It is never accepted, and there is no room for another.
        let _fills = (room == 0).then(|| UnixStream::connect(&path).unwrap());
        send(&mut client, &url(&vmm));
        wait_for(phase, || progress(&mut client)["phase"] == phase);
        thread::sleep(Duration::from_millis(200));
        let took = cancel(&mut client);
        println!("{phase}: {took:?}");
        assert!(took < CANCEL && counts(&vmm), "{phase}: {took:?}");
    }
}

#[test]
fn a_guest_stays_at_its_source_if_a_slow_migration_ends_early() {
    // It keeps writing to 32 MiB, and 4 MiB/s are sent.
    let (vmm, mut client) = writer();
    for harm in TO_OTHERS {
        let slow = |path: &std::path::Path, target: &std::path::Path, points: &[Point]| {
            Wire::slow(path, target, points, 4 << 20)
        };
        // In the middle of the first pass.
        let mut moving = Moving::over(&vmm, &mut client, Point::Frame(3, 4), slow);
        assert_eq!(progress(&mut client)["phase"], "copying");
        moving.harm(harm, &mut client);
        let last = ended(&mut client);
        assert!(["cancelled", "failed"].contains(&last["state"].as_str().unwrap()), "{harm:?}: {last}");
        moving.wire.goes(Then::IsCut);
        assert_eq!(client.get("vm.info").expect(200)["state"], "Running", "{harm:?}");
        if harm != Harm::KillsTarget {
            wait_for("the target", || progress(&mut moving.there)["state"] != "active");
            moving.there.get("vm.info").expect(404);
        }
    }
}

#[test]
fn a_guest_that_writes_little_goes_over_a_slow_network() {
    let (vmm, mut client) = source();
    let slow = |path: &std::path::Path, target: &std::path::Path, points: &[Point]| {
        Wire::slow(path, target, points, 256 << 10)
    };
    let mut moving = Moving::over(&vmm, &mut client, Point::READY, slow);
    moving.wire.goes(Then::Passes);
    wait_for_state(&mut moving.there, "finished");
    println!("{}", wait_for_state(&mut client, "finished"));
    assert_runs(&moving.target, &vmm, "a slow network");
}

#[test]
fn a_source_keeps_disk_and_lock_if_the_handover_ends_early() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = raw_image(&folder);
    let (vmm, mut client) = disk_source(&disk);
    for (point, harm) in [
        (Point::READY, Harm::CancelsSource),
        (Point::READY, Harm::CancelsTarget),
        (Point::READY, Harm::KillsTarget),
        // The lock is released, and not taken yet.
        (Point::GO, Harm::CancelsTarget),
    ] {
        let mut moving = Moving::to(&vmm, &mut client, point);
        assert_eq!(locks(&path), point == Point::GO, "{point:?}");
        moving.harm(harm, &mut client);
        let last = ended(&mut client);
        assert!(["cancelled", "failed"].contains(&last["state"].as_str().unwrap()), "{point:?} {harm:?}: {last}");
        moving.wire.goes(Then::IsCut);
        assert!(writes(&vmm) && !locks(&path), "{point:?} {harm:?}: {last}");
    }
    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert!(writes(&target) && !locks(&path));
}
