//! Live migration of a VM with a backend that cannot report its writes to the guest's memory.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread::spawn;

use serde_json::{Value, json};

use crate::migration::peer::{Ends, Target};
use crate::migration::{begin_to_receive, receive_by};
use crate::migration_wire::{Point, Then, Wire};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

const GET_FEATURES: u32 = 1;
/// VIRTIO_F_VERSION_1, and no protocol features: no dirty log.
const FEATURES: u64 = 1 << 32;

/// A vhost-user backend without a dirty log, for a NIC without a driver.
fn peer(path: PathBuf) -> PathBuf {
    let listener = UnixListener::bind(&path).unwrap();
    spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut header = [0; 12];
            while stream.read_exact(&mut header).is_ok() {
                let [request, _, len] = [0, 4, 8].map(|at| u32::from_ne_bytes(*header[at..].first_chunk().unwrap()));
                stream.read_exact(&mut vec![0; len as usize]).unwrap();
                if request == GET_FEATURES {
                    let answer = [1u32, 5, 8].iter().flat_map(|word| word.to_ne_bytes());
                    let answer: Vec<_> = answer.chain(FEATURES.to_ne_bytes()).collect();
                    let _ = stream.write_all(&answer);
                }
            }
        }
    });
    path
}

/// A VMM that keeps running without its guest. VF 1 has such a backend.
fn source(tap: &str) -> (Vmm, Client) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let socket = peer(vmm.files.path("peer"));
    let net = json!([{"id": "pf0", "tap": tap, "sriov_vfs": 2,
        "vfs": [{"index": 1, "vhost_user": true, "vhost_socket": socket}]}]);
    let client = vmm.boot_shared(net);
    (vmm, client)
}

fn link(client: &mut Client, index: usize) -> String {
    client.get("vm.info").expect(200)["sriov"][0]["vfs"][index]["link"].as_str().unwrap().to_string()
}

fn end(client: &mut Client) -> Value {
    let mut last = Value::Null;
    wait_for("the end of the migration", || {
        last = client.get("vm.migration-progress").expect(200);
        last["state"] != "active"
    });
    last
}

#[test]
fn an_unlogged_backend_needs_link_down_which_a_failure_undoes() {
    let (vmm, mut client) = source("unlogga");
    let path = vmm.files.path("migration");
    let mut body = json!({"destination_url": format!("unix:{}", path.display())});
    let target = Target::listen(&path, Ends::AfterState);
    client.put_json("vm.send-migration", &body).expect(204);
    let refused = end(&mut client);
    let error = refused["error"].as_str().unwrap();
    assert!(error.contains("--net-vf pf=pf0,index=1") && error.contains("on_unlogged_backend=link-down"), "{error}");
    drop(target);
    body["on_unlogged_backend"] = json!("link-down");
    for ends in [Ends::AfterState, Ends::FailsToLoad, Ends::DuringPages] {
        fs::remove_file(&path).unwrap();
        let _target = Target::listen(&path, ends);
        client.put_json("vm.send-migration", &body).expect(204);
        assert_eq!(end(&mut client)["state"], "failed", "{ends:?}");
        wait_for("the link", || link(&mut client, 1) == "up");
    }
    fs::remove_file(&path).unwrap();
    let _target = Target::listen(&path, Ends::Slow);
    // Its end is held back, so that there is a migration to cancel.
    let between = vmm.files.path("wire");
    let wire = Wire::new(&between, &path, &[Point::READY]);
    body["destination_url"] = json!(format!("unix:{}", between.display()));
    client.put_json("vm.send-migration", &body).expect(204);
    wait_for("the link to go down", || link(&mut client, 1) == "down");
    assert_eq!(link(&mut client, 0), "up", "others continue");
    client.put("vm.cancel-migration").expect(204);
    end(&mut client);
    wire.goes(Then::IsCut);
    wait_for("the link", || link(&mut client, 1) == "up");
}

#[test]
fn at_the_target_the_link_is_up() {
    let (vmm, mut client) = source("unloggb");
    let target = Vmm::start();
    let url = format!("unix:{}", vmm.files.path("migration").display());
    let other = peer(target.files.path("peer"));
    let backends = json!([{"id": "pf0", "tap": "unlogh"}, {"id": "pf0", "vf": 0, "tap": "unlogi"},
        {"id": "pf0", "vf": 1, "vhost_socket": other}]);
    let mut there = receive_by(&target, &json!({"receiver_url": url, "backends": backends}));
    let body = json!({"destination_url": url, "on_unlogged_backend": "link-down"});
    client.put_json("vm.send-migration", &body).expect(204);
    assert_eq!(end(&mut client)["state"], "finished");
    wait_for("the guest", || there.get("vm.info").status == 200);
    assert_eq!((link(&mut there, 0), link(&mut there, 1)), ("up".to_string(), "up".to_string()));
}

#[test]
fn a_backend_missing_at_the_target_is_refused_or_attached_later() {
    let (vmm, mut client) = source("unloggc");
    let target = Vmm::start();
    let url = format!("unix:{}", vmm.files.path("migration").display());
    let mut given = json!({"receiver_url": url, "backends": [{"id": "pf0", "tap": "unlogj"},
        {"id": "pf0", "vf": 0, "tap": "unlogk"}, {"id": "pf0", "vf": 1, "vhost_socket": "/nonexistent/s"}]});
    let body = json!({"destination_url": url, "on_unlogged_backend": "link-down"});
    let mut there = target.client();
    begin_to_receive(&mut there, &given);
    client.put_json("vm.send-migration", &body).expect(204);
    let failed = end(&mut client);
    assert_eq!((&failed["state"], &failed["pages"]), (&json!("failed"), &json!(0)), "{failed}");
    end(&mut there);
    given["on_missing_backend"] = json!("link-down");
    begin_to_receive(&mut there, &given);
    client.put_json("vm.send-migration", &body).expect(204);
    assert_eq!(end(&mut client)["state"], "finished");
    wait_for("the guest", || there.get("vm.info").status == 200);
    assert_eq!((link(&mut there, 0), link(&mut there, 1)), ("up".to_string(), "down".to_string()));
    there.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 1, "tap": "unlogl"})).expect(204);
    assert_eq!(link(&mut there, 1), "up");
}
