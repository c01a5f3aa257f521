//! A guest that writes to all addresses of a memory device, plugged or not, and the host memory that this costs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use fixtures::vhost_user::Backend;
use serde_json::{Value, json};

use crate::migration::pages::peer;
use crate::migration::{receive, receive_by, send, url, wait_for_state};
use crate::rig::client::Client;
use crate::rig::code::Code;
use crate::rig::driven::{drive_in, slot};
use crate::rig::vmm::{BINARY, Vmm, wait_for};

const MIB: u64 = 1 << 20;
const BOOT: u64 = 64 * MIB;
/// The size of the memory device's region, which begins at 4 GiB.
const ROOM: u64 = 128 * MIB;
/// The most host memory for the guest's code, tables and rings, which are a few huge pages on some hosts.
const OWN: u64 = 16 * MIB;
const BLOCK: u64 = 2 * MIB;

/// Address of the registers of the device.
const REGISTERS: u32 = 0xd300_0000;
const SPACING: u32 = 0x1_0000;
/// The page tables of the guest: one with one entry, one with four, and a page for each GiB.
const TOP_TABLE: u32 = 0x3f_f000;
const TABLES: u32 = 0x40_0000;
const RINGS: u32 = 0x100_0000;
const REQUEST: u32 = 0x110_0000;
const ANSWER: u32 = REQUEST + 0x100;
/// The last size requested by the host, in bytes.
const WANTED: u32 = REQUEST + 0x200;
const STACK: u32 = 0x120_0000;
/// Address at which the guest maps the memory of the device.
const WINDOW: u32 = 0x4000_0000;

/// Adds a jump with this opcode to the instruction at `to`.
fn jump(code: Code, opcode: u8, to: usize) -> Code {
    let back = to.cast_signed() - (code.0.len() + 2).cast_signed();
    code.bytes(&[&[opcode, i8::try_from(back).unwrap().cast_unsigned()]])
}

/// Adds printing of the character `of` to the serial port.
fn print(code: Code, of: u8) -> Code {
    // mov dx, 0x3f8; mov al, of; out dx, al
    code.bytes(&[&[0x66, 0xba, 0xf8, 0x03, 0xb0, of, 0xee]])
}

/// Adds paging with 2 MiB pages, in the compatibility mode of long mode: an identity map, except that the second GiB
/// maps to 4 GiB.
fn paged(code: Code) -> Code {
    // mov esp, STACK; mov edi, tables; mov eax, 0x83
    let first = (TABLES + 0x1000).to_le_bytes();
    let code = code.bytes(&[&[0xbc], &STACK.to_le_bytes(), &[0xbf], &first, &[0xb8, 0x83, 0, 0, 0]]);
    let top = code.0.len();
    // mov [edi], eax; mov dword [edi + 4], 0; add edi, 8; add eax, 2 MiB; jnc top
    let code = code.bytes(&[&[0x89, 0x07, 0xc7, 0x47, 4, 0, 0, 0, 0, 0x83, 0xc7, 8, 5, 0, 0, 0x20, 0]]);
    let code = jump(code, 0x73, top);
    let (second, third) = ((TABLES + 0x2000).to_le_bytes(), (TABLES + 0x3000).to_le_bytes());
    let code = code.bytes(&[&[0xbf], &second, &[0xb8, 0x83, 0, 0, 0]]);
    let top = code.0.len();
    let code = code.bytes(&[&[0x89, 0x07, 0xc7, 0x47, 4, 1, 0, 0, 0, 0x83, 0xc7, 8, 5, 0, 0, 0x20, 0]]);
    // cmp edi, third; jne top
    let code = jump(code.bytes(&[&[0x81, 0xff], &third]), 0x75, top);
    let code = (0..4).fold(code, |code, gib: u32| {
        code.dword(TABLES + 8 * gib, TABLES + 0x1000 * (gib + 1) + 3).dword(TABLES + 8 * gib + 4, 0)
    });
    // mov eax, TOP_TABLE; mov cr3, eax; then PAE in cr4, LME in EFER, and paging in cr0.
    let code = code.dword(TOP_TABLE, TABLES + 3).dword(TOP_TABLE + 4, 0);
    code.bytes(&[&[0xb8], &TOP_TABLE.to_le_bytes(), &[0x0f, 0x22, 0xd8]]).bytes(&[
        &[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0],
        &[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x0d, 0, 1, 0, 0, 0x0f, 0x30],
        &[0x0f, 0x20, 0xc0, 0x0d, 0, 0, 0, 0x80, 0x0f, 0x22, 0xc0],
    ])
}

/// The guest: it starts the driver of the device in `slot`. It keeps writing to every second page of the device, and
/// prints `w` after each round. When the host requests another size, it unplugs everything, plugs that size from the
/// start, and prints `p`.
fn guest(slot: u32) -> Vec<u8> {
    let registers = REGISTERS + slot * SPACING;
    let code = drive_in(paged(Code::default()), slot, &[0], RINGS);
    let code = code.dword(RINGS, REQUEST).dword(RINGS + 4, 0).dword(RINGS + 8, 24).dword(RINGS + 12, 0x1_0001);
    let code = code.dword(RINGS + 16, ANSWER).dword(RINGS + 20, 0).dword(RINGS + 24, 10).dword(RINGS + 28, 2);
    let code = code.dword(WANTED, 0);
    let top = code.0.len();
    // mov edi, WINDOW; sweep: mov [edi], edi; add edi, 8 KiB; cmp edi, end; jne sweep
    let code = code.bytes(&[&[0xbf], &WINDOW.to_le_bytes()]);
    let sweep = code.0.len();
    let end = (WINDOW + ROOM as u32).to_le_bytes();
    let code = code.bytes(&[&[0x89, 0x3f, 0x81, 0xc7, 0, 0x20, 0, 0, 0x81, 0xff], &end]);
    let code = print(jump(code, 0x75, sweep), b'w');
    // mov eax, [requested]; cmp eax, [WANTED]; je top; mov [WANTED], eax
    let requested = (registers + 0x200 + 48).to_le_bytes();
    let code = jump(code.bytes(&[&[0xa1], &requested, &[0x3b, 0x05], &WANTED.to_le_bytes()]), 0x74, top);
    let code = code.bytes(&[&[0xa3], &WANTED.to_le_bytes()]);
    let code = submit(code.dword(REQUEST, 2), registers);
    // mov eax, [WANTED]; shr eax, 21; mov [REQUEST + 16], ax
    let code = code.dword(REQUEST, 0).dword(REQUEST + 8, 0).dword(REQUEST + 12, 1);
    let code = code.bytes(&[&[0xa1], &WANTED.to_le_bytes(), &[0xc1, 0xe8, 21, 0x66, 0xa3]]);
    let code = print(submit(code.bytes(&[&(REQUEST + 16).to_le_bytes()]), registers), b'p');
    // jmp top
    let back = top.cast_signed() as i32 - (code.0.len() as i32 + 5);
    code.bytes(&[&[0xe9], &back.to_le_bytes()]).0
}

/// Adds making a request available, and a wait until it is used.
fn submit(code: Code, registers: u32) -> Code {
    let (available, used) = ((RINGS + 0x1002).to_le_bytes(), (RINGS + 0x2002).to_le_bytes());
    // inc word [available]
    let code = code.bytes(&[&[0x66, 0xff, 0x05], &available]).word(registers + 0x1000, 0);
    let wait = code.0.len();
    // pause; mov ax, [used]; cmp ax, [available]; jne wait
    jump(code.bytes(&[&[0xf3, 0x90, 0x66, 0xa1], &used, &[0x66, 0x3b, 0x05], &available]), 0x75, wait)
}

/// A VMM with such a guest.
struct Host {
    vmm: Vmm,
    client: Client,
    /// The vhost-user backend of its NIC, if its memory is shared.
    _peer: Option<Arc<Backend>>,
}

impl Host {
    /// A VMM without a VM.
    fn new(shared: bool) -> Self {
        let mut command = Command::new(BINARY);
        command.arg("--no-shutdown");
        let vmm = Vmm::of(command);
        let peer = shared.then(|| peer(&vmm, "name=here,ip=10.78.9.1"));
        let client = vmm.client();
        Self { vmm, client, _peer: peer }
    }

    fn boot(shared: bool) -> Self {
        let mut host = Self::new(shared);
        let net = json!([{"id": "user", "vhost_user": true, "vhost_socket": host.socket()}]);
        let mut config = host.vmm.config(if shared { net } else { json!([]) });
        config["memory"] = json!({"size": BOOT, "shared": shared, "thp": false, "hotplug_method": "VirtioMem",
            "hotplug_size": ROOM});
        config["serial"] = json!({"mode": "File", "file": "serial"});
        // The devices' slots are known only after the boot.
        let mut client = host.vmm.boot_config(&config);
        let tree = client.get("vm.info").expect(200)["device_tree"].clone();
        client.put("vm.shutdown").expect(204);
        host.vmm.files.kernel(&guest(slot(&tree, "_mem0")));
        client.put("vm.boot").expect(204);
        host.client = client;
        host
    }

    fn socket(&self) -> PathBuf {
        self.vmm.files.path("peer")
    }

    /// The number of times that the guest has printed `of`.
    fn printed(&self, of: char) -> usize {
        fs::read_to_string(self.vmm.files.path("serial")).unwrap_or_default().chars().filter(|c| *c == of).count()
    }

    /// Waits until the guest has written to all addresses once more, from the first on.
    fn swept(&self) {
        let before = self.printed('w');
        // One after the other: each may take many exits.
        wait_for("the guest's writes", || self.printed('w') > before);
        wait_for("the guest's writes", || self.printed('w') > before + 1);
    }

    /// Requests `size` bytes of the device, and waits until the guest has plugged them.
    fn resize(&mut self, size: u64) {
        let before = self.printed('p');
        self.client.put_json("vm.resize", &json!({"desired_ram": BOOT + size})).expect(204);
        wait_for("the guest's answer", || self.printed('p') > before);
        assert_eq!(self.plugged(), size);
    }

    fn plugged(&mut self) -> u64 {
        self.client.get("vm.info").expect(200)["memory_actual_size"].as_u64().unwrap() - BOOT
    }

    /// Host memory used by the guest's memory, in bytes.
    fn resident(&self) -> u64 {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", self.vmm.pid())).unwrap();
        let (mut large, mut mapped) = (false, 0);
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let (first, second) = (words.next().unwrap(), words.next());
            if let Some((start, end)) = first.split_once('-') {
                let number = |text| u64::from_str_radix(text, 16).unwrap();
                // No other mapping is as large and has pages.
                large = number(end) - number(start) >= BOOT;
            } else if first == "Rss:" && large {
                mapped += second.unwrap().parse::<u64>().unwrap() << 10;
            }
        }
        mapped.max(self.files().iter().map(|file| file.metadata().unwrap().blocks() * 512).sum())
    }

    /// The files of shared memory. A descriptor may also be a file of another VM, whose backend is in this process,
    /// inherited by the VMM.
    fn files(&self) -> Vec<File> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.vmm.pid())).unwrap();
        let memory = maps.lines().filter(|line| line.contains("/memfd:guest-memory"));
        let mapped: BTreeSet<u64> =
            memory.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap()).collect();
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.vmm.pid())).unwrap() {
            let path = entry.unwrap().path();
            let Some(inode) = fs::metadata(&path).ok().map(|file| file.ino()).filter(|inode| mapped.contains(inode))
            else {
                continue;
            };
            if fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:guest-memory")) {
                files.insert(inode, File::options().read(true).write(true).open(path).unwrap());
            }
        }
        files.into_values().collect()
    }

    /// Lets the guest write everywhere, and checks that it uses as much memory as it has plugged.
    fn stays_within(&mut self, stage: &str) {
        self.swept();
        let (resident, plugged) = (self.resident(), self.plugged());
        println!("{stage}: {resident} bytes with {plugged} plugged");
        assert!(resident <= plugged + OWN, "{stage}: {resident} bytes with {plugged} plugged");
        // Shows that the measure is the guest's memory: it writes to every second page.
        assert!(resident >= plugged / 2, "{stage}: {resident} bytes with {plugged} plugged");
    }

    /// Asserts that at each size.
    fn goes_through_sizes(&mut self, stage: &str) {
        for size in [32 * MIB, 4 * BLOCK, ROOM, 0] {
            self.resize(size);
            self.stays_within(&format!("{stage}, {size}"));
        }
    }
}

/// Before anything is plugged, after plugging, after unplugging, and after a reboot.
fn keeps_within_what_it_plugs(shared: bool) -> Host {
    let mut host = Host::boot(shared);
    host.stays_within("after the start");
    host.goes_through_sizes("plugged");
    host.resize(8 * BLOCK);
    let before = host.printed('p');
    host.client.put("vm.reboot").expect(204);
    // It plugs after it has written everywhere.
    wait_for("the guest's answer", || host.printed('p') > before);
    assert_eq!(host.plugged(), 8 * BLOCK);
    host.stays_within("after a reboot");
    host
}

/// Redirects the VM of `folder` to the files of `target`.
fn redirect(folder: &Path, target: &Host) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    if let Some(nic) = config["net"].get_mut(0) {
        nic["vhost_socket"] = json!(target.socket());
    }
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn a_guest_with_private_memory_keeps_within_what_it_plugs() {
    keeps_within_what_it_plugs(false);
}

#[test]
fn a_guest_with_a_vhost_user_nic_keeps_within_what_it_plugs() {
    keeps_within_what_it_plugs(true);
}

#[test]
fn a_restored_guest_keeps_within_what_it_plugs() {
    for (shared, modes) in [(false, &["Copy", "Map", "OnDemand"][..]), (true, &["Copy"])] {
        let mut source = Host::boot(shared);
        source.resize(8 * BLOCK);
        source.swept();
        source.client.put("vm.pause").expect(204);
        let folder = source.vmm.files.path("saved");
        fs::create_dir(&folder).unwrap();
        let from = format!("file://{}", folder.display());
        source.client.put_json("vm.snapshot", &json!({"destination_url": from})).expect(204);
        for mode in modes {
            let mut target = Host::new(shared);
            redirect(&folder, &target);
            let order = json!({"source_url": from, "memory_restore_mode": mode});
            target.client.put_json("vm.restore", &order).expect(204);
            target.client.put("vm.resume").expect(204);
            assert_eq!(target.plugged(), 8 * BLOCK);
            target.stays_within(mode);
            target.resize(16 * BLOCK);
            target.stays_within(mode);
        }
    }
}

#[test]
fn a_guest_that_moved_keeps_within_what_it_plugs() {
    for shared in [false, true] {
        let mut source = Host::boot(shared);
        source.resize(8 * BLOCK);
        source.swept();
        let mut target = Host::new(shared);
        let mut there = receive_at(&target, shared);
        send(&mut source.client, &url(&target.vmm));
        wait_for_state(&mut there, "finished");
        target.client = there;
        assert_eq!(target.plugged(), 8 * BLOCK);
        target.stays_within("moved");
        target.goes_through_sizes("moved");
    }
}

fn receive_at(target: &Host, shared: bool) -> Client {
    if !shared {
        return receive(&target.vmm, &url(&target.vmm));
    }
    let backends = json!([{"id": "user", "vhost_socket": target.socket()}]);
    receive_by(&target.vmm, &json!({"receiver_url": url(&target.vmm), "backends": backends}))
}

/// A backend that maps all of the guest's memory may write to unplugged blocks, as its guest's descriptors request.
#[test]
fn pages_a_backend_wrote_to_unplugged_blocks_are_discarded() {
    let mut host = Host::boot(true);
    host.resize(4 * BLOCK);
    host.swept();
    let before = host.resident();
    // The device's memory has its own file.
    let files = host.files();
    let file = files.iter().find(|file| file.metadata().unwrap().len() == ROOM).unwrap();
    let block = vec![7; BLOCK as usize];
    for number in (4..ROOM / BLOCK).step_by(3) {
        file.write_all_at(&block, number * BLOCK).unwrap();
    }
    wait_for("the pages", || host.resident() <= before);
    // Plugged blocks keep their contents.
    let mut word = [0; 4];
    file.read_exact_at(&mut word, 3 * BLOCK).unwrap();
    assert_eq!(u32::from_ne_bytes(word), WINDOW + 3 * BLOCK as u32);
}
