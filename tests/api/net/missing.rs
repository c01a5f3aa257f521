//! Functions whose backends are missing when their VM is restored or received, and that get one later.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::net::tap::{self, Queues};
use crate::rig::client::{Answer, Client};
use crate::rig::vmm::{BINARY, Vmm, reasons, taps, wait_for};

/// A snapshot of a paused VM, since deleted, with a PF and VFs over taps whose names begin with `tap`. VF 1 has one
/// that cannot be created.
fn saved(vmm: &Vmm, tap: &str, vfs: &Value) -> (PathBuf, String) {
    let path = vmm.files.path("saved");
    fs::create_dir(&path).unwrap();
    let url = format!("file://{}", path.display());
    let net = json!([{"id": "pf0", "tap": tap, "sriov_vfs": 3, "vfs": vfs}]);
    let mut client = vmm.boot(net);
    client.put("vm.pause").expect(204);
    client.put_json("vm.snapshot", &json!({"destination_url": url})).expect(204);
    client.put("vm.delete").expect(204);
    (path, url)
}

fn said(answer: &Answer) -> String {
    let said = reasons(answer).join(": ");
    assert!(!said.contains('\n'), "{said}");
    said
}

fn vf(client: &mut Client, index: usize) -> Value {
    client.get("vm.info").expect(200)["sriov"][0]["vfs"][index].clone()
}

/// A program that writes its events to the file `events`.
fn with_events(folder: &Vmm) -> Vmm {
    let mut command = Command::new(BINARY);
    command.arg("--event-monitor").arg(format!("path={}", folder.files.path("events").display()));
    Vmm::of(command)
}

fn events(folder: &Vmm) -> String {
    fs::read_to_string(folder.files.path("events")).unwrap_or_default()
}

#[test]
fn a_vf_with_a_missing_backend_restores_down_and_gets_one_later() {
    let source = Vmm::start();
    let (_, url) = saved(&source, "missa", &json!([{"index": 1, "vhost_user": false, "tap": "missaone"}]));
    // Another program has the tap of VF 1 now.
    let other = tap::queue("missaone", Queues::One);
    let target = with_events(&source);
    let mut client = target.client();
    let mut body = json!({"source_url": url, "resume": true});
    let refused = client.put_json("vm.restore", &body);
    assert!(refused.status >= 400 && said(&refused).contains("index=1"), "{refused:?}");
    body["on_missing_backend"] = json!("link-down");
    client.put_json("vm.restore", &body).expect(204);
    let (first, missing) = (vf(&mut client, 0), vf(&mut client, 1));
    assert_eq!((&first["backend"]["kind"], &first["link"]), (&json!("tap"), &json!("up")));
    assert_eq!((&missing["backend"]["kind"], &missing["link"]), (&json!("missing"), &json!("down")));
    assert!(missing["backend"]["error"].as_str().unwrap().contains("missaone"), "{missing}");
    wait_for("the event", || events(&source).contains("\"vf-degraded\"") && events(&source).contains("missaone"));
    let shown = Command::new(env!("CARGO_BIN_EXE_ch-remote"))
        .args([std::ffi::OsStr::new("--api-socket"), target.socket().as_os_str(), "vfs".as_ref()])
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.lines().any(|line| line.contains("missing (") && line.contains("missaone")), "{shown}");
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/guide/no-traffic.md")).unwrap();
    assert!(page.contains("| `missing` |"), "the page about no traffic names it");
    let counters = client.get("vm.counters").expect(200);
    assert!(counters["pf0"].get("rx_frames").is_some());

    let give = |tap: &str| json!({"pf": "pf0", "index": 1, "tap": tap});
    let busy = client.put_json("vm.set-vf", &give("missaone"));
    assert!(busy.status >= 400 && said(&busy).contains("missaone"), "{busy:?}");
    assert_eq!(vf(&mut client, 1)["backend"]["kind"], "missing");
    let used = client.put_json("vm.set-vf", &give("missa"));
    assert_eq!(used.status, 409, "{used:?}");
    client.put_json("vm.set-vf", &give("missatwo")).expect(204);
    let given = vf(&mut client, 1);
    assert_eq!((&given["backend"]["name"], &given["link"]), (&json!("missatwo"), &json!("up")));
    wait_for("the event", || events(&source).contains("\"vf-attached\""));
    let again = client.put_json("vm.set-vf", &give("missathree"));
    assert_eq!((again.status, said(&again).contains("it has a backend (missatwo)")), (409, true), "{again:?}");
    assert!(taps("missathree").is_empty());
    // It belongs to the VF from now on.
    drop(other);
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    assert_eq!(vf(&mut client, 1)["backend"]["name"], "missatwo");
}

#[test]
fn a_backend_left_out_on_request_is_given_by_fd_while_paused() {
    let source = Vmm::start();
    let (_, url) = saved(&source, "missb", &json!([]));
    let target = Vmm::start();
    let mut client = target.client();
    let backends = json!([{"id": "pf0", "link": "down"}, {"id": "pf0", "vf": 2, "link": "down"}]);
    client.put_json("vm.restore", &json!({"source_url": url, "backends": backends})).expect(204);
    let info = client.get("vm.info").expect(200);
    assert_eq!((&info["sriov"][0]["backend"]["kind"], &info["state"]), (&json!("missing"), &json!("Paused")));
    assert!(vf(&mut client, 2)["backend"]["error"].as_str().unwrap().contains("link=down"));
    assert!(taps("missb").iter().all(|tap| tap != "missb" && tap != "missbv2"), "{:?}", taps("missb"));
    let fds: [OwnedFd; 1] = [tap::queue("missbfd", Queues::One)];
    let body = json!({"pf": "pf0", "index": 2, "num_fds": 1});
    assert_eq!(client.put_json("vm.set-vf", &body).status, 400);
    client.ask("PUT", "vm.set-vf", Some(&body), &fds).expect(204);
    assert_eq!(vf(&mut client, 2)["backend"]["kind"], "fd");
    client.put_json("vm.set-vf", &json!({"pf": "pf0", "tap": "missbpf"})).expect(204);
    assert_eq!(client.get("vm.info").expect(200)["sriov"][0]["backend"]["name"], "missbpf");
    assert_eq!(client.get("vm.info").expect(200)["state"], "Paused");
    client.put("vm.resume").expect(204);
    let given = vf(&mut client, 2);
    assert_eq!((&given["link"], &given["backend"]["down"]), (&json!("down"), &json!(true)), "the tap is not up yet");
    tap::ip(&["link", "set", "missbfd", "up"]);
    assert_eq!(vf(&mut client, 2)["link"], "up");
}

#[test]
fn an_invalid_backend_is_refused_in_one_line_and_not_attached() {
    let source = Vmm::start();
    let (_, url) = saved(&source, "missc", &json!([]));
    let target = Vmm::start();
    let mut client = target.client();
    let backends = json!([{"id": "pf0", "vf": 0, "link": "down"}]);
    client.put_json("vm.restore", &json!({"source_url": url, "backends": backends, "resume": true})).expect(204);
    let (files, threads) = (target.open_files(), target.threads());
    for (change, status) in [
        (json!({"pf": "pf0", "index": 0, "vdpa": "/nonexistent"}), 400..=400),
        (json!({"pf": "pf0", "index": 0, "vhost_socket": "/nonexistent"}), 400..=400),
        (json!({"pf": "pf0", "index": 0, "tap": "a/b"}), 400..=400),
        (json!({"pf": "pf0", "index": 0, "tap": "misscx", "vdpa": "/x"}), 400..=400),
        (json!({"pf": "pf0", "index": 0, "tap": "misscx", "link": "up"}), 400..=400),
        (json!({"pf": "pf0", "index": 3, "tap": "misscx"}), 404..=404),
        (json!({"pf": "pf1", "index": 0, "tap": "misscx"}), 404..=404),
        (json!({"pf": "pf0", "tap": "misscx"}), 409..=409),
        (json!({"pf": "pf0", "link": "up"}), 400..=400),
    ] {
        let answer = client.put_json("vm.set-vf", &change);
        assert!(status.contains(&answer.status), "{change}: {answer:?}");
        said(&answer);
        assert_eq!(vf(&mut client, 0)["backend"]["kind"], "missing", "{change}");
    }
    assert!(taps("misscx").is_empty());
    assert_eq!((target.open_files(), target.threads()), (files, threads));
}

#[test]
fn a_vf_that_awaits_descriptors_still_does_after_a_snapshot() {
    let source = Vmm::start();
    let path = source.files.path("saved");
    fs::create_dir(&path).unwrap();
    let url = format!("file://{}", path.display());
    let mut client = source.boot(json!([]));
    let fds = [tap::queue("missdfd", Queues::One)];
    client.ask("PUT", "vm.add-net", Some(&json!({"id": "n"})), &fds).expect(200);
    client.put("vm.pause").expect(204);
    client.put_json("vm.snapshot", &json!({"destination_url": url})).expect(204);
    client.put("vm.delete").expect(204);
    let body = json!({"source_url": url, "on_missing_backend": "link-down"});
    client.put_json("vm.restore", &body).expect(204);
    let nic = &client.get("vm.info").expect(200)["nics"][0];
    assert!(nic["backend"]["error"].as_str().unwrap().contains("descriptors"), "{nic}");
    let again = source.files.path("again");
    fs::create_dir(&again).unwrap();
    let url = format!("file://{}", again.display());
    client.put_json("vm.snapshot", &json!({"destination_url": url})).expect(204);
    client.put("vm.delete").expect(204);
    let refused = client.put_json("vm.restore", &json!({"source_url": url}));
    assert_eq!((refused.status, said(&refused).contains("n had 1 descriptors")), (400, true), "{refused:?}");
    let body = json!({"source_url": url, "net_fds": [{"id": "n", "num_fds": 1}]});
    client.ask("PUT", "vm.restore", Some(&body), &fds).expect(204);
}

/// A VM with shared memory, whose VF 0 is a vhost-user NIC without a peer.
#[test]
fn an_absent_peer_is_missing_and_a_mute_one_is_refused() {
    let source = Vmm::start();
    let path = source.files.path("saved");
    fs::create_dir(&path).unwrap();
    let url = format!("file://{}", path.display());
    let mut client = source.boot_shared(json!([{"id": "pf0", "tap": "misse", "sriov_vfs": 1}]));
    client.put("vm.pause").expect(204);
    client.put_json("vm.snapshot", &json!({"destination_url": url})).expect(204);
    client.put("vm.delete").expect(204);
    let none = json!([{"id": "pf0", "vf": 0, "vhost_socket": "/nonexistent/socket"}]);
    let mut body = json!({"source_url": url, "backends": none, "resume": true});
    assert!(client.put_json("vm.restore", &body).status >= 400);
    body["on_missing_backend"] = json!("link-down");
    client.put_json("vm.restore", &body).expect(204);
    assert!(vf(&mut client, 0)["backend"]["error"].as_str().unwrap().contains("/nonexistent/socket"));
    let mute = source.files.path("mute");
    let _listener = std::os::unix::net::UnixListener::bind(&mute).unwrap();
    for (key, path) in [("vhost_socket", mute.to_str().unwrap()), ("vdpa", "/nonexistent")] {
        let answer = client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 0, key: path}));
        assert!(answer.status >= 400 && said(&answer).contains(path), "{answer:?}");
        assert_eq!(vf(&mut client, 0)["backend"]["kind"], "missing");
    }
    client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 0, "tap": "missetwo"})).expect(204);
    assert_eq!(vf(&mut client, 0)["link"], "up");
}
