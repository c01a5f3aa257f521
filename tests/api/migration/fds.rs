//! Live migration of a VM whose NICs have taps by descriptors: a plain NIC, and a VF. The target gets other descriptors
//! with the request (SCM_RIGHTS), or the migration is refused.

use std::os::fd::OwnedFd;
use std::process::Command;

use serde_json::{Value, json};

use crate::migration::{progress, send, url, wait_for_state};
use crate::net::tap::{self, Queues};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, reasons, taps, wait_for};

/// A VMM that keeps running without its guest.
fn vmm() -> Vmm {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    Vmm::of(command)
}

/// The queues of new taps of these names.
fn queues(names: &[&str]) -> Vec<OwnedFd> {
    names.iter().map(|name| tap::queue(name, Queues::One)).collect()
}

/// Makes the target wait for a guest whose NICs have these backends.
fn receive(target: &Vmm, net_fds: &Value, backends: &Value, fds: &[OwnedFd]) -> Client {
    let mut client = target.client();
    let body = json!({"receiver_url": url(target), "detach": true, "net_fds": net_fds, "backends": backends});
    client.ask("PUT", "vm.receive-migration", Some(&body), fds).expect(204);
    client
}

/// The kinds of backends of the plain NIC and of VF 1.
fn kinds(client: &mut Client) -> [Value; 2] {
    let info = client.get("vm.info").expect(200);
    let nic = info["nics"].as_array().unwrap().iter().find(|nic| nic["id"] == "n").unwrap();
    [&nic["backend"]["kind"], &info["sriov"][0]["vfs"][1]["backend"]["kind"]].map(Value::clone)
}

#[test]
fn taps_by_descriptor_come_to_the_target_with_its_request() {
    let (source, target) = (vmm(), vmm());
    let mut client = source.boot(json!([{"id": "pf0", "tap": "mfda", "sriov_vfs": 2}]));
    client.ask("PUT", "vm.add-net", Some(&json!({"id": "n"})), &queues(&["mfdan"])).expect(200);
    assert_eq!(kinds(&mut client), ["fd", "tap"]);
    // After its first reply, its server has all of its own files.
    target.client().get("vmm.ping").expect(200);
    let files = target.open_files();

    // Announced, and not sent: refused at once.
    let one = json!([{"id": "n", "num_fds": 1}]);
    let body = json!({"receiver_url": url(&target), "net_fds": one});
    for fds in [Vec::new(), queues(&["mfdx", "mfdy"])] {
        let answer = target.client().ask("PUT", "vm.receive-migration", Some(&body), &fds);
        let said = reasons(&answer).join(": ");
        let expected = format!("1 descriptors are announced (num_fds), and {} came with the request", fds.len());
        assert!(answer.status == 400 && said.contains(&expected) && !said.contains('\n'), "{answer:?}");
    }
    // A mismatch with the guest is detected when the guest arrives.
    let other_taps = json!([{"id": "pf0", "tap": "mfdb"}]);
    for (net_fds, given, expected) in [
        (json!([]), vec![], "net_fds: n had 1 descriptors of taps; give it as many (net_fds=[n@[<fd>,...]])"),
        (json!([{"id": "n", "num_fds": 2}]), vec!["mfdx", "mfdy"], "net_fds n: it had 1 descriptors, and is given 2"),
        (json!([{"id": "m", "num_fds": 1}]), vec!["mfdx"], "net_fds m: the saved VM has no such NIC with descriptors"),
        (
            json!([{"id": "pf0", "vf": 0, "num_fds": 1}]),
            vec!["mfdx"],
            "net_fds pf0/0: the saved VM has no such NIC with descriptors",
        ),
    ] {
        let mut there = receive(&target, &net_fds, &other_taps, &queues(&given));
        send(&mut client, &url(&target));
        let here = wait_for_state(&mut client, "failed");
        let failed = wait_for_state(&mut there, "failed");
        for ended in [&here, &failed] {
            let error = ended["error"].as_str().unwrap();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
        there.get("vm.info").expect(404);
        assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
        // Unused descriptors are closed.
        wait_for("the end of the taps", || taps("mfdx").is_empty() && taps("mfdy").is_empty());
    }
    wait_for("its files", || target.open_files() <= files + 1);

    // A VF with a tap by name can get descriptors, too: those of `net_fds` come first.
    let backends = json!([
        {"id": "pf0", "vf": 1, "num_fds": 1}, {"id": "pf0", "tap": "mfdb"}, {"id": "pf0", "vf": 0, "tap": "mfdbnul"}
    ]);
    let mut there = receive(&target, &one, &backends, &queues(&["mfdbn", "mfdbvf"]));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    wait_for_state(&mut client, "finished");
    assert_eq!(kinds(&mut there), ["fd", "fd"]);
    wait_for("the end of the source's taps", || taps("mfda").is_empty());
    assert_eq!(taps("mfdb"), ["mfdb", "mfdbn", "mfdbnul", "mfdbvf"]);

    // Back again: that VF has descriptors now, and needs some.
    let backends = json!([{"id": "pf0", "tap": "mfda"}, {"id": "pf0", "vf": 0, "tap": "mfdanul"}]);
    let mut here = receive(&source, &one, &backends, &queues(&["mfdan"]));
    send(&mut there, &url(&source));
    let failed = wait_for_state(&mut there, "failed");
    assert!(failed["error"].as_str().unwrap().contains("net_fds: pf0/1 had 1 descriptors of taps"), "{failed}");
    wait_for("the target", || progress(&mut here)["state"] == "failed");
    wait_for("the end of the tap", || taps("mfdan").is_empty());
    let both = json!([{"id": "n", "num_fds": 1}, {"id": "pf0", "vf": 1, "num_fds": 1}]);
    let mut here = receive(&source, &both, &backends, &queues(&["mfdan", "mfdavf"]));
    send(&mut there, &url(&source));
    wait_for_state(&mut here, "finished");
    wait_for_state(&mut there, "finished");
    assert_eq!(kinds(&mut here), ["fd", "fd"]);
    wait_for("the end of the taps", || taps("mfdb").is_empty());
    assert_eq!(taps("mfda"), ["mfda", "mfdan", "mfdanul", "mfdavf"]);
}
