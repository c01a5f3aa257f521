//! During every wait of a migration, both programs reply to requests for its progress (acceptance A8).

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::migration::{begin_to_receive, config, dots, send, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

/// The longest time for a reply.
const LONGEST: Duration = Duration::from_millis(100);
/// Other tests run on the same processors. They delay neither every attempt, nor only this program.
const ATTEMPTS: usize = 10;
const ASKED: [&str; 3] = ["vm.info", "vm.counters", "vm.migration-progress"];

/// A client that sends requests repeatedly.
struct Asking {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<(Duration, &'static str)>,
}

impl Asking {
    fn of(vmm: &Vmm, what: &'static [&'static str]) -> Self {
        let (mut client, ends) = (vmm.client(), Arc::new(AtomicBool::new(false)));
        let until = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            let mut worst = (Duration::ZERO, "");
            while !until.load(Ordering::Relaxed) {
                for endpoint in what {
                    let asked = Instant::now();
                    let answer = client.get(endpoint);
                    worst = worst.max((asked.elapsed(), endpoint));
                    // There may be no VM, or no migration yet.
                    assert!([200, 404, 409].contains(&answer.status), "{endpoint}: {answer:?}");
                }
                thread::sleep(Duration::from_millis(1));
            }
            worst
        });
        Self { ends, thread }
    }

    /// The longest time for a reply, and the endpoint.
    fn end(self) -> (Duration, &'static str) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Creates and closes KVM VMs until stopped; returns the longest time for one. KVM waits for grace periods there, which
/// are long on a busy machine.
fn of_kvm(ends: &AtomicBool) -> Duration {
    /// `KVM_CREATE_VM` and `KVM_CREATE_IRQCHIP` (`linux/kvm.h`).
    const CREATE: [libc::c_ulong; 2] = [0xae01, 0xae60];
    let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
    let mut worst = Duration::ZERO;
    while !ends.load(Ordering::Relaxed) {
        let began = Instant::now();
        // SAFETY: the only argument of the request is the kind of VM, and nothing else owns the returned descriptor.
        let vm = unsafe {
            let fd = libc::ioctl(kvm.as_raw_fd(), CREATE[0], 0);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: the request has no argument.
        assert_eq!(unsafe { libc::ioctl(vm.as_raw_fd(), CREATE[1], 0) }, 0);
        drop(vm);
        worst = worst.max(began.elapsed());
        thread::sleep(Duration::from_millis(5));
    }
    worst
}

/// Asserts that these programs reply in time during `happens`. An idle bystander shows how long this machine delays any
/// program, and another how long it takes for a KVM VM.
fn assert_answers(what: &str, places: &[&Vmm], mut happens: impl FnMut()) {
    let bystander = Vmm::start();
    let mut seen = Vec::new();
    for _ in 0..ATTEMPTS {
        let asking: Vec<_> = places.iter().map(|vmm| Asking::of(vmm, &ASKED)).collect();
        let idle = Asking::of(&bystander, &["vmm.ping"]);
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        let kvm = thread::spawn(move || of_kvm(&until));
        happens();
        let longest: Vec<_> = asking.into_iter().map(Asking::end).collect();
        ends.store(true, Ordering::Relaxed);
        let machine = idle.end().0 + kvm.join().unwrap();
        println!("{what}: {longest:?}; bystanders' {machine:?}");
        if longest.iter().all(|(took, _)| *took <= LONGEST + machine) {
            return;
        }
        seen.push((longest, machine));
    }
    panic!("{what}: answers take too long: {seen:?}");
}

/// A VMM that keeps running without its guest.
fn stays() -> Vmm {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    Vmm::of(command)
}

/// Such a VMM whose guest counts, in this memory.
fn source(tap: &str, memory: Value) -> (Vmm, Client) {
    let vmm = stays();
    let mut config = config(&vmm);
    config["memory"] = memory;
    config["net"] = json!([{"id": "n", "tap": tap}]);
    let client = vmm.boot_config(&config);
    wait_for("the guest", || dots(&vmm) > 2);
    (vmm, client)
}

#[test]
fn both_sides_answer_requests_throughout_a_migration() {
    // All of it is allocated, so that sending and freeing it takes a while.
    let (one, mut client) = source("answfrom", json!({"size": 256 << 20, "prefault": true}));
    let other = stays();
    let mut there = other.client();
    let mut is_back = false;
    assert_answers("a migration", &[&one, &other], || {
        let (here, from, to, target) = match is_back {
            false => (&mut client, &mut there, &other, "answto"),
            true => (&mut there, &mut client, &one, "answfrom"),
        };
        let body = json!({"receiver_url": url(to), "backends": [{"id": "n", "tap": target}]});
        begin_to_receive(from, &body);
        send(here, &url(to));
        wait_for_state(here, "finished");
        wait_for_state(from, "finished");
        is_back = !is_back;
    });
}

#[test]
fn who_asks_is_answered_while_the_target_does_not() {
    let (vmm, mut client) = source("answone", json!({"size": 64 << 20}));
    let path = vmm.files.path("migration");
    // A peer that does not accept: a waiting connection fills its backlog. Or one that accepts, and sends nothing.
    for accepts in [false, true] {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, if accepts { 16 } else { 0 }).unwrap();
        let _fills = (!accepts).then(|| UnixStream::connect(&path).unwrap());
        assert_answers("a target that says nothing", &[&vmm], || {
            send(&mut client, &url(&vmm));
            thread::sleep(Duration::from_millis(500));
            let phase = if accepts { "greeting" } else { "connecting" };
            wait_for(phase, || client.get("vm.migration-progress").expect(200)["phase"] == phase);
            client.put("vm.cancel-migration").expect(204);
            wait_for_state(&mut client, "cancelled");
        });
    }
}

#[test]
fn who_asks_is_answered_while_the_target_waits_for_a_backend() {
    let (vmm, mut client) = source("answtwo", json!({"size": 64 << 20, "shared": true}));
    let target = stays();
    let path = target.files.path("mute");
    let _mute = UnixListener::bind(&path).unwrap();
    let mut there = target.client();
    assert_answers("a backend that says nothing", &[&vmm, &target], || {
        let body = json!({"receiver_url": url(&target), "backends": [{"id": "n", "vhost_socket": path}]});
        begin_to_receive(&mut there, &body);
        send(&mut client, &url(&target));
        let failed = wait_for_state(&mut client, "failed");
        assert!(failed["error"].as_str().unwrap().contains("mute"), "{failed}");
        wait_for_state(&mut there, "failed");
    });
    // The guest can still migrate.
    let body = json!({"receiver_url": url(&target), "backends": [{"id": "n", "tap": "answnew"}]});
    begin_to_receive(&mut there, &body);
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
}
