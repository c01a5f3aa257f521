//! File descriptors attached to requests.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::fstat;
use vmm::api::{Action, MOST_FDS, NewDevice};

use crate::client::{Fixture, Probe, plain, request, serve};

type Taken = Arc<Mutex<Vec<Vec<OwnedFd>>>>;

/// A server whose handler keeps the descriptors of NICs.
fn keeper() -> (Fixture, Taken) {
    let taken = Taken::default();
    let kept = taken.clone();
    let server = serve(move |action| {
        if let Action::Add(NewDevice::Net(config, fds)) = action {
            assert!(config.backend.fds.is_empty());
            kept.lock().push(fds);
            return plain(Action::Boot);
        }
        plain(action)
    });
    (server, taken)
}

fn inodes<'a>(fds: impl IntoIterator<Item = &'a OwnedFd>) -> Vec<u64> {
    fds.into_iter().map(|fd| fstat(fd).unwrap().st_ino).collect()
}

const BODY: &str = r#"{"id":"net_0","fds":[27,28]}"#;

#[test]
fn they_may_come_with_the_whole_request() {
    let (server, taken) = keeper();
    let probes = [Probe::new(), Probe::new()];
    let mut client = server.client();
    client.send_with(request("PUT", "/api/v1/vm.add-net", BODY), &[probes[0].fd(), probes[1].fd()]);
    assert_eq!(client.answer().status, 204);
    let expected: Vec<_> = probes.iter().map(|probe| fstat(probe.fd()).unwrap().st_ino).collect();
    assert_eq!(inodes(&taken.lock()[0]), expected);
}

#[test]
fn they_may_come_with_the_first_bytes_and_the_rest_later() {
    let (server, taken) = keeper();
    let probe = Probe::new();
    let mut client = server.client();
    // In the form that ch-remote sends.
    client.send_with("PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n", &[probe.fd()]);
    client.send(format!("Content-Type: application/json\r\nContent-Length: {}\r\n", BODY.len()));
    client.send("\r\n");
    client.send(BODY);
    assert_eq!(client.answer().status, 204);
    assert_eq!(taken.lock()[0].len(), 1);
}

#[test]
fn they_may_come_in_several_messages() {
    let (server, taken) = keeper();
    let (first, second) = (Probe::new(), Probe::new());
    let text = request("PUT", "/api/v1/vm.add-net", BODY);
    let mut client = server.client();
    client.send_with(&text[..10], &[first.fd()]);
    client.send_with(&text[10..100], &[second.fd()]);
    client.send(&text[100..]);
    assert_eq!(client.answer().status, 204);
    assert_eq!(inodes(&taken.lock()[0]), [first.fd(), second.fd()].map(|fd| fstat(fd).unwrap().st_ino));
}

#[test]
fn they_belong_to_the_first_complete_request_and_no_other() {
    let (server, taken) = keeper();
    let probe = Probe::new();
    let mut client = server.client();
    client.send_with(request("PUT", "/api/v1/vm.add-net", BODY), &[probe.fd()]);
    assert_eq!(client.answer().status, 204);
    assert_eq!(client.ask("PUT", "/api/v1/vm.add-net", r#"{"tap":"t"}"#).status, 204);
    assert_eq!(taken.lock().iter().map(Vec::len).collect::<Vec<_>>(), [1, 0]);
    taken.lock().clear();
    assert!(probe.closes_everywhere());
}

#[test]
fn they_are_not_inherited_by_child_processes() {
    let (server, taken) = keeper();
    let probe = Probe::new();
    let mut client = server.client();
    client.send_with(request("PUT", "/api/v1/vm.add-net", BODY), &[probe.fd()]);
    assert_eq!(client.answer().status, 204);
    let flags = rustix::io::fcntl_getfd(&taken.lock()[0][0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn they_are_closed_and_refused_with_any_other_request() {
    let (server, _taken) = keeper();
    for (method, path, body, status) in [
        ("PUT", "/api/v1/vm.add-disk", r#"{"path":"/x"}"#, 400),
        ("PUT", "/api/v1/vm.create", "{}", 400),
        ("GET", "/api/v1/vmm.ping", "", 400),
        ("PUT", "/api/v1/vm.snapshot", r#"{"destination_url":"file:///x"}"#, 400),
        ("GET", "/nothing", "", 404),
        ("POST", "/api/v1/vm.add-net", "{}", 405),
    ] {
        let probe = Probe::new();
        let mut client = server.client();
        client.send_with(request(method, path, body), &[probe.fd()]);
        let answer = client.answer();
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        if status == 400 {
            let what = "it came with file descriptors, which only vm.add-net, vm.add-device, vm.set-vf, vm.restore and \
                        vm.receive-migration take; send none";
            assert_eq!(answer.chain()[1], what);
        }
        assert!(probe.closes_everywhere(), "{method} {path}");
    }
    assert!(server.asked().is_empty());
}

#[test]
fn they_are_closed_with_an_invalid_request() {
    let (server, _taken) = keeper();
    for text in [request("PUT", "/api/v1/vm.add-net", "{"), "rubbish\r\n\r\n".to_string()] {
        let probe = Probe::new();
        let mut client = server.client();
        client.send_with(text, &[probe.fd()]);
        assert_eq!(client.answer().status, 400);
        assert!(probe.closes_everywhere());
    }
}

#[test]
fn descriptors_of_an_unfinished_request_are_closed() {
    let (server, _taken) = keeper();
    let probe = Probe::new();
    let mut client = server.client();
    client.send_with("PUT /api/v1/vm.add-net", &[probe.fd()]);
    drop(client);
    assert!(probe.closes_everywhere());
}

#[test]
fn a_number_in_the_body_is_not_a_descriptor() {
    let (server, taken) = keeper();
    let answer = server.ask("PUT", "/api/v1/vm.add-net", BODY);
    assert_eq!(answer.status, 400);
    assert_eq!(
        answer.chain()[1],
        "fds: a client's descriptor numbers mean nothing in this process; send the descriptors with the request \
         (SCM_RIGHTS)"
    );
    assert!(taken.lock().is_empty());
}

#[test]
fn more_than_a_nic_can_have_are_refused_and_closed() {
    let (server, taken) = keeper();
    let probe = Probe::new();
    let many = [probe.fd(); 200];
    assert!(many.len() * 2 > MOST_FDS && many[0].as_raw_fd() > 0);
    let text = request("PUT", "/api/v1/vm.add-net", BODY);
    let mut client = server.client();
    client.send_with(&text[..10], &many);
    client.send_with(&text[10..], &many);
    let answer = client.answer();
    assert_eq!(answer.status, 400);
    assert!(answer.chain()[0].starts_with("file descriptors of the request were lost"), "{answer:?}");
    assert!(probe.closes_everywhere());
    let probe = Probe::new();
    client.send_with(text, &[probe.fd(); 100]);
    assert_eq!(client.answer().status, 204);
    assert_eq!(taken.lock()[0].len(), 100);
}

#[test]
fn another_clients_unfinished_request_makes_a_client_try_again() {
    let (server, taken) = keeper();
    let probe = Probe::new();
    let mut holder = server.client();
    for half in ["PUT /api/v1/vm.add-net HTTP/1.1\r\nX: ", "y\r\n"] {
        holder.send_with(half, &[probe.fd(); MOST_FDS / 2]);
    }
    // If another client sent a descriptor at the same moment, the holder would lose its own.
    probe.await_received(MOST_FDS);
    let text = request("PUT", "/api/v1/vm.add-net", BODY);
    let mut client = server.client();
    let mut ask = || {
        let probe = Probe::new();
        client.send_with(&text, &[probe.fd()]);
        client.answer()
    };
    let answer = ask();
    assert_eq!(answer.status, 429);
    assert_eq!(
        answer.chain(),
        ["file descriptors of the request were lost: requests in progress hold 256, which is the limit; try again"]
    );
    drop(holder);
    assert!(probe.closes_everywhere());
    assert_eq!(ask().status, 204);
    assert!(!taken.lock().is_empty());
}
