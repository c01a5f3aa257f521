//! Live migration between two VMMs on one host, which passes the guest's memory.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::migration::peer::{Ends, Target};
use crate::migration::storage::{DATA, requesting};
use crate::migration::{config, counts, dots, is_still, receive, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, reasons, wait_for};

/// A VMM whose guest counts in memory that can be passed. It keeps running without its guest.
fn source() -> (Vmm, Client) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let mut config = config(&vmm);
    config["memory"]["shared"] = json!(true);
    let client = vmm.boot_config(&config);
    wait_for("the guest", || dots(&vmm) > 2);
    (vmm, client)
}

fn send(client: &mut Client, url: &str) {
    client.put_json("vm.send-migration", &json!({"destination_url": url, "local": true})).expect(204);
}

#[test]
fn a_local_migration_passes_the_memory_and_sends_no_page() {
    let (source, mut client) = source();
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let target = Vmm::of(command);
    let mut there = receive(&target, &url(&target));
    for turn in 0..4 {
        let (from, to, here, other) = match turn % 2 {
            0 => (&source, &target, &mut client, &mut there),
            _ => (&target, &source, &mut there, &mut client),
        };
        if turn > 0 {
            *other = receive(to, &url(to));
        }
        send(here, &url(to));
        wait_for_state(other, "finished");
        let sent = wait_for_state(here, "finished");
        println!("{sent}");
        assert_eq!((&sent["pages"], &sent["zero_pages"]), (&json!(0), &json!(0)), "{sent}");
        assert!(counts(to) && is_still(from));
    }
    // The source owns everything: it no longer depends on the target.
    drop(target);
    assert!(counts(&source));
    client.put("vm.reboot").expect(204);
    assert!(counts(&source));
}

#[test]
fn whatever_fails_leaves_the_guest_with_its_memory_where_it_was() {
    let (vmm, mut client) = source();
    // No pages are sent, so none can fail.
    let before_go = Ends::BEFORE_GO.into_iter().filter(|ends| *ends != Ends::DuringPages);
    for ends in before_go.chain([Ends::FailsAfterGo]) {
        let _ = fs::remove_file(vmm.files.path("migration"));
        let _target = Target::listen(&vmm.files.path("migration"), ends);
        send(&mut client, &url(&vmm));
        let ended = wait_for_state(&mut client, "failed");
        assert!(!ended["error"].as_str().unwrap().is_empty() && counts(&vmm), "{ends:?}: {ended}");
    }
    // A target that has loaded everything is killed before it gets Go, or cannot create the VM.
    let target = Vmm::start();
    fs::create_dir(target.files.path("serial")).unwrap();
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "failed");
    wait_for_state(&mut client, "failed");
    assert!(counts(&vmm));
    let other = Vmm::start();
    let mut there = receive(&other, &url(&other));
    send(&mut client, &url(&other));
    wait_for_state(&mut there, "finished");
    assert!(counts(&other));
}

#[test]
fn memory_that_is_private_to_a_program_is_not_passed() {
    let (_vmm, mut client) = crate::migration::source();
    let answer = client.put_json("vm.send-migration", &json!({"destination_url": "unix:/m", "local": true}));
    assert!(reasons(&answer)[1].contains("start it with --memory shared=on"), "{answer:?}");
    answer.expect(409);
}

/// A numeric property of a host interface.
fn of_interface(name: &str, what: &str) -> u64 {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/{what}")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Taps with one queue, which two programs could not open by name, and one with two.
#[test]
fn taps_go_over_as_they_are_and_carry_frames_before_and_after() {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let source = Vmm::of(command);
    let mut config = config(&source);
    config["memory"]["shared"] = json!(true);
    config["net"] = json!([
        {"id": "pf0", "tap": "apilocal", "sriov_vfs": 2, "pci_device_id": 5},
        {"id": "wide", "tap": "apilocalw", "num_queues": 4},
    ]);
    // A broadcast frame of an experimental type, after a header of zeros.
    let frame = requesting(5, &[0, 1], &[(DATA, 72, 0, 0)], |code| {
        code.dword(DATA + 12, u32::MAX).dword(DATA + 16, 0x0002_ffff).dword(DATA + 20, 0).dword(DATA + 24, 0xb588_0000)
    });
    config["payload"]["kernel"] = json!(source.files.kernel(&frame));
    let mut client = source.boot_config(&config);
    let names = ["apilocal", "apilocalv0", "apilocalv1", "apilocalw"];
    let numbers = || names.map(|name| of_interface(name, "ifindex"));
    let (before, frames) = (numbers(), || of_interface("apilocal", "statistics/rx_packets"));
    assert!(before.iter().all(|number| *number > 0), "{before:?}");
    wait_for("frames", || frames() > 100);
    let target = Vmm::start();
    // Without the descriptors, it could not open the source's taps.
    let mut there = receive(&target, &url(&target));
    client.put_json("vm.send-migration", &json!({"destination_url": url(&target)})).expect(204);
    let ended = wait_for_state(&mut client, "failed");
    let error = ended["error"].as_str().unwrap();
    assert!(error.contains("apilocal is in use by another process; if the source runs on this host"), "{error}");
    assert!(error.contains("local=on") && error.contains("backends=[pf0@tap="), "{error}");
    wait_for_state(&mut there, "failed");
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    wait_for_state(&mut client, "finished");
    let after = frames();
    wait_for("frames at the target", || frames() > after + 100);
    assert_eq!(numbers(), before);
    drop(source);
    let after = frames();
    wait_for("frames without the source", || frames() > after + 100);
    assert_eq!(numbers(), before);
    assert_eq!(there.get("vm.info").expect(200)["config"]["net"][0]["tap"], "apilocal");
    drop(target);
    wait_for("the end of the taps", || numbers() == [0; 4]);
}

/// True if a client at `path` receives the marks of the guest that counts.
fn serves(path: &Path) -> bool {
    let mut client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut marks = [0; 4];
    client.read_exact(&mut marks).is_ok() && !marks.contains(&b'!')
}

/// Each program ends by itself once its guest has gone, and must leave the sockets to the next one.
#[test]
fn vsock_and_console_sockets_keep_their_paths_over_two_upgrades() {
    let first = Vmm::start();
    let names = ["serial.sock", "console.sock", "vsock.sock"];
    let paths: Vec<PathBuf> = names.iter().map(|name| first.files.path(name)).collect();
    let mut config = config(&first);
    config["memory"]["shared"] = json!(true);
    config["serial"] = json!({"mode": "Socket", "socket": paths[0]});
    config["console"] = json!({"mode": "Socket", "socket": paths[1]});
    config["vsock"] = json!({"cid": 3, "socket": paths[2]});
    let mut client = first.boot_config(&config);
    let inodes = || paths.iter().map(|path| fs::symlink_metadata(path).map(|file| file.ino()).ok()).collect::<Vec<_>>();
    let before = inodes();
    assert!(before.iter().all(Option::is_some) && serves(&paths[0]), "{before:?}");
    // Without local, the target cannot listen there, and is shown the way.
    let other = Vmm::start();
    let mut there = receive(&other, &url(&other));
    client.put_json("vm.send-migration", &json!({"destination_url": url(&other)})).expect(204);
    let ended = wait_for_state(&mut client, "failed");
    assert!(
        ended["error"].as_str().unwrap().contains("if the source runs on this host, send with local=on"),
        "{ended}"
    );
    wait_for_state(&mut there, "failed");
    drop(other);
    // A target that fails leaves them where they were.
    let target = Target::listen(&first.files.path("migration"), Ends::FailsAfterGo);
    send(&mut client, &url(&first));
    wait_for_state(&mut client, "failed");
    drop(target);
    assert!(inodes() == before && serves(&paths[0]));
    let mut vmms = vec![first];
    for turn in 0..2 {
        let next = Vmm::start();
        let mut there = receive(&next, &url(&next));
        send(&mut client, &url(&next));
        wait_for_state(&mut there, "finished");
        let last = vmms.last_mut().unwrap();
        assert!(last.ended().success(), "turn {turn}");
        assert_eq!(inodes(), before, "turn {turn}");
        assert!(serves(&paths[0]), "turn {turn}");
        for path in &paths {
            drop(UnixStream::connect(path).unwrap());
        }
        vmms.push(next);
        client = there;
    }
    client.put("vm.reboot").expect(204);
    assert!(inodes() == before && serves(&paths[0]));
    client.put("vm.delete").expect(204);
    assert_eq!(inodes(), [None; 3]);
}
