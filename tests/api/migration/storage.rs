//! Live migration of tiny guests that write to a disk or persistent memory: no write is lost, and the lock is handed
//! over.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::migration::peer::{Ends, Target};
use crate::migration::{progress, receive, send, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::code::{Code, RINGS, drive};
use crate::rig::vmm::{BINARY, Vmm, wait_for};

const ECAM: u32 = 0xe800_0000;
/// Addresses of the device's registers and table, and of its rings and buffers, chosen by the guest.
const REGISTERS: u32 = 0xd300_0000;
const TABLE: u32 = 0xd400_0000;
const RING: u32 = 0x100_0000;
const HEADER: u32 = RING + 0x3000;
pub(crate) const DATA: u32 = RING + 0x4000;
const STATUS: u32 = RING + 0x5000;
/// The sectors that it writes in turn, repeatedly.
const SECTORS: u32 = 1024;

/// A guest that drives the disk in this slot: it writes an increasing number to the next sector, and shows a dot for
/// each 16 of them, or `!` if a request fails.
fn writing(slot: u32) -> Vec<u8> {
    let request = [(HEADER, 16, 1, 1), (DATA, 512, 1, 2), (STATUS, 1, 2, 0)];
    requesting(slot, &[0], &request, |code| {
        let mut code = code.0;
        code.extend([&[0x89, 0x35][..], &DATA.to_le_bytes()].concat()); // mov [DATA], esi
        code.extend([&[0x89, 0xf0, 0x25][..], &(SECTORS - 1).to_le_bytes()].concat()); // mov eax, esi; and eax, that
        code.extend([&[0xa3][..], &(HEADER + 8).to_le_bytes()].concat()); // mov [sector], eax
        Code(code).dword(HEADER, 1).byte(STATUS, 0xee)
    })
}

/// A guest that drives the device in this slot, with these queues: it repeats a request of these descriptors (address,
/// length, flags, next) in the last queue, and shows a dot for each 16 of them. `each` is executed before each request,
/// with its number in ESI. If [`STATUS`] is not 0 afterwards, it shows `!` and halts.
pub(crate) fn requesting(
    slot: u32,
    queues: &[u16],
    request: &[(u32, u32, u16, u16)],
    each: impl Fn(Code) -> Code,
) -> Vec<u8> {
    let (config, last) = (ECAM + (slot << 15), queues.len() as u32 - 1);
    let (ring, doorbell) = (RING + last * RINGS, REGISTERS + 0x1000 + 4 * u32::from(*queues.last().unwrap()));
    let placed = Code::default()
        .dword(config + 0x18, REGISTERS)
        .dword(config + 0x1c, 0)
        .dword(config + 0x20, TABLE)
        .dword(config + 0x24, 0)
        .word(config + 4, 6);
    let described = request.iter().zip(0..).fold(placed, |code, ((address, len, flags, next), number)| {
        let descriptor = ring + 16 * number;
        code.dword(descriptor, *address)
            .dword(descriptor + 4, 0)
            .dword(descriptor + 8, *len)
            .word(descriptor + 12, *flags)
            .word(descriptor + 14, *next)
    });
    let mut code = drive(described, REGISTERS, TABLE, queues, 0, RING).0;
    code.extend([0x31, 0xf6]); // xor esi, esi
    let top = code.len();
    code.push(0x46); // inc esi
    code = each(Code(code)).0;
    code.extend([&[0x66, 0xff, 0x05][..], &(ring + 0x1002).to_le_bytes()].concat()); // inc word [avail.idx]
    code = Code(code).word(doorbell, *queues.last().unwrap()).0;
    // wait: mov ax, [avail.idx]; pause; cmp ax, [used.idx]; jne wait
    code.extend([&[0x66, 0xa1][..], &(ring + 0x1002).to_le_bytes(), &[0xf3, 0x90, 0x66, 0x3b, 0x05]].concat());
    code.extend([&(ring + 0x2002).to_le_bytes()[..], &[0x75, 0xef]].concat());
    // cmp byte [STATUS], 0; je over the next
    code.extend([&[0x80, 0x3d][..], &STATUS.to_le_bytes(), &[0, 0x74, 0x08]].concat());
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'!', 0xee, 0xf4]); // mov dx, 0x3f8; mov al, '!'; out dx, al; hlt
    let again = |code: &mut Vec<u8>, jump: &[u8]| {
        code.extend(jump);
        let back = i32::try_from(top).unwrap() - i32::try_from(code.len() + 4).unwrap();
        code.extend(back.to_le_bytes());
    };
    code.extend([0xf7, 0xc6, 15, 0, 0, 0]); // test esi, 15
    again(&mut code, &[0x0f, 0x85]); // jnz top
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'.', 0xee]); // mov dx, 0x3f8; mov al, '.'; out dx, al
    again(&mut code, &[0xe9]); // jmp top
    code
}

fn dots(vmm: &Vmm) -> usize {
    let text = fs::read_to_string(vmm.files.path("serial")).unwrap_or_default();
    assert!(!text.contains('!'), "a request failed");
    text.len()
}

/// True if the guest keeps writing.
pub(crate) fn writes(vmm: &Vmm) -> bool {
    let before = dots(vmm);
    wait_for("writes", || dots(vmm) > before + 1);
    true
}

/// A VMM whose guest writes to `disk`. It keeps running without its guest.
pub(crate) fn source(disk: &Value) -> (Vmm, Client) {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let vmm = Vmm::of(command);
    let mut config = vmm.config(json!([]));
    config["serial"] = json!({"mode": "File", "file": "serial"});
    config["disks"] = json!([disk]);
    config["disks"][0]["pci_device_id"] = json!(5);
    config["payload"]["kernel"] = json!(vmm.files.kernel(&writing(5)));
    let client = vmm.boot_config(&config);
    wait_for("the guest", || dots(&vmm) > 2);
    (vmm, client)
}

/// True if another program can lock the whole image.
pub(crate) fn locks(path: &Path) -> bool {
    let file = File::options().read(true).write(true).open(path).unwrap();
    // A child that another test has just forked has the open file, too: closing it here would not unlock it.
    hold(&file, libc::F_WRLCK) && hold(&file, libc::F_UNLCK)
}

/// Checks that each number whose write completed is on the disk, in its sector.
fn check_disk(raw: &[u8]) {
    let sectors = raw.chunks(512).take(SECTORS as usize);
    let numbers: Vec<u32> = sectors.map(|sector| u32::from_le_bytes(sector[..4].try_into().unwrap())).collect();
    let last = *numbers.iter().max().unwrap();
    assert!(last > SECTORS, "{last} were written");
    for (sector, number) in (0..SECTORS).zip(numbers) {
        assert!(number % SECTORS == sector && number > last - SECTORS, "sector {sector} has {number} of {last}");
    }
}

pub(crate) fn raw_image(folder: &tempfile::TempDir) -> (std::path::PathBuf, Value) {
    let path = folder.path().join("disk");
    File::create(&path).unwrap().set_len(u64::from(SECTORS) * 512).unwrap();
    let disk = json!({"id": "disk0", "path": path, "image_type": "Raw"});
    (path, disk)
}

/// Migrates a guest there and back, and there again, while it writes.
fn moves_while_it_writes(disk: &Value, path: &Path) {
    let (source, mut client) = source(disk);
    let target = {
        let mut command = Command::new(BINARY);
        command.arg("--no-shutdown");
        Vmm::of(command)
    };
    let mut there = target.client();
    for turn in 0..3 {
        let (from, to, here, other) = match turn % 2 {
            0 => (&source, &target, &mut client, &mut there),
            _ => (&target, &source, &mut there, &mut client),
        };
        wait_for("writes", || dots(from) > (SECTORS / 16) as usize);
        *other = receive(to, &url(to));
        send(here, &url(to));
        wait_for_state(other, "finished");
        let sent = wait_for_state(here, "finished");
        println!("{sent}");
        assert!(writes(to) && !locks(path), "turn {turn}");
    }
    there.put("vm.delete").expect(204);
}

#[test]
fn a_raw_disk_under_writes_moves_with_its_lock_and_all_data() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = raw_image(&folder);
    moves_while_it_writes(&disk, &path);
    check_disk(&fs::read(&path).unwrap());
    wait_for("the lock", || locks(&path));
}

#[test]
fn a_qcow2_image_under_writes_moves_with_its_cached_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let qemu_img = |arguments: &[&str]| {
        let run = Command::new("qemu-img").args(arguments).arg(&path).output();
        let run = run.expect("qemu-img is missing: apt-get install qemu-utils");
        assert!(run.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&run.stderr));
        run.stdout
    };
    let created = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"])
        .arg(&path)
        .arg("512K")
        .status();
    assert!(created.is_ok_and(|status| status.success()), "qemu-img is missing: apt-get install qemu-utils");
    moves_while_it_writes(&json!({"id": "disk0", "path": path, "image_type": "Qcow2"}), &path);
    qemu_img(&["check", "-q"]);
    let raw = folder.path().join("raw");
    let converted = Command::new("qemu-img").args(["convert", "-O", "raw"]).args([&path, &raw]).status();
    assert!(converted.unwrap().success());
    check_disk(&fs::read(&raw).unwrap());
}

#[test]
fn whatever_fails_leaves_the_lock_of_the_disk_with_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = raw_image(&folder);
    let (vmm, mut client) = source(&disk);
    for ends in Ends::BEFORE_GO.into_iter().chain([Ends::FailsAfterGo]) {
        let _ = fs::remove_file(vmm.files.path("migration"));
        let _target = Target::listen(&vmm.files.path("migration"), ends);
        send(&mut client, &url(&vmm));
        wait_for_state(&mut client, "failed");
        assert!(writes(&vmm) && !locks(&path), "{ends:?}");
    }
    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert!(writes(&target) && !locks(&path));
}

#[test]
fn a_guest_whose_disk_is_taken_stays_paused_until_it_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = raw_image(&folder);
    let (vmm, mut client) = source(&disk);
    // The guest's owner is unknown, so its disk is not locked.
    let _target = Target::listen(&vmm.files.path("migration"), Ends::DiesAfterGo);
    send(&mut client, &url(&vmm));
    wait_for_state(&mut client, "unknown");
    assert!(locks(&path));
    // The target runs the guest, according to its lock, which prevents a forced resume of the source.
    let reader = File::options().read(true).write(true).open(&path).unwrap();
    wait_for("the lock", || hold(&reader, libc::F_WRLCK));
    client.put_json("vm.resume", &json!({"force": true})).expect(204);
    wait_for("the refusal", || progress(&mut client)["error"].as_str().unwrap().contains("in use by another program"));
    assert_eq!(progress(&mut client)["state"], "unknown");
    assert_eq!(client.get("vm.info").expect(200)["state"], "Paused");
    hold(&reader, libc::F_UNLCK);
    client.put_json("vm.resume", &json!({"force": true})).expect(204);
    wait_for("the source", || progress(&mut client)["state"] == "forced");
    assert!(writes(&vmm) && !locks(&path));
}

#[test]
fn a_guest_returned_without_its_lock_resumes_once_disk_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let (path, disk) = raw_image(&folder);
    let (vmm, mut client) = source(&disk);
    let thief = File::options().read(true).write(true).open(&path).unwrap();
    let target = Target::listen(&vmm.files.path("migration"), Ends::WaitsAfterGo);
    send(&mut client, &url(&vmm));
    wait_for("the lock", || hold(&thief, libc::F_WRLCK));
    target.go_on();
    let ended = wait_for_state(&mut client, "failed");
    let error = ended["error"].as_str().unwrap();
    assert!(error.contains("the guest stays paused: its disk locks could not be taken back"), "{error}");
    assert!(error.contains("--disk id=disk0: path=") && error.contains("in use by another program"), "{error}");
    assert_eq!(client.get("vm.info").expect(200)["state"], "Paused");
    // The guest cannot resume without its lock.
    assert_ne!(client.put("vm.resume").status, 204);
    assert_eq!(client.get("vm.info").expect(200)["state"], "Paused");
    hold(&thief, libc::F_UNLCK);
    client.put("vm.resume").expect(204);
    assert!(writes(&vmm) && !locks(&path));
}

/// Takes or releases a lock of the whole file. Returns true on success.
fn hold(file: &File, kind: libc::c_int) -> bool {
    let lock = libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the kernel reads the lock's description, which lives through the call.
    (unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(file), libc::F_OFD_SETLK, &raw const lock) }) == 0
}

#[test]
fn pmem_moves_and_pmem_that_would_lose_data_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pmem");
    File::create(&file).unwrap().set_len(2 << 20).unwrap();
    let (source, target) = (Vmm::start(), Vmm::start());
    let mut config = source.config(json!([]));
    config["pmem"] = json!([{"file": file}]);
    let mut client = source.boot_config(&config);
    client.put_json("vm.add-pmem", &json!({"file": folder.path(), "size": 2 << 20, "id": "lost"})).expect(200);
    let answer = client.put_json("vm.send-migration", &json!({"destination_url": url(&target)})).expect(409);
    assert!(answer[1].as_str().unwrap().contains("--pmem id=lost: file= is a folder"), "{answer}");
    client.put_json("vm.remove-device", &json!({"id": "lost"})).expect(204);
    client.put("vm.reboot").expect(204);
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert_eq!(there.get("vm.info").expect(200)["config"]["pmem"][0]["id"], "_pmem0");
}

/// A VM with persistent memory whose writes are discarded, in slot 5. Its guest has read the memory, or written to it,
/// and counts.
fn discarding(file: &Path, writes: bool) -> (Vmm, Client) {
    const MEMORY: u32 = 0xd500_0000;
    let config = ECAM + (5 << 15);
    let placed = Code::default().dword(config + 0x10, MEMORY).dword(config + 0x14, 0).word(config + 4, 2);
    let code = match writes {
        true => placed.dword(MEMORY + 4096, 7),
        false => placed.bytes(&[&[0xa1], &(MEMORY + 4096).to_le_bytes()]), // mov eax, [that]
    };
    let vmm = Vmm::start();
    let mut config = crate::migration::config(&vmm);
    let code = [code.0, crate::snapshot::counting()].concat();
    config["payload"]["kernel"] = json!(vmm.files.kernel(&code));
    config["pmem"] = json!([{"file": file, "discard_writes": true, "id": "p", "pci_device_id": 5}]);
    let client = vmm.boot_config(&config);
    wait_for("the guest", || crate::migration::dots(&vmm) > 2);
    (vmm, client)
}

#[test]
fn discarding_memory_goes_over_if_nothing_was_written_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pmem");
    fs::write(&file, vec![0x5a; 2 << 20]).unwrap();
    let target = Vmm::start();
    for writes in [true, false] {
        let (vmm, mut client) = discarding(&file, writes);
        let mut there = receive(&target, &url(&target));
        send(&mut client, &url(&target));
        if writes {
            let error = wait_for_state(&mut client, "failed")["error"].clone();
            let said = "--pmem id=p: discard_writes=on: what the guest has written is nowhere else";
            assert!(error.as_str().unwrap().starts_with(said), "{error}");
            assert!(crate::migration::counts(&vmm));
            there.put("vm.cancel-migration").expect(204);
            wait_for_state(&mut there, "cancelled");
        } else {
            wait_for_state(&mut there, "finished");
            assert!(crate::migration::counts(&target));
        }
    }
    assert!(fs::read(file).unwrap().iter().all(|byte| *byte == 0x5a));
}

#[test]
fn discarding_memory_is_saved_if_nothing_was_written_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pmem");
    fs::write(&file, vec![0x5a; 2 << 20]).unwrap();
    for writes in [true, false] {
        let (vmm, mut client) = discarding(&file, writes);
        let saved = folder.path().join(format!("saved-{writes}"));
        fs::create_dir(&saved).unwrap();
        let to = json!({"destination_url": format!("file://{}", saved.display())});
        client.put("vm.pause").expect(204);
        let answer = client.put_json("vm.snapshot", &to);
        if writes {
            assert!(answer.body[1].as_str().unwrap().contains("--pmem id=p: discard_writes=on"), "{answer:?}");
            assert_eq!((answer.status, fs::read_dir(&saved).unwrap().count()), (409, 0));
        } else {
            answer.expect(204);
            client.put("vm.delete").expect(204);
            let from = json!({"source_url": format!("file://{}", saved.display()), "resume": true});
            client.put_json("vm.restore", &from).expect(204);
        }
        assert_eq!(client.put("vm.resume").status, if writes { 204 } else { 409 });
        assert!(crate::migration::counts(&vmm));
    }
}
