//! Live migration of a VM whose vhost-user backends have their own state, as passt has connections.

use std::fs;
use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::spawn;

use parking_lot::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

use crate::migration::peer::{Ends, Target};
use crate::migration::{receive_by, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

/// VIRTIO_F_VERSION_1, protocol features, and a dirty log.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 26;
const LOG_SHMFD: u64 = 1 << 1;
const DEVICE_STATE: u64 = 1 << 19;
/// In a reply: no descriptor is attached.
const NO_FD: u64 = 1 << 8;
/// More than the capacity of a pipe.
const LEN: usize = 200_000;

/// Requests to a backend, and their results.
#[derive(Debug, Default)]
struct Seen {
    connections: usize,
    /// The number of ended connections.
    ended: usize,
    /// Requests about its state.
    asked: Vec<&'static str>,
    /// The loaded state.
    loaded: Vec<u8>,
}

/// A vhost-user backend of a NIC without a driver.
#[derive(Clone)]
struct Backend {
    path: PathBuf,
    protocol: u64,
    /// The result reported for a state that it has saved or loaded.
    verdict: u64,
    /// True if it closes its connection after saving its state, as passt does.
    ends: bool,
    seen: Arc<Mutex<Seen>>,
}

impl Backend {
    fn listen(path: &Path, protocol: u64, verdict: u64, ends: bool) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let backend = Self { path: path.to_path_buf(), protocol, verdict, ends, seen: Arc::default() };
        let served = backend.clone();
        spawn(move || {
            for stream in listener.incoming() {
                served.seen.lock().connections += 1;
                served.serve(stream.unwrap());
                served.seen.lock().ended += 1;
            }
        });
        backend
    }

    fn serve(&self, mut stream: UnixStream) {
        let mut header = [0; 12];
        let mut saves = false;
        while let Some(fds) = receive(&stream, &mut header) {
            let [request, _, len] = [0, 4, 8].map(|at| u32::from_ne_bytes(*header[at..].first_chunk().unwrap()));
            let mut payload = vec![0; len as usize];
            stream.read_exact(&mut payload).unwrap();
            let answer = match request {
                1 => FEATURES,
                15 => self.protocol,
                42 => {
                    saves = payload[0] == 0;
                    self.seen.lock().asked.push(if saves { "save" } else { "load" });
                    self.transfer(saves, File::from(fds.into_iter().next().unwrap()));
                    NO_FD
                }
                43 => {
                    self.seen.lock().asked.push("check");
                    self.verdict
                }
                _ => continue,
            };
            let header: Vec<u8> = [request, 5, 8].iter().flat_map(|word| word.to_ne_bytes()).collect();
            let _ = stream.write_all(&[header, answer.to_ne_bytes().to_vec()].concat());
            if request == 43 && saves && self.ends {
                return;
            }
        }
    }

    fn transfer(&self, saves: bool, mut pipe: File) {
        let seen = Arc::clone(&self.seen);
        spawn(move || {
            if saves {
                let _ = pipe.write_all(&state());
                return;
            }
            let mut loaded = Vec::new();
            let _ = pipe.read_to_end(&mut loaded);
            seen.lock().loaded = loaded;
        });
    }

    fn asked(&self) -> Vec<&'static str> {
        self.seen.lock().asked.clone()
    }

    /// True if the first connection is still open.
    fn is_connected(&self) -> bool {
        let seen = self.seen.lock();
        (seen.connections, seen.ended) == (1, 0)
    }
}

fn state() -> Vec<u8> {
    (0..LEN).map(|n| (n % 251) as u8).collect()
}

fn receive(stream: &UnixStream, header: &mut [u8; 12]) -> Option<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(header)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    let fds = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    let fds = fds.collect();
    (received.bytes == header.len()).then_some(fds)
}

/// A VMM that keeps running without its guest, whose VF has such a backend.
fn source(verdict: u64, ends: bool) -> (Vmm, Client, Backend) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let backend = Backend::listen(&vmm.files.path("backend"), LOG_SHMFD | DEVICE_STATE, verdict, ends);
    let vf = json!({"index": 0, "vhost_user": true, "vhost_socket": backend.path});
    let net = json!([{"id": "pf0", "switch": "veb", "sriov_vfs": 1, "vfs": [vf]}]);
    let client = vmm.boot_shared(net);
    (vmm, client, backend)
}

/// Makes a target receive, with this backend for the VF.
fn receive_at(target: &Vmm, backend: &Value) -> Client {
    receive_by(target, &json!({"receiver_url": url(target), "backends": [backend]}))
}

fn over(backend: &Backend) -> Value {
    json!({"id": "pf0", "vf": 0, "vhost_socket": backend.path})
}

fn send(client: &mut Client, url: &str, local: bool) {
    client.put_json("vm.send-migration", &json!({"destination_url": url, "local": local})).expect(204);
}

#[test]
fn backend_state_beyond_its_queues_goes_to_the_targets_backend() {
    for local in [false, true] {
        let (_source, mut client, backend) = source(0, true);
        let target = Vmm::start();
        let other = Backend::listen(&target.files.path("backend"), LOG_SHMFD | DEVICE_STATE, 0, false);
        let mut there = receive_at(&target, &over(&other));
        send(&mut client, &url(&target), local);
        wait_for_state(&mut there, "finished");
        wait_for_state(&mut client, "finished");
        assert_eq!((backend.asked(), other.asked()), (vec!["save", "check"], vec!["load", "check"]), "local={local}");
        wait_for("all of the state", || other.seen.lock().loaded == state());
        assert!(other.is_connected());
        assert_eq!(there.get("vm.info").expect(200)["state"], "Running");
    }
}

#[test]
fn a_snapshot_leaves_the_backend_what_it_has() {
    let (source, mut client, backend) = source(0, true);
    let folder = source.files.path("snapshot");
    fs::create_dir(&folder).unwrap();
    client.put("vm.pause").expect(204);
    let url = format!("file://{}", folder.display());
    client.put_json("vm.snapshot", &json!({"destination_url": url})).expect(204);
    client.put("vm.resume").expect(204);
    assert!(backend.asked().is_empty() && backend.is_connected());
}

#[test]
fn a_backend_that_cannot_load_state_is_refused_before_any_page() {
    let (_source, mut client, backend) = source(0, true);
    let target = Vmm::start();
    let other = Backend::listen(&target.files.path("backend"), LOG_SHMFD, 0, false);
    for given in [over(&other), json!({"id": "pf0", "vf": 0, "tap": "statef0"})] {
        let mut there = receive_at(&target, &given);
        send(&mut client, &url(&target), false);
        let failed = wait_for_state(&mut client, "failed");
        wait_for_state(&mut there, "failed");
        let error = failed["error"].as_str().unwrap();
        assert!(error.starts_with("the target: --net-vf pf=pf0,index=0: its backend at the source"), "{error}");
        assert!(error.contains("DEVICE_STATE") && !error.contains('\n'), "{error}");
        assert_eq!((&failed["pages"], &failed["zero_pages"]), (&json!(0), &json!(0)));
        assert!(backend.asked().is_empty() && backend.is_connected());
    }
    // A function without a backend on the target does not prevent the migration.
    let mut there = receive_at(&target, &json!({"id": "pf0", "vf": 0, "link": "down"}));
    send(&mut client, &url(&target), false);
    wait_for_state(&mut there, "finished");
    wait_for_state(&mut client, "finished");
}

#[test]
fn a_failure_before_go_leaves_the_source_with_its_backend() {
    let target = Vmm::start();
    let other = Backend::listen(&target.files.path("backend"), LOG_SHMFD | DEVICE_STATE, 0, false);
    let (_refusing, mut client, backend) = source(1, false);
    let mut there = receive_at(&target, &over(&other));
    send(&mut client, &url(&target), false);
    let failed = wait_for_state(&mut client, "failed");
    wait_for_state(&mut there, "failed");
    let error = failed["error"].as_str().unwrap();
    assert!(error.starts_with("--net-vf pf=pf0,index=0: cannot save all of the backend's own state: CHECK"), "{error}");
    assert_eq!((backend.asked(), other.asked()), (vec!["save", "check"], vec![]));
    assert!(backend.is_connected());
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");

    let (source, mut client, backend) = source(0, false);
    let unwilling = Backend::listen(&target.files.path("unwilling"), LOG_SHMFD | DEVICE_STATE, 1, false);
    let mut there = receive_at(&target, &over(&unwilling));
    send(&mut client, &url(&target), false);
    let failed = wait_for_state(&mut client, "failed");
    wait_for_state(&mut there, "failed");
    let error = failed["error"].as_str().unwrap();
    assert!(error.starts_with("the target: --net-vf pf=pf0,index=0: cannot load the backend's own state"), "{error}");
    there.get("vm.info").expect(404);

    let path = source.files.path("migration");
    for ends in [Ends::DuringPages, Ends::AfterState, Ends::FailsToLoad] {
        let _ = fs::remove_file(&path);
        let _target = Target::listen(&path, ends);
        send(&mut client, &url(&source), false);
        wait_for_state(&mut client, "failed");
        assert_eq!(client.get("vm.info").expect(200)["state"], "Running", "{ends:?}");
    }
    assert!(backend.is_connected());
    let mut there = receive_at(&target, &over(&other));
    send(&mut client, &url(&target), false);
    wait_for_state(&mut there, "finished");
    wait_for_state(&mut client, "finished");
    assert_eq!(other.asked(), ["load", "check"]);
}
