//! Disks that a guest drives as Cloud Hypervisor's firmware does: it relies on settings of the platform.
//!
//! The guest uses only the ports for configuration space. It uses BARs as they are, below 4 GiB, and sizes them while
//! they decode. It never sets Bus Master. It has a queue of 16 descriptors, rings with 32-bit writes, reads one sector
//! at a time into an unaligned buffer, and polls.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::migration::{receive, send, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::code::Code;
use crate::rig::vmm::{BINARY, Vmm, wait_for};
use crate::snapshot::{folder, redirect, snapshot};

/// The rings and buffers of the first disk, and the distance to those of the next.
const RINGS: u32 = 0x100_0000;
const ROOM: u32 = 0x1_0000;
/// Offsets from there. Only rings are aligned, and the data crosses a page boundary.
const AVAIL: u32 = 0x1000;
const USED: u32 = 0x2000;
const HEADER: u32 = 0x3001;
const STATUS: u32 = 0x3013;
const DATA: u32 = 0x4f03;
/// The sectors that it reads from each disk: more than its ring has descriptors.
const SECTORS: u8 = 20;

/// The guest's last act.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Halt,
    Reset,
    /// A triple fault, which resets the machine.
    Fault,
    /// The guest reads the last disk repeatedly.
    Again,
}

/// The guest's instructions. It prints `^` at its start, and the first line of each sector of the disks in `slots`, one
/// disk after the other. It prints `Z` and halts at a BAR of 0, `H` at one above 4 GiB or without a device, and `!` if
/// a request fails.
fn guest(slots: &[u32], end: End) -> Vec<u8> {
    // mov dx, 0x3f8; mov al, '^'; out dx, al
    let mut code = Code::default().bytes(&[&[0x66, 0xba, 0xf8, 0x03, 0xb0, b'^', 0xee]]);
    let mut reading = 0;
    for (slot, rings) in slots.iter().zip((RINGS..).step_by(ROOM as usize)) {
        code = start(find(code, *slot), rings);
        reading = code.0.len();
        code = read(code, rings);
    }
    match end {
        End::Halt => code.bytes(&[&[0xf4, 0xeb, 0xfd]]), // hlt; jmp to it
        End::Reset => code.bytes(&[&[0xb0, 0xfe, 0xe6, 0x64, 0xf4]]), // mov al, 0xfe; out 0x64, al; hlt
        End::Fault => code.bytes(&[&[0x0f, 0x0b]]),      // ud2
        End::Again => jump(code, &[0xe9], reading),
    }
    .0
}

/// `jump` to the instruction at `target`.
fn jump(mut code: Code, jump: &[u8], target: usize) -> Code {
    code.0.extend(jump);
    let distance = i32::try_from(target).unwrap() - i32::try_from(code.0.len() + 4).unwrap();
    code.bytes(&[&distance.to_le_bytes()])
}

/// Prints this character and halts, unless the short jump `unless` is taken.
fn give_up(code: Code, unless: u8, character: u8) -> Code {
    code.bytes(&[&[unless, 8, 0x66, 0xba, 0xf8, 0x03, 0xb0, character, 0xee, 0xf4]])
}

/// Reads a register of configuration space into EAX.
fn config_read(code: Code, slot: u32, register: u32) -> Code {
    // mov eax, address; mov dx, 0xcf8; out dx, eax; mov dl, 0xfc; in eax, dx
    let address = (1 << 31 | slot << 11 | register).to_le_bytes();
    code.bytes(&[&[0xb8], &address, &[0x66, 0xba, 0xf8, 0x0c, 0xef, 0xb2, 0xfc, 0xed]])
}

/// Writes ECX to a register of configuration space.
fn config_write(code: Code, slot: u32, register: u32) -> Code {
    // As before; mov eax, ecx; out dx, eax
    let address = (1 << 31 | slot << 11 | register).to_le_bytes();
    code.bytes(&[&[0xb8], &address, &[0x66, 0xba, 0xf8, 0x0c, 0xef, 0xb2, 0xfc, 0x89, 0xc8, 0xef]])
}

/// Finds the device: its registers are at EBX.
fn find(code: Code, slot: u32) -> Code {
    let code = config_read(code, slot, 4).bytes(&[&[0x83, 0xc8, 0x02, 0x89, 0xc1]]); // or eax, 2; mov ecx, eax
    let code = config_write(code, slot, 4);
    let sized = (0x10..=0x24).step_by(4).fold(code, |code, bar| {
        // mov edi, eax; mov ecx, -1
        let code = config_read(code, slot, bar).bytes(&[&[0x89, 0xc7, 0xb9, 0xff, 0xff, 0xff, 0xff]]);
        let code = config_read(config_write(code, slot, bar), slot, bar).bytes(&[&[0x89, 0xf9]]); // mov ecx, edi
        config_write(code, slot, bar)
    });
    let code = config_read(sized, slot, 0x1c).bytes(&[&[0x85, 0xc0]]); // test eax, eax
    let code = give_up(code, 0x74, b'H'); // je
    let code = config_read(code, slot, 0x18).bytes(&[&[0x83, 0xe0, 0xf0, 0x89, 0xc3]]); // and eax, -16; mov ebx, eax
    give_up(code, 0x75, b'Z') // jne
}

/// `mov byte [ebx + register], value`
fn byte(code: Code, register: u8, value: u8) -> Code {
    code.bytes(&[&[0xc6, 0x43, register, value]])
}

/// `mov word [ebx + register], value`
fn word(code: Code, register: u8, value: u16) -> Code {
    code.bytes(&[&[0x66, 0xc7, 0x43, register], &value.to_le_bytes()])
}

/// `mov dword [ebx + register], value`
fn dword(code: Code, register: u8, value: u32) -> Code {
    code.bytes(&[&[0xc7, 0x43, register], &value.to_le_bytes()])
}

/// Starts the device at EBX (`virtio 1.4 §3.1.1`), and describes a request to it.
fn start(code: Code, rings: u32) -> Code {
    let code = [0, 1, 3].into_iter().fold(code, |code, status| byte(code, 0x14, status));
    // Accepts VIRTIO_BLK_F_RO if offered: mov eax, [ebx + 4]; and eax, 32; mov [ebx + 12], eax. And VIRTIO_F_VERSION_1.
    let code = dword(dword(code, 0, 0), 8, 0).bytes(&[&[0x8b, 0x43, 4, 0x83, 0xe0, 0x20, 0x89, 0x43, 0xc]]);
    let code = byte(dword(dword(code, 8, 1), 0xc, 1), 0x14, 0xb);
    let code = word(word(code, 0x16, 0), 0x18, 16);
    let addresses = [(0x20, rings), (0x24, 0), (0x28, rings + AVAIL), (0x2c, 0), (0x30, rings + USED), (0x34, 0)];
    let code = addresses.into_iter().fold(code, |code, (register, value)| dword(code, register, value));
    let code = byte(word(code, 0x1c, 1), 0x14, 0xf);
    // Device-readable with a next one, device-writable with a next one, device-writable.
    let parts = [(HEADER, 16u32, 1u16), (DATA, 512, 3), (STATUS, 1, 2)];
    parts.into_iter().zip(0..).fold(code, |code, ((offset, len, flags), number)| {
        let descriptor = rings + 16 * u32::from(number);
        code.dword(descriptor, rings + offset)
            .dword(descriptor + 8, len)
            .word(descriptor + 12, flags)
            .word(descriptor + 14, number + 1)
    })
}

/// Reads the sectors, one after the other, and prints the first line of each.
fn read(code: Code, rings: u32) -> Code {
    let at = |offset: u32| (rings + offset).to_le_bytes();
    let mut code = code.bytes(&[&[0x31, 0xf6]]); // xor esi, esi
    let next = code.0.len();
    // mov [sector], esi; mov byte [STATUS], 0xee; inc word [avail.idx]; mov dword [ebx + 0x1000], 0
    code = code.bytes(&[&[0x89, 0x35], &at(HEADER + 8)]).byte(rings + STATUS, 0xee);
    code = code.bytes(&[&[0x66, 0xff, 0x05], &at(AVAIL + 2), &[0xc7, 0x83, 0, 0x10, 0, 0, 0, 0, 0, 0]]);
    // wait: mov ax, [avail.idx]; pause; cmp ax, [used.idx]; jne wait
    code = code.bytes(&[&[0x66, 0xa1], &at(AVAIL + 2), &[0xf3, 0x90, 0x66, 0x3b, 0x05], &at(USED + 2), &[0x75, 0xef]]);
    code = give_up(code.bytes(&[&[0x80, 0x3d], &at(STATUS), &[0]]), 0x74, b'!'); // cmp byte [STATUS], 0; je
    // mov edi, DATA; print: mov al, [edi]; mov dx, 0x3f8; out dx, al; inc edi; cmp al, '\n'; jne print
    code =
        code.bytes(&[&[0xbf], &at(DATA), &[0x8a, 0x07, 0x66, 0xba, 0xf8, 0x03, 0xee, 0x47, 0x3c, b'\n', 0x75, 0xf4]]);
    // inc esi; cmp esi, SECTORS; jne next
    jump(code.bytes(&[&[0x46, 0x83, 0xfe, SECTORS]]), &[0x0f, 0x85], next)
}

/// The lines of a disk.
fn lines(name: &str) -> String {
    (0..SECTORS).map(|number| format!("{name} {number}\n")).collect()
}

/// A raw image whose sectors begin with these lines.
fn image(vmm: &Vmm, name: &str) -> String {
    let lines = lines(name);
    let sectors = lines.lines().flat_map(|line| {
        let mut sector = format!("{line}\n").into_bytes();
        sector.resize(512, b'.');
        sector
    });
    let mut bytes: Vec<u8> = sectors.collect();
    bytes.resize(1 << 20, 0);
    vmm.files.write(name, &bytes)
}

fn disk(vmm: &Vmm, name: &str, slot: u32) -> Value {
    json!({"id": name, "path": image(vmm, name), "image_type": "Raw", "pci_device_id": slot})
}

/// A VM that boots such a guest by `option`, with these disks.
fn config(vmm: &Vmm, option: &str, code: &[u8], disks: &[Value]) -> Value {
    let mut config = vmm.config(json!([]));
    config["payload"] = json!({option: vmm.files.kernel(code)});
    config["serial"] = json!({"mode": "File", "file": vmm.files.path("serial")});
    config["disks"] = json!(disks);
    config
}

/// The guest's output. Asserts that the guest has not given up.
fn printed(vmm: &Vmm) -> String {
    let text = fs::read_to_string(vmm.files.path("serial")).unwrap_or_default();
    assert!(!text.contains(['!', 'H', 'Z']), "{text}");
    text
}

fn wait_for_text(vmm: &Vmm, expected: &str) {
    wait_for("the guest's output", || printed(vmm).len() >= expected.len());
    assert_eq!(printed(vmm)[..expected.len()], *expected);
}

/// Disks of each kind, as a guest on this `vmm` names them, and their slots.
fn disks_of_each_kind(vmm: &Vmm) -> [Value; 4] {
    let mut disks = [("raw", 5), ("kept", 6), ("direct", 7), ("qcow2", 8)].map(|(name, slot)| disk(vmm, name, slot));
    disks[1]["readonly"] = json!(true);
    disks[2]["direct"] = json!(true);
    let converted = vmm.files.path("converted");
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", "qcow2"]).arg(vmm.files.path("qcow2")).arg(&converted);
    assert!(command.status().is_ok_and(|status| status.success()), "qemu-img is missing: apt-get install qemu-utils");
    disks[3]["path"] = json!(converted);
    disks[3]["image_type"] = json!("Qcow2");
    disks
}

#[test]
fn a_firmware_like_guest_reads_each_disk_also_after_reboots() {
    for option in ["firmware", "kernel"] {
        let vmm = Vmm::start();
        let disks = disks_of_each_kind(&vmm);
        // The first disk again, after all disks have been driven.
        let slots = [5, 6, 7, 8, 5];
        let mut config = config(&vmm, option, &guest(&slots, End::Halt), &disks);
        // BARs that the sizing of others could overlap.
        config["net"] = json!([{"id": "pf", "tap": "likefw0", "sriov_vfs": 8}]);
        config["platform"] = json!({"num_pci_segments": 2});
        config["disks"].as_array_mut().unwrap().push(json!(
            {"id": "far", "path": image(&vmm, "far"), "image_type": "Raw", "pci_segment": 1}
        ));
        let mut client = vmm.boot_config(&config);
        let once = format!("^{}", ["raw", "kept", "direct", "qcow2", "raw"].map(lines).concat());
        wait_for_text(&vmm, &once);
        for times in [2, 3] {
            client.put("vm.reboot").expect(204);
            wait_for_text(&vmm, &once.repeat(times));
        }
        client.put("vm.shutdown").expect(204);
        client.put("vm.boot").expect(204);
        wait_for_text(&vmm, &once.repeat(4));
    }
}

#[test]
fn a_guest_like_firmware_that_resets_finds_its_disk_again() {
    for end in [End::Reset, End::Fault] {
        let vmm = Vmm::start();
        let config = config(&vmm, "firmware", &guest(&[5], end), &[disk(&vmm, "raw", 5)]);
        let mut client = vmm.client();
        client.put_json("vm.create", &config).expect(204);
        client.put("vm.boot").expect(204);
        wait_for_text(&vmm, &format!("^{}", lines("raw")).repeat(4));
    }
}

/// Checks that the guest of `vmm` reads its disk, now and after a reboot.
fn reads_on(vmm: &Vmm, client: &mut Client) {
    let wraps = format!("raw {}\nraw 0\n", SECTORS - 1);
    wait_for("a disk that is read", || printed(vmm).matches(&wraps).count() > 2);
    let boots = printed(vmm).matches('^').count();
    client.put("vm.reboot").expect(204);
    wait_for("the next boot", || {
        let text = printed(vmm);
        text.matches('^').count() > boots && text.split('^').next_back().unwrap().matches(&wraps).count() > 2
    });
}

#[test]
fn a_restored_guest_like_firmware_reads_its_disk_on() {
    let source = Vmm::start();
    let config = config(&source, "firmware", &guest(&[5], End::Again), &[disk(&source, "raw", 5)]);
    let mut client = source.boot_config(&config);
    reads_on(&source, &mut client);
    client.put("vm.pause").expect(204);
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    let target = Vmm::start();
    redirect(&path, &target);
    let mut client = target.client();
    client.put_json("vm.restore", &json!({"source_url": url, "resume": true})).expect(204);
    reads_on(&target, &mut client);
    assert!(!printed(&target).starts_with('^'), "the guest was not restored but booted");
}

#[test]
fn a_guest_like_firmware_reads_its_disk_on_after_a_migration() {
    let mut command = Command::new(BINARY);
    command.arg("--no-shutdown");
    let (source, target) = (Vmm::of(command), Vmm::start());
    let mut config = config(&source, "firmware", &guest(&[5], End::Again), &[disk(&source, "raw", 5)]);
    // Each VMM has a file of this name of its own.
    config["serial"]["file"] = json!("serial");
    let mut client = source.boot_config(&config);
    reads_on(&source, &mut client);
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut there, "finished");
    reads_on(&target, &mut there);
    assert!(!printed(&target).starts_with('^'), "the guest was not moved but booted");
}

#[test]
fn a_guest_whose_disk_shrank_stays_at_its_source() {
    let (source, target) = (Vmm::start(), Vmm::start());
    let disk = disk(&source, "raw", 5);
    let file = fs::File::options().write(true).open(source.files.path("raw")).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len + (1 << 20)).unwrap();
    let mut config = config(&source, "firmware", &guest(&[5], End::Again), &[disk]);
    config["serial"]["file"] = json!("serial");
    let mut client = source.boot_config(&config);
    reads_on(&source, &mut client);
    // The guest reads the part that stays.
    file.set_len(len).unwrap();
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    let failed = wait_for_state(&mut client, "failed");
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("its driver has read capacity"), "{error}");
    reads_on(&source, &mut client);
    there.get("vm.info").expect(404);
}

#[test]
fn a_disk_that_is_plugged_is_firmwares_at_the_next_reset() {
    let vmm = Vmm::start();
    let config = config(&vmm, "firmware", &guest(&[5, 6], End::Halt), &[disk(&vmm, "raw", 5)]);
    let mut client = vmm.boot_config(&config);
    let text = || fs::read_to_string(vmm.files.path("serial")).unwrap_or_default();
    let missing = format!("^{}H", lines("raw"));
    wait_for("the guest that misses a disk", || text().len() >= missing.len());
    assert_eq!(text(), missing);
    let answer = client.put_json("vm.add-disk", &disk(&vmm, "added", 6));
    answer.expect(200);
    client.put("vm.reboot").expect(204);
    let whole = format!("{missing}^{}{}", lines("raw"), lines("added"));
    wait_for("the guest that finds both", || text().len() >= whole.len());
    assert_eq!(text(), whole);
}
