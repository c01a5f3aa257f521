//! A guest that powers off, or restarts, while it is being sent.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::migration::{progress, receive, send, url, wait_for_state};
use crate::migration_wire::{Point, Then, Wire};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

const MEMORY: u64 = 64 << 20;
/// The guest polls this address for an order, and executes it.
const ORDER: u32 = 0x30_0000;
/// Size of the filled part of the memory, and its address.
const FILLED: usize = 16 << 20;
const FILLED_AT: u64 = 32 << 20;
/// Power off.
const OFF: u8 = 1;
/// Restart.
const RESTART: u8 = 2;
/// Order taken.
const TAKEN: u8 = 3;

/// A guest that shows its start, and waits for an order. It clears the last one first: once its start is visible, the
/// next may be written.
fn waiting() -> Vec<u8> {
    let mut code = [&[0xc6, 0x05][..], &ORDER.to_le_bytes(), &[0]].concat(); // mov byte [ORDER], 0
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'R', 0xee]); // mov dx, 0x3f8; mov al, 'R'; out dx, al
    let top = code.len();
    code.extend([0xf3, 0x90]); // pause
    code.extend([&[0xa0][..], &ORDER.to_le_bytes()].concat()); // mov al, [ORDER]
    let taken = [&[0xc6, 0x05][..], &ORDER.to_le_bytes(), &[TAKEN]].concat(); // mov byte [ORDER], TAKEN
    code.extend([0x3c, OFF, 0x75, 0x0f]); // cmp al, OFF; jne over the next
    code.extend(&taken);
    code.extend([0x66, 0xba, 0, 0x06, 0xb0, 0x34, 0xee, 0xf4]); // mov dx, 0x600; mov al, 0x34; out dx, al; hlt
    code.extend([0x3c, RESTART]); // cmp al, RESTART
    let back = top.cast_signed() - (code.len() + 2).cast_signed();
    code.extend([0x75, i8::try_from(back).unwrap().cast_unsigned()]); // jne top
    code.extend(&taken);
    code.extend([0xb0, 0xfe, 0xe6, 0x64, 0xf4]); // mov al, 0xfe; out 0x64, al; hlt
    code
}

/// A VMM whose guest takes orders through a file that is its memory.
struct Waiting {
    vmm: Vmm,
    client: Client,
    memory: File,
}

impl Waiting {
    fn start(arguments: &[&str]) -> Self {
        let (vmm, memory) = place(arguments);
        let mut config = vmm.config(json!([]));
        config["payload"]["kernel"] = json!(vmm.files.kernel(&waiting()));
        config["serial"] = json!({"mode": "File", "file": "serial"});
        config["memory"] = json!({"size": 0, "zones": [{"id": "all", "size": MEMORY, "file": "ram", "shared": true}]});
        let client = vmm.boot_config(&config);
        wait_for("the guest", || starts(&vmm) == 1);
        Self { vmm, client, memory }
    }

    /// Gives an order to the guest while it is being sent: its first pages have not reached the target.
    fn order(&mut self, order: u8, target: &Vmm) -> Wire {
        // More than the connection's buffers: while its first pages are held back, the source is still copying.
        self.memory.write_all_at(&vec![0xa5; FILLED], FILLED_AT).unwrap();
        let path = self.vmm.files.path("wire");
        let wire = Wire::new(&path, &target.files.path("migration"), &[Point::Frame(3, 0)]);
        send(&mut self.client, &format!("unix:{}", path.display()));
        wire.reaches();
        assert_eq!(progress(&mut self.client)["phase"], "copying");
        self.memory.write_all_at(&[order], ORDER.into()).unwrap();
        // No dirty log has this write, so the guest must take the order here.
        wait_for("the guest to take the order", || {
            let mut byte = [0];
            self.memory.read_exact_at(&mut byte, ORDER.into()).unwrap();
            byte == [TAKEN]
        });
        wire
    }
}

/// A VMM with a file for a guest's memory.
fn place(arguments: &[&str]) -> (Vmm, File) {
    let mut command = Command::new(BINARY);
    command.args(arguments);
    let vmm = Vmm::of(command);
    let path = vmm.files.sparse("ram", MEMORY);
    (vmm, File::options().read(true).write(true).open(path).unwrap())
}

/// Number of the guest's starts there.
fn starts(vmm: &Vmm) -> usize {
    fs::read(vmm.files.path("serial")).unwrap_or_default().len()
}

/// Asserts that the target has no VM, and can receive another.
fn assert_waits_for_others(target: &Vmm, there: &mut Client) {
    let mut last = Value::Null;
    wait_for("the target", || {
        last = progress(there);
        last["state"] != "active"
    });
    assert_eq!((&last["state"], &last["error"]), (&json!("cancelled"), &json!("cancelled at the source")));
    there.get("vm.info").expect(404);
    assert!(!target.files.path("migration").exists());
    receive(target, &url(target)).put("vm.cancel-migration").expect(204);
    wait_for_state(there, "cancelled");
}

#[test]
fn a_guest_that_powers_off_while_sent_is_off_only_at_its_source() {
    let mut source = Waiting::start(&["--no-shutdown"]);
    let (target, _memory) = place(&["--no-shutdown"]);
    let mut there = receive(&target, &url(&target));
    let wire = source.order(OFF, &target);
    let ended = wait_for_state(&mut source.client, "guest-shut-down");
    assert_eq!(ended["error"], "the guest shut down");
    assert_eq!(source.client.get("vm.info").expect(200)["state"], "Shutdown");
    assert_waits_for_others(&target, &mut there);
    wire.goes(Then::IsCut);
    drop(wire);
    // It is a VM like any other, and can boot again, and migrate.
    fs::remove_file(source.vmm.files.path("serial")).unwrap();
    source.client.put("vm.boot").expect(204);
    wait_for("another start", || starts(&source.vmm) == 1);
    let mut there = receive(&target, &url(&target));
    send(&mut source.client, &url(&target));
    wait_for_state(&mut there, "finished");
    assert_eq!((there.get("vm.info").expect(200)["state"].as_str(), starts(&target)), (Some("Running"), 0));
}

#[test]
fn a_vmm_that_ends_with_its_guest_does_so_during_a_migration() {
    let mut source = Waiting::start(&[]);
    let (target, _memory) = place(&["--no-shutdown"]);
    let mut there = receive(&target, &url(&target));
    let wire = source.order(OFF, &target);
    assert_eq!(source.vmm.end(), Some(0));
    assert_waits_for_others(&target, &mut there);
    wire.goes(Then::IsCut);
}

#[test]
fn a_guest_that_restarts_while_sent_restarts_once_where_it_ends() {
    let mut source = Waiting::start(&["--no-shutdown"]);
    let (target, memory) = place(&["--no-shutdown"]);
    // The migration fails: at the source.
    let mut there = receive(&target, &url(&target));
    let wire = source.order(RESTART, &target);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(starts(&source.vmm), 1, "it is stopped");
    source.client.put("vm.cancel-migration").expect(204);
    wait_for_state(&mut source.client, "cancelled");
    // The relay forwards the source's cancellation, and is disconnected after that.
    assert_waits_for_others(&target, &mut there);
    wire.goes(Then::IsCut);
    drop(wire);
    wait_for("a start at the source", || starts(&source.vmm) == 2);
    // The migration succeeds, and the guest takes orders on the target.
    let mut there = receive(&target, &url(&target));
    let wire = source.order(RESTART, &target);
    wire.goes(Then::Passes);
    wait_for_state(&mut source.client, "finished");
    wait_for_state(&mut there, "finished");
    wait_for("a start at the target", || starts(&target) == 1);
    assert_eq!(starts(&source.vmm), 2);
    memory.write_all_at(&[OFF], ORDER.into()).unwrap();
    wait_for("the guest's power-off", || there.get("vm.info").expect(200)["state"] == "Shutdown");
}
