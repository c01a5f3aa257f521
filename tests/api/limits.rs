//! A VM stays within its limit of open files, even when its guest uses all its devices, and within the limit of their
//! size.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::rig::client::{Client, MOST_FDS};
use crate::rig::driven::Driven;
use crate::rig::vmm::{BINARY, Vmm, reasons, wait_for};

/// Descriptors per function: a tap, a doorbell and 4 interrupts.
const OF_FUNCTION: usize = 6;

/// 1024 is the usual limit of a login session.
#[test]
fn sixty_four_vfs_fit_into_1024_open_files() {
    let vmm = Vmm::limited(1024);
    vmm.boot(json!([{"id": "pf0", "tap": "alf", "sriov_vfs": 64}]));
    // So far each function has only its tap. It gets the other descriptors when its driver is initialized.
    let open = vmm.open_files();
    assert!((65..120).contains(&open), "{open}");
    assert!(open + 65 * (OF_FUNCTION - 1) <= 1024 / 2, "{open}");
}

/// Descriptors for reserved VFs are kept for them.
#[test]
fn an_added_pf_does_not_take_the_files_that_other_vfs_may_need() {
    let vmm = Vmm::limited(1300);
    let mut client = vmm.boot(json!([{"id": "pf0", "tap": "alg", "sriov_vfs": 64}]));
    let mut add = |id, tap| client.put_json("vm.add-net", &json!({"id": id, "tap": tap, "sriov_vfs": 64}));
    add("pf1", "alh").expect(200);
    let refused = add("pf2", "ali");
    let said = reasons(&refused).join(": ");
    assert!(refused.status == 500 && said.contains("the limit is 1300"), "{said}");
}

/// accept(2) fails without a free descriptor, whether a client waits or not.
#[test]
fn idle_clients_leave_a_descriptor_for_the_next_one() {
    let vmm = Vmm::limited(40);
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..60 {
        let mut client = vmm.client();
        // The program has accepted this client, and waits for the next one.
        std::thread::sleep(Duration::from_millis(10));
        client.get("vmm.ping").expect(200);
        client.get("vmm.ping").expect(200);
        clients.push(client);
    }
}

/// With the limit that the program itself sets, and the most that clients can use.
#[test]
fn files_of_clients_leave_enough_for_vfs() {
    let net = json!([{"id": "pf0", "tap": "alj", "sriov_vfs": 64}]);
    let vmm = Vmm::limited(600);
    let mut client = vmm.client();
    client.put_json("vm.create", &vmm.config(net.clone())).expect(204);
    let said = reasons(&client.put("vm.boot")).join(": ");
    let needed = said.split_once("needs up to ").and_then(|(_, rest)| rest.split(' ').next()).unwrap();
    let needed: usize = needed.parse().unwrap();
    drop((client, vmm));

    let vmm = Vmm::limited(needed as u64);
    drop(vmm.boot(net));
    let descriptor = || OwnedFd::from(File::open("/dev/null").unwrap());
    let descriptors: Vec<_> = (0..MOST_FDS).map(|_| descriptor()).collect();
    let mut idle: Vec<Client> = (0..127).map(|_| vmm.client()).collect();
    // Incomplete requests, with more descriptors than all clients may have together.
    for client in idle.iter_mut().rev().take(100) {
        client.send(b"P", &descriptors);
    }
    let mut most = 0;
    wait_for("what clients can take", || {
        most = vmm.open_files().max(most);
        most > 127 + 250
    });
    for _ in 0..100 {
        most = vmm.open_files().max(most);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(most + 65 * (OF_FUNCTION - 1) <= needed, "{most} files are open, and {needed} were asked for");
}

/// The program, with a file size limit of `blocks` blocks of 512 bytes (`LimitFSIZE=`).
fn with_small_files(blocks: u64) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -f {blocks} && exec \"$@\""), "sh", BINARY]);
    command
}

#[test]
fn a_snapshot_over_the_file_size_limit_fails_and_the_vm_resumes() {
    // 1 MiB, while the guest has 64 MiB.
    let vmm = Vmm::of(with_small_files(2048));
    let mut client = vmm.boot(json!([]));
    client.put("vm.pause").expect(204);
    let path = vmm.files.path("saved");
    fs::create_dir(&path).unwrap();
    let answer = client.put_json("vm.snapshot", &json!({"destination_url": format!("file://{}", path.display())}));
    let said = reasons(&answer).join(": ");
    assert!(answer.status == 500 && said.contains("File too large"), "{answer:?}");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    client.put("vm.resume").expect(204);
    client.put("vmm.shutdown").expect(200);
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn an_image_over_the_file_size_limit_fails_like_a_full_disk() {
    // An image without data takes 192 KiB and some bytes, and the first write takes another cluster of 64 KiB.
    let driven = Driven::start(with_small_files(400), "limfs0", &json!({}));
    let log = driven.vmm.files.path("log");
    let failed = |line: &str| line.contains("qcow2") && line.contains("File too large");
    wait_for("the report", || fs::read_to_string(&log).unwrap().lines().any(failed));
    let Driven { vmm, mut client } = driven;
    client.put("vmm.shutdown").expect(200);
    assert_eq!(vmm.end(), Some(0));
}
