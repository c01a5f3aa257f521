//! Clients that wait for the end of `vm.receive-migration`.

use std::fs;
use std::thread;

use serde_json::{Value, json};

use crate::migration::{counts, receive, send, source, url, wait_for_state};
use crate::rig::client::{Answer, Client};
use crate::rig::vmm::{Vmm, wait_for};

/// A client that waits for a guest on `target`, which listens already.
fn waits(target: &Vmm, client: &mut Client) -> thread::JoinHandle<Answer> {
    let (mut waiting, body) = (target.client(), json!({"receiver_url": url(target)}));
    let thread = thread::spawn(move || waiting.put_json("vm.receive-migration", &body));
    wait_for("the target to listen", || client.get("vm.migration-progress").body["phase"] == "listening");
    thread
}

#[test]
fn a_receive_call_answers_when_the_guest_has_arrived() {
    let ((_source, mut client), target) = (source(), Vmm::start());
    let mut there = target.client();
    let waiting = waits(&target, &mut there);
    // Others are served.
    there.get("vmm.ping").expect(200);
    there.put_json("vm.receive-migration", &json!({"receiver_url": "unix:other"})).expect(409);
    assert!(!waiting.is_finished());
    send(&mut client, &url(&target));
    waiting.join().unwrap().expect(204);
    // After the reply, the client finds the guest.
    assert_eq!(there.get("vm.info").expect(200)["state"], "Running");
    assert_eq!(there.get("vm.migration-progress").expect(200)["state"], "finished");
    assert!(counts(&target));
}

#[test]
fn a_receive_call_answers_with_the_reason_of_a_failure() {
    let ((vmm, mut client), target) = (source(), Vmm::start());
    let mut there = target.client();
    let says = |answer: Answer, status: u16, said: &str| {
        assert_eq!(answer.status, status, "{answer:?}");
        let lines: Vec<_> = answer.body.as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert!(lines[0] == "no VM can be received" && lines[1].contains(said), "{lines:?}");
    };
    let waiting = waits(&target, &mut there);
    there.put("vm.cancel-migration").expect(204);
    says(waiting.join().unwrap(), 409, "cancelled (vm.cancel-migration)");
    // The file for the guest's serial port cannot be created there.
    fs::create_dir(target.files.path("serial")).unwrap();
    let waiting = waits(&target, &mut there);
    send(&mut client, &url(&target));
    says(waiting.join().unwrap(), 500, "serial");
    there.get("vm.info").expect(404);
    let waiting = waits(&target, &mut there);
    there.put("vmm.shutdown").expect(200);
    assert_eq!(waiting.join().unwrap().status, 500);
    assert!(counts(&vmm));
}

#[test]
fn a_guest_arrives_although_the_client_that_waited_is_gone() {
    let ((_source, mut client), target) = (source(), Vmm::start());
    let (mut there, mut waiting) = (target.client(), target.client());
    let body = json!({"receiver_url": url(&target)}).to_string();
    let length = body.len();
    let head = format!("PUT /api/v1/vm.receive-migration HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}");
    waiting.send(format!("{head}\r\n\r\n{body}").as_bytes(), &[]);
    wait_for("the target to listen", || there.get("vm.migration-progress").body["phase"] == "listening");
    drop(waiting);
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert!(counts(&target));
    // With `detach`, the reply comes at once, as in the other tests.
    let (other, target) = (there, Vmm::start());
    let mut there = receive(&target, &url(&target));
    assert_eq!(there.get("vm.migration-progress").expect(200)["phase"], "listening");
    drop(other);
}
