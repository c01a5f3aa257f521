//! A vhost-user backend that does not reply delays only its own device.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::client::{Answer, Client};
use crate::rig::vmm::{Vmm, wait_for};

/// Far less than the timeout for a backend, which is 30 s.
const SOON: Duration = Duration::from_secs(10);
const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
/// VIRTIO_F_VERSION_1.
const FEATURES: u64 = 1 << 32;

/// A backend without protocol features. It stops replying once it must map the guest's memory, until released.
struct Peer {
    path: PathBuf,
    /// Receives a message once it is mute.
    mute: Receiver<()>,
    /// Releases it.
    speak: Sender<()>,
}

impl Peer {
    fn listen(path: PathBuf) -> Self {
        let listener = UnixListener::bind(&path).unwrap();
        let ((is_mute, mute), (speak, may_speak)) = (channel(), channel());
        spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut header = [0; 12];
                while stream.read_exact(&mut header).is_ok() {
                    let [request, _, len] =
                        [0, 4, 8].map(|at| u32::from_ne_bytes(*header[at..].first_chunk().unwrap()));
                    // Attached descriptors are closed.
                    stream.read_exact(&mut vec![0; len as usize]).unwrap();
                    if request == SET_MEM_TABLE {
                        let _ = is_mute.send(());
                        if may_speak.recv().is_err() {
                            return;
                        }
                    } else if request == GET_FEATURES {
                        let answer = [1u32, 5, 8].iter().flat_map(|word| word.to_ne_bytes());
                        let answer: Vec<_> = answer.chain(FEATURES.to_ne_bytes()).collect();
                        let _ = stream.write_all(&answer);
                    }
                }
            }
        });
        Self { path, mute, speak }
    }

    fn nic(&self) -> Value {
        json!({"id": "mute", "vhost_user": true, "vhost_socket": self.path})
    }

    fn await_mute(&self) {
        self.mute.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}

/// Sends a request on its own connection.
fn ask(vmm: &Vmm, endpoint: &'static str, body: Value) -> JoinHandle<Answer> {
    let mut client = vmm.client();
    spawn(move || if body.is_null() { client.put(endpoint) } else { client.put_json(endpoint, &body) })
}

fn soon(client: &mut Client, method: &str, endpoint: &str) -> Answer {
    let begun = Instant::now();
    let answer = client.ask(method, endpoint, None, &[]);
    assert!(begun.elapsed() < SOON, "{endpoint} took {:?}", begun.elapsed());
    answer
}

fn nothing_is_left(vmm: &Vmm) {
    wait_for("the end of threads", || !vmm.threads().iter().any(|name| ["open\n", "plug\n"].contains(&name.as_str())));
}

#[test]
fn a_mute_backend_of_a_new_nic_delays_no_client_and_no_shutdown() {
    let vmm = Vmm::start();
    let mut client = vmm.boot_shared(json!([]));
    let peer = Peer::listen(vmm.files.path("peer"));
    let added = ask(&vmm, "vm.add-net", peer.nic());
    peer.await_mute();
    soon(&mut client, "GET", "vmm.ping").expect(200);
    let info = soon(&mut client, "GET", "vm.info").expect(200);
    assert_eq!(info["config"]["net"], Value::Null);
    soon(&mut client, "PUT", "vm.pause").expect(204);
    soon(&mut client, "PUT", "vm.resume").expect(204);
    // Another change waits for its turn.
    let later = ask(&vmm, "vm.remove-device", json!({"id": "unknown"}));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!later.is_finished());
    soon(&mut client, "PUT", "vm.shutdown").expect(204);
    let said = added.join().unwrap().expect(409).to_string();
    assert!(said.contains("ended before a vhost-user backend was ready"), "{said}");
    later.join().unwrap().expect(404);
    nothing_is_left(&vmm);
    client.put("vm.boot").expect(204);
    client.put("vm.delete").expect(204);
}

#[test]
fn a_slow_backend_is_added_and_then_queued_changes_are_applied() {
    let vmm = Vmm::start();
    let mut client = vmm.boot_shared(json!([]));
    let before = vmm.open_files();
    let peer = Peer::listen(vmm.files.path("peer"));
    let added = ask(&vmm, "vm.add-net", peer.nic());
    peer.await_mute();
    let removed = ask(&vmm, "vm.remove-device", json!({"id": "mute"}));
    soon(&mut client, "GET", "vmm.ping").expect(200);
    peer.speak.send(()).unwrap();
    assert_eq!(added.join().unwrap().expect(200)["id"], "mute");
    removed.join().unwrap().expect(204);
    nothing_is_left(&vmm);
    // The connection, two sockets of clients that may not be closed yet, and the device's descriptors for its queues.
    let after = vmm.open_files();
    assert!(after <= before + 12, "{before} files, then {after}");
    client.put("vm.delete").expect(204);
}

#[test]
fn a_mute_backend_at_boot_delays_no_client_and_no_end_of_the_vm() {
    let vmm = Vmm::start();
    let peer = Peer::listen(vmm.files.path("peer"));
    let mut config = vmm.config(json!([peer.nic()]));
    config["memory"]["shared"] = json!(true);
    let mut client = vmm.client();
    for end in ["vm.shutdown", "vm.delete"] {
        if end == "vm.shutdown" {
            client.put_json("vm.create", &config).expect(204);
        }
        let booted = ask(&vmm, "vm.boot", Value::Null);
        peer.await_mute();
        soon(&mut client, "GET", "vmm.ping").expect(200);
        let ended = soon(&mut client, "PUT", end);
        // There is no VM to shut down yet, but the start ends.
        assert_eq!(ended.status, if end == "vm.shutdown" { 409 } else { 204 });
        booted.join().unwrap().expect(409);
        nothing_is_left(&vmm);
        peer.speak.send(()).unwrap();
    }
}

#[test]
fn sigterm_ends_the_program_while_a_backend_is_mute() {
    for at_boot in [false, true] {
        let vmm = Vmm::start();
        let peer = Peer::listen(vmm.files.path("peer"));
        let asked = if at_boot {
            let mut config = vmm.config(json!([peer.nic()]));
            config["memory"]["shared"] = json!(true);
            vmm.client().put_json("vm.create", &config).expect(204);
            ask(&vmm, "vm.boot", Value::Null)
        } else {
            vmm.boot_shared(json!([]));
            ask(&vmm, "vm.add-net", peer.nic())
        };
        peer.await_mute();
        let begun = Instant::now();
        let pid = rustix::process::Pid::from_raw(vmm.pid().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(vmm.end(), Some(0));
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let _ = asked.join();
    }
}
