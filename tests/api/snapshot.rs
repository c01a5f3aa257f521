//! Snapshots of tiny guests, and restored guests.

mod disks;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::net::tap::{self, Queues};
use crate::rig::client::{Answer, Client};
use crate::rig::code::Code;
use crate::rig::driven::{drive_in, slot};
use crate::rig::vmm::{BINARY, Vmm, reasons, taps, wait_for};
use crate::templates::edit;

/// Address of the guest's counter.
const COUNTER: u32 = 0x20_0000;
/// The memory restore modes.
const MODES: [&str; 4] = ["Copy", "Map", "OnDemand", "Auto"];

/// A guest that counts in memory and in a register. It shows on the serial port `.` for each 2^12 turns, and if the two
/// counters differ, it shows `!` and halts.
pub(crate) fn counting() -> Vec<u8> {
    let mut code = vec![0x31, 0xc0]; // xor eax, eax
    // mov dword [COUNTER], 0
    code.extend([&[0xc7, 0x05][..], &COUNTER.to_le_bytes(), &[0; 4]].concat());
    let top = code.len();
    code.push(0x40); // inc eax
    code.extend([&[0xff, 0x05][..], &COUNTER.to_le_bytes()].concat()); // inc dword [COUNTER]
    code.extend([&[0x3b, 0x05][..], &COUNTER.to_le_bytes()].concat()); // cmp eax, [COUNTER]
    code.extend([0x74, 0x08]); // je over the next
    // mov dx, 0x3f8; mov cl, al; mov al, '!'; out dx, al -- then stays wrong
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'!', 0xee, 0xf4]);
    // test eax, 0xfff; jnz top
    code.extend([0xa9, 0xff, 0x0f, 0x00, 0x00]);
    let back = top.cast_signed() - (code.len() + 2).cast_signed();
    code.extend([0x75, i8::try_from(back).unwrap().cast_unsigned()]);
    // mov ebx, eax; mov dx, 0x3f8; mov al, '.'; out dx, al; mov eax, ebx; jmp top
    code.extend([0x89, 0xc3, 0x66, 0xba, 0xf8, 0x03, 0xb0, b'.', 0xee, 0x89, 0xd8]);
    let back = top.cast_signed() - (code.len() + 2).cast_signed();
    code.extend([0xeb, i8::try_from(back).unwrap().cast_unsigned()]);
    code
}

/// A VM with such a guest, which writes to the file `serial`.
pub(crate) fn config(vmm: &Vmm) -> Value {
    let mut config = vmm.config(json!([]));
    config["payload"]["kernel"] = json!(vmm.files.kernel(&counting()));
    config["serial"] = json!({"mode": "File", "file": vmm.files.path("serial")});
    config
}

/// A paused VM with such a guest, which has run for a while.
pub(crate) fn paused(vmm: &Vmm, config: &Value) -> Client {
    let before = dots(vmm);
    let mut client = vmm.boot_config(config);
    wait_for("the guest", || dots(vmm) > before);
    client.put("vm.pause").expect(204);
    client
}

pub(crate) fn dots(vmm: &Vmm) -> usize {
    let text = fs::read_to_string(vmm.files.path("serial")).unwrap_or_default();
    assert!(!text.contains('!'), "the guest finds other memory than it left");
    text.len()
}

/// A new folder, and its URL.
pub(crate) fn folder(vmm: &Vmm, name: &str) -> (PathBuf, String) {
    let path = vmm.files.path(name);
    fs::create_dir(&path).unwrap();
    let url = format!("file://{}", path.display());
    (path, url)
}

pub(crate) fn snapshot(client: &mut Client, url: &str) -> Answer {
    client.put_json("vm.snapshot", &json!({"destination_url": url}))
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Redirects the saved VM's serial port to a file of `vmm`, as an orchestrator edits the configuration.
pub(crate) fn redirect(folder: &Path, vmm: &Vmm) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["serial"]["file"] = json!(vmm.files.path("serial"));
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn a_guest_resumes_where_it_was_in_each_mode() {
    let source = Vmm::start();
    let mut client = paused(&source, &config(&source));
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    assert_eq!(names(&path), ["config.json", "memory-ranges", "state.json"]);
    assert_eq!(client.get("vm.info").expect(200)["state"], "Paused");
    let before = dots(&source);
    client.put("vm.resume").expect(204);
    wait_for("the source", || dots(&source) > before + 1);
    for mode in MODES {
        let target = Vmm::start();
        redirect(&path, &target);
        let mut client = target.client();
        client.put_json("vm.restore", &json!({"source_url": url, "memory_restore_mode": mode})).expect(204);
        assert_eq!(client.get("vm.info").expect(200)["state"], "Paused", "{mode}");
        client.put("vm.resume").expect(204);
        wait_for(mode, || dots(&target) > 2);
        client.put("vm.reboot").expect(204);
        let before = dots(&target);
        wait_for("the restarted guest", || dots(&target) > before + 1);
    }
}

#[test]
fn a_mapped_guest_keeps_its_memory_when_its_file_is_replaced() {
    let source = Vmm::start();
    let mut client = paused(&source, &config(&source));
    let [(path, url), (other, other_url)] = ["saved", "other"].map(|name| folder(&source, name));
    snapshot(&mut client, &url).expect(204);
    let before = dots(&source);
    client.put("vm.resume").expect(204);
    wait_for("the source", || dots(&source) > before + 1);
    client.put("vm.pause").expect(204);
    snapshot(&mut client, &other_url).expect(204);
    client.put("vm.delete").expect(204);
    let target = Vmm::start();
    redirect(&path, &target);
    let mut client = target.client();
    restore(&mut client, &url, "Map").expect(204);
    let saved = memory(&path);
    fs::rename(other.join("memory-ranges"), path.join("memory-ranges")).unwrap();
    assert!(memory(&path) != saved);
    let (again, again_url) = folder(&target, "again");
    snapshot(&mut client, &again_url).expect(204);
    assert!(memory(&again) == saved);
    client.put("vm.resume").expect(204);
    wait_for("the target", || dots(&target) > 2);
    client.put("vm.delete").expect(204);
    for mode in MODES {
        let refused = restore(&mut client, &url, mode);
        assert_eq!((refused.status, said(&refused).contains("another snapshot")), (400, true), "{mode}: {refused:?}");
    }
}

/// A paused VM with an idle guest.
fn idle(vmm: &Vmm, net: Value) -> Client {
    let mut client = vmm.boot(net);
    client.put("vm.pause").expect(204);
    client
}

pub(crate) fn restore(client: &mut Client, url: &str, mode: &str) -> Answer {
    client.put_json("vm.restore", &json!({"source_url": url, "memory_restore_mode": mode}))
}

pub(crate) fn said(answer: &Answer) -> String {
    reasons(answer).join(": ")
}

fn machine(folder: &Path) -> Value {
    let state: Value = serde_json::from_slice(&fs::read(folder.join("state.json")).unwrap()).unwrap();
    state["state"]["machine"].clone()
}

/// The guest's saved memory.
fn memory(folder: &Path) -> Vec<u8> {
    let mut bytes = fs::read(folder.join("memory-ranges")).unwrap();
    // Without the page that identifies the snapshot.
    bytes.truncate(bytes.len() - 4096);
    bytes
}

#[test]
fn a_snapshot_of_a_restored_vm_is_the_same() {
    let source = Vmm::start();
    let mut client = idle(&source, json!([{"id": "pf0", "tap": "snapb", "sriov_vfs": 3}]));
    let (first, url) = folder(&source, "first");
    snapshot(&mut client, &url).expect(204);
    let found = fs::metadata(first.join("memory-ranges")).unwrap();
    assert!(found.blocks() * 512 < 1 << 20 && found.len() > 64 << 20, "{found:?}");
    assert!(
        names(&first)
            .iter()
            .all(|name| { fs::metadata(first.join(name)).unwrap().permissions().mode() & 0o777 == 0o600 })
    );
    let state = fs::metadata(first.join("state.json")).unwrap().len();
    assert!(state < 64 << 10, "{state} bytes of state");
    client.put("vm.delete").expect(204);
    for mode in MODES {
        let target = Vmm::start();
        let mut client = target.client();
        restore(&mut client, &url, mode).expect(204);
        let (again, url) = folder(&target, "again");
        snapshot(&mut client, &url).expect(204);
        assert!(memory(&first) == memory(&again), "{mode}");
        assert_eq!(machine(&first), machine(&again), "{mode}");
        let config = |folder: &Path| fs::read_to_string(folder.join("config.json")).unwrap();
        assert_eq!(config(&first), config(&again), "{mode}");
    }
}

#[test]
fn a_refused_snapshot_gives_one_line_and_leaves_nothing() {
    let vmm = Vmm::start();
    let (path, url) = folder(&vmm, "saved");
    let mut client = vmm.client();
    assert_eq!(snapshot(&mut client, &url).status, 404);
    let mut client = vmm.boot(json!([]));
    let running = snapshot(&mut client, &url);
    assert_eq!((running.status, said(&running).contains("pause it first")), (409, true), "{running:?}");
    client.put("vm.pause").expect(204);
    for (url, status) in [("tcp:1", 400), ("file:///nonexistent/folder", 404), ("file:///dev/null", 400), ("", 400)] {
        let refused = snapshot(&mut client, url);
        assert_eq!(refused.status, status, "{url}: {refused:?}");
        assert!(!said(&refused).contains('\n'));
    }
    assert!(names(&path).is_empty());
    snapshot(&mut client, &url).expect(204);
    let again = snapshot(&mut client, &url);
    assert_eq!((again.status, said(&again).contains("already has a snapshot")), (409, true), "{again:?}");
    let taken = restore(&mut client, &url, "Copy");
    assert_eq!((taken.status, said(&taken).contains("already a VM")), (409, true), "{taken:?}");
    client.put("vm.resume").expect(204);
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
}

#[test]
fn a_snapshot_that_is_damaged_is_refused_in_one_line() {
    let vmm = Vmm::start();
    let mut client = idle(&vmm, json!([]));
    let [(path, url), (other, other_url)] = ["saved", "other"].map(|name| folder(&vmm, name));
    snapshot(&mut client, &url).expect(204);
    snapshot(&mut client, &other_url).expect(204);
    client.put("vm.delete").expect(204);
    let whole = |name: &str| fs::read(path.join(name)).unwrap();
    let mut refused = |what: &str| {
        for mode in ["Copy", "Map"] {
            let answer = restore(&mut client, &url, mode);
            assert!((400..=404).contains(&answer.status), "{what}: {answer:?}");
            assert!(!said(&answer).contains('\n'), "{what}: {answer:?}");
        }
    };
    for name in ["state.json", "config.json"] {
        let bytes = whole(name);
        let ends =
            (0..40).chain((40..bytes.len() - 40).step_by(bytes.len() / 40)).chain(bytes.len() - 40..bytes.len() - 2);
        for len in ends {
            fs::write(path.join(name), &bytes[..len]).unwrap();
            refused(&format!("{name}: {len} bytes"));
        }
        fs::remove_file(path.join(name)).unwrap();
        refused(name);
        fs::write(path.join(name), &bytes).unwrap();
    }
    let memory = fs::File::options().write(true).open(path.join("memory-ranges")).unwrap();
    let len = memory.metadata().unwrap().len();
    for wrong in [0, 4096, len - 1, len + 1] {
        memory.set_len(wrong).unwrap();
        refused(&format!("{wrong} bytes of memory"));
    }
    memory.set_len(len).unwrap();
    refused("memory without its end");
    fs::rename(other.join("memory-ranges"), path.join("memory-ranges")).unwrap();
    refused("another's memory");
    let state = String::from_utf8(whole("state.json")).unwrap();
    fs::write(path.join("state.json"), state.replace("\"wanted_vcpus\":2", "\"wanted_vcpus\":1")).unwrap();
    refused("a changed state");
    fs::write(path.join("state.json"), r#"{"id": "", "snapshots": {}, "snapshot_data": {}}"#).unwrap();
    let answer = restore(&mut client, &url, "Copy");
    assert!(said(&answer).contains("Cloud Hypervisor"), "{answer:?}");
    vmm.boot(json!([]));
}

/// A value of `/proc/PID/status`, in KiB.
fn resident(vmm: &Vmm) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// `CH_RESTORES=1000` for a longer run.
#[test]
fn many_restores_leak_no_descriptor_thread_or_memory() {
    let rounds = std::env::var("CH_RESTORES").ok().map_or(20, |text| text.parse().unwrap());
    let vmm = Vmm::start();
    let mut client = idle(&vmm, json!([{"id": "pf0", "tap": "snapm", "sriov_vfs": 4}]));
    let (_, url) = folder(&vmm, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    let mut before = None;
    for round in 0..rounds {
        let body = json!({"source_url": url, "memory_restore_mode": MODES[round % 4], "resume": round % 2 == 0});
        client.put_json("vm.restore", &body).expect(204);
        client.put("vm.delete").expect(204);
        // Threads that serve requests start and end with the requests.
        let mut threads = vmm.threads();
        threads.retain(|name| name.strip_prefix("http-").is_none_or(|rest| rest == "server\n"));
        let now = (vmm.open_files(), threads, taps("snapm"));
        if round == 7 {
            before = Some((now, resident(&vmm)));
        } else if let Some((before, _)) = &before {
            assert_eq!(now, *before, "round {round}");
        }
    }
    let ((_, _, left), size) = before.unwrap();
    let after = resident(&vmm);
    println!("{size} KiB of memory after 8 restores, {after} KiB after {rounds}");
    assert!(left.is_empty() && after < size + (8 << 10), "{after} KiB of memory instead of {size}");
}

#[test]
fn vfs_are_restored_over_other_backends_in_two_clones_at_once() {
    let source = Vmm::start();
    let mut config = config(&source);
    config["net"] = json!([{"id": "pf0", "tap": "snapv", "mac": "52:54:00:00:00:09", "sriov_vfs": 3,
        "vfs": [{"index": 1, "tap": "snapvone"}]}]);
    let mut client = paused(&source, &config);
    let link = json!({"pf": "pf0", "index": 2, "link": "down"});
    client.put_json("vm.set-vf", &link).expect(204);
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    let before = client.get("vm.info").expect(200);
    client.put("vm.resume").expect(204);
    let clones: Vec<_> = ["snapw", "snapx"]
        .into_iter()
        .map(|tap| {
            let target = Vmm::start();
            redirect(&path, &target);
            let mut client = target.client();
            let backends = json!([{"id": "pf0", "tap": tap}, {"id": "pf0", "vf": 1, "tap": format!("{tap}one")},
            {"id": "pf0", "vf": 2, "num_fds": 1}, {"id": "pf0", "vf": 0, "tap": format!("{tap}nul")}]);
            let body = json!({"source_url": url, "backends": backends, "resume": true});
            let without = client.put_json("vm.restore", &body);
            assert_eq!(
                (without.status, said(&without).contains("1 descriptors are announced")),
                (400, true),
                "{without:?}"
            );
            let fds = [tap::queue(&format!("{tap}fd"), Queues::One)];
            client.ask("PUT", "vm.restore", Some(&body), &fds).expect(204);
            let after = client.get("vm.info").expect(200);
            let vfs = |info: &Value, what: &str| -> Vec<Value> {
                info["sriov"][0]["vfs"].as_array().unwrap().iter().map(|vf| vf[what].clone()).collect()
            };
            for what in ["mac", "bdf", "link", "state"] {
                assert_eq!(vfs(&before, what), vfs(&after, what));
            }
            assert_eq!(vfs(&after, "link")[2], "down");
            let names: Vec<_> =
                after["sriov"][0]["vfs"].as_array().unwrap().iter().map(|vf| &vf["backend"]).cloned().collect();
            assert_eq!(names[0]["name"], format!("{tap}nul"));
            assert_eq!(names[1]["name"], format!("{tap}one"));
            assert_eq!((&names[2]["kind"], &after["state"]), (&json!("fd"), &json!("Running")));
            // Descriptors must be passed again.
            client.put("vm.pause").expect(204);
            let (_, url) = folder(&target, "again");
            snapshot(&mut client, &url).expect(204);
            client.put("vm.delete").expect(204);
            let missing = restore(&mut client, &url, "Copy");
            assert_eq!(
                (missing.status, said(&missing).contains("net_fds: pf0/2 had 1 descriptors")),
                (400, true),
                "{missing:?}"
            );
            let net_fds = json!([{"id": "pf0", "vf": 2, "num_fds": 1}]);
            let body = json!({"source_url": url, "net_fds": net_fds, "resume": true});
            client.ask("PUT", "vm.restore", Some(&body), &fds).expect(204);
            target
        })
        .collect();
    let all: Vec<_> = clones.iter().chain([&source]).collect();
    let before: Vec<_> = all.iter().map(|vmm| dots(vmm)).collect();
    wait_for("both clones and the guest they come from", || {
        all.iter().zip(&before).all(|(vmm, before)| dots(vmm) > before + 1)
    });
    for vmm in all {
        assert_eq!(vmm.client().get("vm.info").expect(200)["state"], "Running");
    }
}

#[test]
fn a_vm_is_restored_by_the_command_line_without_its_kernel() {
    let source = Vmm::start();
    let mut client = idle(&source, json!([]));
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    fs::remove_file(source.files.path("vmlinux")).unwrap();
    let mut command = Command::new(BINARY);
    command.args(["--restore", &format!("source_url={url},memory_restore_mode=auto,resume=on")]);
    let target = Vmm::of(command);
    let mut client = target.client();
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    let log = || fs::read_to_string(target.files.path("log")).unwrap();
    assert!(log().contains("vmlinux"), "{}", log());
    assert_eq!(client.put("vm.reboot").status, 400);
    let mut command = Command::new(BINARY);
    let none = command.args(["--restore", &format!("source_url=file://{}/none", path.display())]).output().unwrap();
    let said = String::from_utf8(none.stderr).unwrap();
    assert_eq!((none.status.code(), said.lines().count()), (Some(1), 1), "{said}");
}

#[test]
fn a_confined_vm_is_saved_and_restored_where_its_rules_allow_it() {
    let source = Vmm::start();
    let [(allowed, url), (_, other)] = ["allowed", "other"].map(|name| folder(&source, name));
    let mut config = source.config(json!([]));
    config["landlock_enable"] = json!(true);
    config["landlock_rules"] = json!([{"path": allowed, "access": "rw"}]);
    let mut client = source.boot_config(&config);
    client.put("vm.pause").expect(204);
    let refused = snapshot(&mut client, &other);
    assert_eq!((refused.status, said(&refused).contains("--landlock-rules path=")), (409, true), "{refused:?}");
    snapshot(&mut client, &url).expect(204);
    assert_eq!(names(&allowed).len(), 3);
    for mode in MODES {
        let target = Vmm::start();
        let mut client = target.client();
        restore(&mut client, &url, mode).expect(204);
        client.put("vm.resume").expect(204);
        client.put("vm.pause").expect(204);
        let (inside, url) = (allowed.join(mode), format!("file://{}/{mode}", allowed.display()));
        fs::create_dir(&inside).unwrap();
        snapshot(&mut client, &url).expect(204);
        assert_eq!((names(&inside).len(), snapshot(&mut client, &other).status), (3, 409));
    }
}

#[test]
fn another_size_of_memory_is_refused_and_not_ignored() {
    let source = Vmm::start();
    let mut client = paused(&source, &config(&source));
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    for size in [32 << 20, 128 << 20] {
        edit(&path, |config| config["memory"]["size"] = json!(size));
        for mode in MODES {
            let refused = restore(&mut client, &url, mode);
            let sizes = format!("memory.size: {}M in the configuration, but the VM was saved with 64M", size >> 20);
            assert_eq!((refused.status, said(&refused).contains(&sizes)), (400, true), "{mode}: {refused:?}");
            assert!(!said(&refused).contains('\n'));
        }
    }
    edit(&path, |config| config["memory"]["size"] = json!(64 << 20));
    restore(&mut client, &url, "Copy").expect(204);
}

/// Address of the entropy device's rings: above all memory that the guest writes.
const RINGS_AT: u32 = 0x1780_0000;
const LARGE: u64 = 384 << 20;

/// A guest that only halts: `cli; hlt; jmp back`.
const HALTING: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];

/// A guest that writes to each page of a large memory, drives the entropy device in `slot`, shows a dot, and stops.
fn filling(slot: u32) -> Vec<u8> {
    // mov edi, 3 MiB; 0: mov [edi], edi; add edi, 4096; cmp edi, 368 MiB; jb 0
    let fill = Code::default().bytes(&[&[0xbf], &0x30_0000u32.to_le_bytes(), &[0x89, 0x3f, 0x81, 0xc7]]).bytes(&[
        &4096u32.to_le_bytes(),
        &[0x81, 0xff],
        &0x1700_0000u32.to_le_bytes(),
        &[0x72, 0xf0],
    ]);
    // A chain of one device-writable descriptor.
    let buffer = fill.dword(RINGS_AT, RINGS_AT + 0x8000).dword(RINGS_AT + 8, 64).dword(RINGS_AT + 12, 2);
    let driven = drive_in(buffer, slot, &[0], RINGS_AT);
    // mov edx, 0x3f8; mov al, '.'; out dx, al; cli; hlt; jmp back
    driven.bytes(&[&[0xba, 0xf8, 0x03, 0, 0, 0xb0, b'.', 0xee, 0xfa, 0xf4, 0xeb, 0xfd]]).0
}

/// Restores such a guest on demand and truncates its memory file before the entropy device's rings are read. `None` if
/// they were read earlier.
fn cut_short() -> Option<(Vmm, Client)> {
    let vmm = Vmm::start();
    let mut config = config(&vmm);
    config["memory"]["size"] = json!(LARGE);
    // This guest writes nothing, so that each byte of the serial port is from the next one.
    vmm.files.kernel(&HALTING);
    let mut client = vmm.boot_config(&config);
    let slot = slot(&client.get("vm.info").expect(200)["device_tree"], "__rng");
    client.put("vm.shutdown").expect(204);
    vmm.files.kernel(&filling(slot));
    client.put("vm.boot").expect(204);
    wait_for("the guest", || dots(&vmm) > 0);
    client.put("vm.pause").expect(204);
    let (path, url) = folder(&vmm, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    let file = fs::File::options().write(true).open(path.join("memory-ranges")).unwrap();
    // Drops the page cache to slow down reading. SAFETY: the descriptor is open, and the call takes no pointers.
    unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&file), 0, 0, libc::POSIX_FADV_DONTNEED) };
    restore(&mut client, &url, "OnDemand").expect(204);
    file.set_len(0).unwrap();
    client.put("vm.resume").expect(204);
    let log = || fs::read_to_string(vmm.files.path("log")).unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    while !log().contains("the guest waits: its memory cannot be read") {
        if Instant::now() > until {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Some((vmm, client))
}

#[test]
fn a_guest_whose_memory_cannot_be_read_is_ended_at_once() {
    for end in ["vm.delete", "vm.shutdown", "vm.reboot", "SIGTERM"] {
        let cut = (0..5).find_map(|_| cut_short());
        let (mut vmm, mut client) = cut.expect("each time all was read before it could be cut short");
        let (before, began) = (dots(&vmm), Instant::now());
        if end == "SIGTERM" {
            // SAFETY: the process is this test's own child, which was not waited for.
            assert_eq!(unsafe { libc::kill(vmm.pid().cast_signed(), libc::SIGTERM) }, 0);
            vmm.ended();
        } else {
            client.put(end).expect(204);
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{end} took {:?}", began.elapsed());
        if end == "vm.reboot" {
            wait_for("the restarted guest", || dots(&vmm) > before);
        }
    }
}
