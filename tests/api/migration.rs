//! Live migration of tiny guests between two VMMs on this machine, and with failing peers.

pub(crate) mod answers;
pub(crate) mod backends;
pub(crate) mod chaos;
pub(crate) mod endurance;
pub(crate) mod events;
pub(crate) mod fds;
pub(crate) mod guest;
pub(crate) mod hostile;
pub(crate) mod late;
pub(crate) mod local;
pub(crate) mod pages;
pub(crate) mod peer;
pub(crate) mod storage;
pub(crate) mod strangers;
pub(crate) mod tls;
pub(crate) mod waits;

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::migration::peer::{Ends, Target};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};
use crate::snapshot::counting;

/// A VM with a guest that counts, and shows that on its serial port. Each VMM has its own file of that name.
pub(crate) fn config(vmm: &Vmm) -> Value {
    let mut config = vmm.config(json!([]));
    config["payload"]["kernel"] = json!(vmm.files.kernel(&counting()));
    config["serial"] = json!({"mode": "File", "file": "serial"});
    config
}

pub(crate) fn dots(vmm: &Vmm) -> usize {
    let text = fs::read_to_string(vmm.files.path("serial")).unwrap_or_default();
    assert!(!text.contains('!'), "the guest finds other memory than it left");
    text.len()
}

/// True if the guest keeps counting. Waits with the usual limit for a busy machine.
pub(crate) fn counts(vmm: &Vmm) -> bool {
    counts_within(vmm, Duration::from_secs(60))
}

/// True if the guest does not count for a while.
pub(crate) fn is_still(vmm: &Vmm) -> bool {
    !counts_within(vmm, Duration::from_millis(1500))
}

fn counts_within(vmm: &Vmm, limit: Duration) -> bool {
    let before = dots(vmm);
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if dots(vmm) > before + 1 {
            return true;
        }
        thread::sleep(Duration::from_millis(20));
    }
    false
}

/// A VMM whose guest counts. It keeps running without a guest.
pub(crate) fn source() -> (Vmm, Client) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let client = vmm.boot_config(&config(&vmm));
    wait_for("the guest", || dots(&vmm) > 2);
    (vmm, client)
}

pub(crate) fn progress(client: &mut Client) -> Value {
    client.get("vm.migration-progress").expect(200)
}

pub(crate) fn wait_for_state(client: &mut Client, state: &str) -> Value {
    let mut last = Value::Null;
    wait_for(state, || {
        last = progress(client);
        last["state"] != "active"
    });
    assert_eq!(last["state"], state, "{last}");
    last
}

fn wait_for_phase(client: &mut Client, phase: &str) {
    wait_for(phase, || progress(client)["phase"] == phase);
}

/// A URL of a Unix socket in the folder of `vmm`.
pub(crate) fn url(vmm: &Vmm) -> String {
    format!("unix:{}", vmm.files.path("migration").display())
}

/// Makes `target` listen at `url`. Returns once it does.
pub(crate) fn receive(target: &Vmm, url: &str) -> Client {
    receive_by(target, &json!({"receiver_url": url}))
}

/// The same, by a request with this `body`.
pub(crate) fn receive_by(target: &Vmm, body: &Value) -> Client {
    let mut client = target.client();
    begin_to_receive(&mut client, body);
    client
}

/// The same, with an existing client.
pub(crate) fn begin_to_receive(client: &mut Client, body: &Value) {
    let mut body = body.clone();
    body["detach"] = json!(true);
    client.put_json("vm.receive-migration", &body).expect(204);
}

pub(crate) fn send(client: &mut Client, url: &str) {
    client.put_json("vm.send-migration", &json!({"destination_url": url})).expect(204);
}

#[test]
fn a_migrated_guest_runs_at_the_target_and_the_source_has_no_vm() {
    let (source, mut client) = source();
    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    assert_eq!(progress(&mut there)["phase"], "listening");
    send(&mut client, &url(&target));
    let seen = wait_for_state(&mut there, "finished");
    assert_eq!((&seen["role"], &seen["memory_bytes"]), (&json!("receiver"), &json!(64 << 20)));
    let sent = wait_for_state(&mut client, "finished");
    println!("{sent}");
    // All pages once, and those written in the meantime again.
    assert!(sent["pages"].as_u64().unwrap() + sent["zero_pages"].as_u64().unwrap() >= 16384, "{sent}");
    assert!(sent["transferred_bytes"].as_u64().unwrap() < 8 << 20 && sent["pass"].as_u64().unwrap() >= 1, "{sent}");
    let parts = sent["downtime"].as_object().unwrap();
    let sum: u64 = parts.iter().filter(|(part, _)| *part != "total_us").map(|(_, time)| time.as_u64().unwrap()).sum();
    assert!(sum > 0 && sum.abs_diff(parts["total_us"].as_u64().unwrap()) < 10, "{parts:?}");
    assert_eq!(there.get("vm.info").expect(200)["state"], "Running");
    assert!(counts(&target) && is_still(&source));
    assert!(!target.files.path("migration").exists());
    client.get("vm.info").expect(404);
    // It is a VM like any other, and can migrate back.
    let mut back = receive(&source, &url(&source));
    send(&mut there, &url(&source));
    wait_for_state(&mut back, "finished");
    assert_eq!(target.end(), Some(0));
    assert!(counts(&source));
    client.put("vm.reboot").expect(204);
    assert!(counts(&source));
}

#[test]
fn a_paused_guest_stays_paused_over_several_tcp_connections() {
    let (_source, mut client) = source();
    client.put("vm.pause").expect(204);
    let target = Vmm::start();
    let url = format!("tcp:127.0.0.1:{}", 20_000 + std::process::id() % 10_000);
    let mut there = receive(&target, &url);
    let body = json!({"destination_url": url.replace("127.0.0.1", "localhost"), "connections": 4});
    client.put_json("vm.send-migration", &body).expect(204);
    wait_for_state(&mut there, "finished");
    assert_eq!(there.get("vm.info").expect(200)["state"], "Paused");
    assert!(is_still(&target));
    there.put("vm.resume").expect(204);
    assert!(counts(&target));
}

/// A guest that keeps writing to 32 MiB, and shows each round on its serial port.
fn writing() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03, 0xb0, b'.', 0xee]; // mov dx, 0x3f8; mov al, '.'; out dx, al
    code.extend([0xbb, 0, 0, 0x40, 0]); // mov ebx, 0x400000
    let top = code.len();
    code.extend([0xff, 0x03]); // inc dword [ebx]
    code.extend([0x81, 0xc3, 0, 0x10, 0, 0]); // add ebx, 4096
    code.extend([0x81, 0xfb, 0, 0, 0x40, 0x02]); // cmp ebx, 0x2400000
    let back = top.cast_signed() - (code.len() + 2).cast_signed();
    code.extend([0x75, i8::try_from(back).unwrap().cast_unsigned()]); // jne top
    let back = -(code.len() + 2).cast_signed();
    code.extend([0xeb, i8::try_from(back).unwrap().cast_unsigned()]); // jmp to the first
    code
}

/// A VMM whose guest writes too fast for any connection.
pub(crate) fn writer() -> (Vmm, Client) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let mut config = vmm.config(json!([]));
    config["payload"]["kernel"] = json!(vmm.files.kernel(&writing()));
    config["serial"] = json!({"mode": "File", "file": "serial"});
    let client = vmm.boot_config(&config);
    // Its first round is complete, so that the first pass has all of the pages.
    wait_for("the guest", || dots(&vmm) > 1);
    (vmm, client)
}

#[test]
fn a_guest_that_writes_too_fast_is_throttled_until_the_timeout() {
    let (vmm, mut client) = writer();
    let _target = Target::listen(&vmm.files.path("migration"), Ends::Slow);
    let body = json!({"destination_url": url(&vmm), "downtime_ms": 20, "timeout_s": 30});
    client.put_json("vm.send-migration", &body).expect(204);
    let ended = wait_for_state(&mut client, "failed");
    println!("{ended}");
    assert!(ended["elapsed_ms"].as_u64().unwrap() >= 30_000, "{ended}");
    assert!(ended["throttle_percent"].as_u64().unwrap() >= 10 && ended["pass"].as_u64().unwrap() > 2, "{ended}");
    assert!(ended["error"].as_str().unwrap().starts_with("after timeout_s=30, the guest still writes"), "{ended}");
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
}

#[test]
fn an_ignored_timeout_lets_the_downtime_last_as_long_as_needed() {
    let (vmm, mut client) = writer();
    let _target = Target::listen(&vmm.files.path("migration"), Ends::Slow);
    let body = json!({"destination_url": url(&vmm), "downtime_ms": 20, "timeout_s": 0, "timeout_strategy": "Ignore"});
    client.put_json("vm.send-migration", &body).expect(204);
    let ended = wait_for_state(&mut client, "finished");
    println!("{ended}");
    assert!(ended["downtime"]["total_us"].as_u64().unwrap() > 20_000 && ended["pass"] == 1, "{ended}");
    client.get("vm.info").expect(404);
}

/// A guest that shows its start, waits for a moment, and restarts.
fn restarting() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03, 0xb0, b'R', 0xee]; // mov dx, 0x3f8; mov al, 'R'; out dx, al
    code.extend([0xb9, 0, 0, 4, 0]); // mov ecx, 0x40000
    code.extend([0x49, 0x75, 0xfd]); // dec ecx; jnz
    code.extend([0xb0, 0xfe, 0xe6, 0x64]); // mov al, 0xfe; out 0x64, al
    code.extend([0xeb, 0xfe]); // jmp to itself
    code
}

#[test]
fn a_guest_restart_waits_for_the_migration_to_end_either_way() {
    let (vmm, starts) = (Vmm::start(), |vmm: &Vmm| fs::read(vmm.files.path("serial")).unwrap_or_default().len());
    let mut config = config(&vmm);
    config["payload"]["kernel"] = json!(vmm.files.kernel(&restarting()));
    let mut client = vmm.boot_config(&config);
    wait_for("two starts", || starts(&vmm) > 1);
    let target = Target::listen(&vmm.files.path("migration"), Ends::NeverPrepares);
    send(&mut client, &url(&vmm));
    let mut last = (starts(&vmm), Instant::now());
    wait_for("the guest to stop", || {
        if starts(&vmm) != last.0 {
            last = (starts(&vmm), Instant::now());
        }
        last.1.elapsed() > Duration::from_secs(4)
    });
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    client.put("vm.cancel-migration").expect(204);
    assert!(target.was_told_of_cancel());
    wait_for("another start", || starts(&vmm) > last.0);
    // The restart is sent to the target.
    let other = Vmm::start();
    let mut there = receive(&other, &url(&other));
    send(&mut client, &url(&other));
    wait_for_state(&mut there, "finished");
    wait_for("starts at the target", || starts(&other) > 1);
}

#[test]
fn a_vm_that_is_shut_down_is_not_sent() {
    let (vmm, mut client) = source();
    let target = Target::listen(&vmm.files.path("migration"), Ends::NeverPrepares);
    send(&mut client, &url(&vmm));
    wait_for_phase(&mut client, "preparing");
    client.put("vm.shutdown").expect(204);
    wait_for_state(&mut client, "guest-shut-down");
    assert!(target.was_told_of_cancel());
    client.put("vm.boot").expect(204);
    assert!(counts(&vmm));
}

#[test]
fn a_migration_that_cannot_work_is_refused_in_one_line() {
    let (_vmm, mut client) = source();
    for (body, said) in [
        (json!({"destination_url": "tcp:h"}), "write it as tcp:<host>:<port> or unix:<path>"),
        (json!({"destination_url": "unix:/m", "memory_mode": "Postcopy"}), "memory_mode=Postcopy"),
        (json!({"destination_url": "unix:/m", "downtime_ms": 0}), "downtime_ms=0"),
        (json!({"destination_url": "unix:/m", "connections": 2}), "connections=2: a Unix socket has one"),
        (json!({"destination_url": "tcp:h:1", "connections": 129}), "connections=129: give 1 to 128"),
        (json!({"destination_url": "tcp:h:1", "local": true}), "local=true: memory is passed over a Unix socket only"),
        (json!({"destination_url": "tcp:h:1", "tls_dir": "/t"}), "tls_dir=/t: ca-cert.pem: No such file"),
    ] {
        let answer = client.put_json("vm.send-migration", &body).expect(400);
        assert!(answer[1].as_str().unwrap().contains(said), "{answer}");
    }
    client.get("vm.migration-progress").expect(404);
    client.put("vm.cancel-migration").expect(409);
    client.put_json("vm.receive-migration", &json!({"receiver_url": "unix:m"})).expect(409);
    // No program listens there.
    send(&mut client, "unix:/no/such/socket");
    let ended = wait_for_state(&mut client, "failed");
    assert!(ended["error"].as_str().unwrap().contains("destination_url=unix:/no/such/socket: "), "{ended}");
}

#[test]
fn file_memory_goes_to_an_empty_file_and_never_to_one_in_use() {
    const SIZE: u64 = 64 << 20;
    let (source, target) = (Vmm::start(), Vmm::start());
    let file = source.files.sparse("zone", SIZE);
    let mut config = config(&source);
    config["memory"] = json!({"size": 0, "zones": [{"id": "z", "size": SIZE, "file": "zone", "shared": true}]});
    let mut client = source.boot_config(&config);
    // On the target, the name is a link to the same file.
    let other = target.files.path("zone");
    std::os::unix::fs::symlink(file, &other).unwrap();
    receive(&target, &url(&target));
    send(&mut client, &url(&target));
    let failed = wait_for_state(&mut client, "failed");
    let said = failed["error"].as_str().unwrap();
    assert!(said.starts_with("the target: --memory-zone id=z,file=zone: the file has data"), "{failed}");
    assert!(counts(&source));
    fs::remove_file(other).unwrap();
    target.files.sparse("zone", SIZE);
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert!(counts(&target));
}

#[test]
fn a_guest_restored_on_demand_is_sent_once_its_memory_is_read() {
    let (vmm, mut client) = source();
    let folder = vmm.files.path("saved");
    fs::create_dir(&folder).unwrap();
    let saved = format!("file://{}", folder.display());
    client.put("vm.pause").expect(204);
    client.put_json("vm.snapshot", &json!({"destination_url": saved})).expect(204);
    client.put("vm.delete").expect(204);
    let restore = json!({"source_url": saved, "memory_restore_mode": "OnDemand", "resume": true});
    client.put_json("vm.restore", &restore).expect(204);
    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    let to = json!({"destination_url": url(&target)});
    wait_for("its memory", || client.put_json("vm.send-migration", &to).status == 204);
    wait_for_state(&mut there, "finished");
    assert!(counts(&target));
}

#[test]
fn a_vm_being_sent_refuses_changes_and_cancels_at_once() {
    let (vmm, mut client) = source();
    let target = Target::listen(&vmm.files.path("migration"), Ends::NeverPrepares);
    send(&mut client, &url(&vmm));
    wait_for_phase(&mut client, "preparing");
    for (endpoint, body) in [
        ("vm.pause", None),
        ("vm.resume", None),
        ("vm.reboot", None),
        ("vm.resize", Some(json!({"desired_vcpus": 1}))),
        ("vm.add-disk", Some(json!({"path": "/d"}))),
        ("vm.send-migration", Some(json!({"destination_url": "unix:/m"}))),
        ("vm.snapshot", Some(json!({"destination_url": "file:///s"}))),
    ] {
        let answer = client.ask("PUT", endpoint, body.as_ref(), &[]).expect(409);
        assert!(answer[0].as_str().unwrap().contains("being sent to another host"), "{endpoint}: {answer}");
    }
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    client.put("vm.cancel-migration").expect(204);
    let began = Instant::now();
    let ended = wait_for_state(&mut client, "cancelled");
    assert!(began.elapsed() < Duration::from_secs(6) && ended["downtime"].is_null(), "{ended}");
    assert!(counts(&vmm) && target.was_told_of_cancel());
    client.put("vm.pause").expect(204);
}

#[test]
fn a_target_that_fails_before_go_leaves_the_guest_at_the_source() {
    let (vmm, mut client) = source();
    for ends in Ends::BEFORE_GO {
        let _ = fs::remove_file(vmm.files.path("migration"));
        let _target = Target::listen(&vmm.files.path("migration"), ends);
        send(&mut client, &url(&vmm));
        let ended = wait_for_state(&mut client, "failed");
        let error = ended["error"].as_str().unwrap();
        println!("{ends:?}: {error}");
        assert!(!error.is_empty() && !error.contains('\n'));
        assert_eq!(client.get("vm.info").expect(200)["state"], "Running", "{ends:?}");
        assert!(counts(&vmm), "{ends:?}");
    }
    // No resources are left, and the VM can still migrate.
    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert!(counts(&target));
}

#[test]
fn a_target_lost_after_go_leaves_the_state_unknown_until_forced() {
    let (vmm, mut client) = source();
    let _target = Target::listen(&vmm.files.path("migration"), Ends::DiesAfterGo);
    send(&mut client, &url(&vmm));
    wait_for_state(&mut client, "unknown");
    assert_eq!(client.get("vm.info").expect(200)["state"], "Paused");
    assert!(is_still(&vmm));
    client.put("vm.cancel-migration").expect(409);
    let answer = client.put("vm.resume").expect(409);
    assert!(answer[0].as_str().unwrap().contains("may be running the guest"), "{answer}");
    client.put_json("vm.resume", &json!({"force": true})).expect(204);
    wait_for("the source", || progress(&mut client)["state"] == "forced");
    assert!(counts(&vmm));
    client.put("vm.pause").expect(204);
}

#[test]
fn a_target_that_fails_after_go_gives_the_guest_back() {
    let (vmm, mut client) = source();
    let _target = Target::listen(&vmm.files.path("migration"), Ends::FailsAfterGo);
    send(&mut client, &url(&vmm));
    let ended = wait_for_state(&mut client, "failed");
    assert!(ended["error"].as_str().unwrap().contains("the lock of disk0"), "{ended}");
    assert!(counts(&vmm));
}

#[test]
fn a_target_can_be_cancelled_and_leaves_nothing() {
    let target = Vmm::start();
    // After its first reply, its server has all of its own files.
    target.client().get("vmm.ping").expect(200);
    let files = target.open_files();
    let mut there = receive(&target, &url(&target));
    there.put_json("vm.create", &target.config(json!([]))).expect(409);
    there.put_json("vm.receive-migration", &json!({"receiver_url": "unix:other"})).expect(409);
    there.put("vm.cancel-migration").expect(204);
    wait_for_state(&mut there, "cancelled");
    assert!(!target.files.path("migration").exists());
    wait_for("its files", || target.open_files() <= files + 1);
    assert!(target.threads().iter().all(|name| !name.starts_with("migration")));
    there.put_json("vm.create", &target.config(json!([]))).expect(204);
}

#[test]
fn an_invalid_or_dying_source_leaves_no_vm_at_the_target() {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    let path = target.files.path("migration");
    // Cloud Hypervisor's first bytes, and half a greeting: the target keeps waiting for a source.
    for bytes in [&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].repeat(4)[..], b"sriov"] {
        let mut stranger = UnixStream::connect(&path).unwrap();
        stranger.write_all(bytes).unwrap();
    }
    thread::sleep(Duration::from_millis(300));
    assert_eq!(progress(&mut there)["phase"], "listening");
    // A source whose offer has no known field.
    peer::offer(&path, b"{\"program\": 1}");
    let ended = wait_for_state(&mut there, "failed");
    assert!(ended["error"].as_str().unwrap().contains("the source's offer"), "{ended}");
    there.get("vm.info").expect(404);
    assert!(!path.exists());
    // A source that dies in the middle of a frame.
    let mut there = receive(&target, &url(&target));
    peer::half_a_frame(&path);
    wait_for_state(&mut there, "failed");
    there.get("vm.info").expect(404);
    there.put_json("vm.create", &target.config(json!([]))).expect(204);
}
