//! A VM with devices of many kinds, whose guest drives them all: each has a worker.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::rig::client::Client;
use crate::rig::code::{Code, RINGS, SIZE, drive};
use crate::rig::vmm::{Vmm, wait_for};

/// The guest waits until this is not 0, starts its drivers, and sets it to 0 again.
const COMMAND: u32 = 0x30_0000;
const ECAM: u32 = 0xe800_0000;
/// Address of the registers and tables of the device in slot 0, chosen by the guest; those of the other slots follow.
const REGISTERS: u32 = 0xd300_0000;
const TABLES: u32 = 0xd400_0000;
const SPACING: u32 = 0x1_0000;
/// The rings of the first device, and the distance to those of the next.
const RINGS_AT: u32 = 0x100_0000;
const RINGS_OF_DEVICE: u32 = 4 * RINGS;
const MEMORY: u64 = 64 << 20;

/// A descriptor of a request: bytes for the device, or room for its reply.
enum Part<'a> {
    Ask(&'a [u8]),
    Answer(u32),
}

/// A driven device: the prefix of its id, the queues to start, and a request in one of them.
struct Driver {
    id: &'static str,
    queues: &'static [u16],
    request: (u16, Vec<Part<'static>>),
}

fn drivers() -> Vec<Driver> {
    use Part::{Answer, Ask};
    // From port 1 of CID 3 to port 99 of the host, a stream, REQUEST (`virtio 1.4 §5.10.6`).
    const CALL: &[u8] = &[
        3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0,
        0, 1, 0, 0, 0, 0, 0,
    ];
    let driver = |id, queues, queue, parts| Driver { id, queues, request: (queue, parts) };
    vec![
        driver("nic", &[0, 1], 1, vec![Ask(&[0; 72])]),
        driver("ring", &[0], 0, vec![Ask(&[0; 16]), Answer(512), Answer(1)]),
        driver("turns", &[0], 0, vec![Ask(&[0; 16]), Answer(512), Answer(1)]),
        driver(
            "qcow2",
            &[0],
            0,
            vec![Ask(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Ask(&[7; 512]), Answer(1)],
        ),
        driver("__rng", &[0], 0, vec![Answer(64)]),
        driver("__console", &[0, 1], 1, vec![Ask(b"x")]),
        driver("__balloon", &[0, 1], 0, vec![Ask(&[0, 0x30, 0, 0])]),
        driver("_pmem", &[0], 0, vec![Ask(&[0; 4]), Answer(4)]),
        driver("_vsock", &[0, 1, 2], 1, vec![Ask(CALL)]),
        driver("__watchdog", &[0], 0, vec![Answer(8)]),
        driver("__rtc", &[0], 0, vec![Ask(&[0; 16]), Answer(32)]),
    ]
}

/// The VM.
pub(crate) struct Driven {
    pub vmm: Vmm,
    pub client: Client,
}

impl Driven {
    /// Starts `command`, which is the program with further arguments, with a tap of this name and further settings, and
    /// waits until its drivers run.
    pub(crate) fn start(command: Command, tap: &str, further: &Value) -> Self {
        Self::over(Vmm::of(command), tap, further)
    }

    /// The same in a running program.
    pub(crate) fn over(vmm: Vmm, tap: &str, further: &Value) -> Self {
        let ram = vmm.files.sparse("ram", MEMORY);
        let config = config(&vmm, &ram, tap, further);
        // The devices' slots are known only after the boot.
        let mut client = vmm.boot_config(&config);
        let tree = client.get("vm.info").expect(200)["device_tree"].clone();
        client.put("vm.shutdown").expect(204);
        let drivers = drivers();
        let slots: Vec<_> = drivers.iter().map(|driver| slot(&tree, driver.id)).collect();
        vmm.files.kernel(&guest(&drivers, &slots));
        client.put("vm.boot").expect(204);
        let memory = File::options().read(true).write(true).open(&ram).unwrap();
        for (driver, number) in drivers.iter().zip(0..) {
            ask(&memory, driver, RINGS_AT + number * RINGS_OF_DEVICE);
        }
        memory.write_all_at(&[1], COMMAND.into()).unwrap();
        let read = |address: u32| {
            let mut bytes = [0; 4];
            memory.read_exact_at(&mut bytes, address.into()).unwrap();
            u32::from_ne_bytes(bytes)
        };
        wait_for("the drivers", || read(COMMAND) == 0);
        for (driver, number) in drivers.iter().zip(0..) {
            let position = driver.queues.iter().position(|queue| *queue == driver.request.0).unwrap() as u32;
            let used = RINGS_AT + number * RINGS_OF_DEVICE + position * RINGS + 0x2000;
            wait_for(driver.id, || read(used) >> 16 != 0);
        }
        Self { vmm, client }
    }
}

fn config(vmm: &Vmm, ram: &str, tap: &str, further: &Value) -> Value {
    let image = vmm.files.path("image");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").status();
    assert!(made.is_ok_and(|status| status.success()), "qemu-img is missing: apt-get install qemu-utils");
    let mut config = vmm.config(json!([{"id": "nic", "tap": tap, "sriov_vfs": 2}]));
    let settings = json!({
        "memory": {"size": 0, "zones": [{"id": "all", "size": MEMORY, "file": ram, "shared": true}]},
        "disks": [
            {"id": "ring", "path": vmm.files.sparse("ring", 1 << 20), "image_type": "Raw"},
            {"id": "turns", "path": vmm.files.sparse("turns", 1 << 20), "image_type": "Raw", "disable_io_uring": true},
            {"id": "qcow2", "path": image, "image_type": "Qcow2"},
        ],
        "pmem": [{"file": vmm.files.sparse("pmem", 2 << 20)}],
        "serial": {"mode": "Socket", "socket": vmm.files.path("serial")},
        "console": {"mode": "Socket", "socket": vmm.files.path("console")},
        "debug_console": {"mode": "Pty"},
        "vsock": {"cid": 3, "socket": vmm.files.path("vsock")},
        "balloon": {"size": 0},
        "rtc": {},
        "watchdog": true,
        "pvpanic": true,
    });
    for from in [&settings, further] {
        from.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    }
    config
}

/// The slot of the device whose id begins with `id`.
pub(crate) fn slot(tree: &Value, id: &str) -> u32 {
    let devices = tree.as_object().unwrap().iter();
    let address = devices
        .filter(|(name, _)| name.starts_with(&format!("_virtio-pci-{id}")))
        .find_map(|(_, node)| node["pci_bdf"].as_str());
    // 0000:00:04.0
    let address = address.unwrap_or_else(|| panic!("there is no {id} in {tree}"));
    u32::from_str_radix(address.split(':').nth(2).unwrap().split('.').next().unwrap(), 16).unwrap()
}

/// Puts a request into the rings of a queue, as a driver does (`virtio 1.4 §2.7`).
fn ask(memory: &File, driver: &Driver, rings: u32) {
    let (queue, parts) = &driver.request;
    let position = driver.queues.iter().position(|other| other == queue).unwrap() as u32;
    let rings = rings + position * RINGS;
    for (part, number) in parts.iter().zip(0u16..) {
        let buffer = rings + 0x3000 + u32::from(number) * 0x1000;
        let (len, mut flags) = match part {
            Part::Ask(bytes) => {
                memory.write_all_at(bytes, buffer.into()).unwrap();
                (bytes.len() as u32, 0)
            }
            Part::Answer(len) => (*len, 2u16),
        };
        flags |= u16::from(usize::from(number) + 1 < parts.len());
        let descriptor = [&u64::from(buffer).to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes()].concat();
        let next = (number + 1).to_le_bytes();
        memory.write_all_at(&[&descriptor[..], &next].concat(), (rings + 16 * u32::from(number)).into()).unwrap();
    }
    // One entry: the first descriptor.
    memory.write_all_at(&[0, 0, 1, 0, 0, 0], (rings + 0x1000).into()).unwrap();
    assert!(parts.len() <= usize::from(SIZE));
}

/// The guest's instructions: it waits, starts a driver for each device in these slots, reports, and halts.
fn guest(drivers: &[Driver], slots: &[u32]) -> Vec<u8> {
    // 0: mov eax, [COMMAND]; 5: test eax, eax; 7: pause; 9: jz 0
    let wait = Code::default().bytes(&[&[0xa1], &COMMAND.to_le_bytes(), &[0x85, 0xc0, 0xf3, 0x90, 0x74, 0xf5]]);
    let code = drivers.iter().zip(slots).zip(0..).fold(wait, |code, ((driver, slot), number)| {
        drive_in(code, *slot, driver.queues, RINGS_AT + number * RINGS_OF_DEVICE)
    });
    // A character for the serial port: mov edx, 0x3f8; mov al, 'x'; out dx, al. And for the debug console.
    let code = code.bytes(&[&[0xba, 0xf8, 0x03, 0, 0, 0xb0, b'x', 0xee, 0xe6, 0xe9]]);
    code.dword(COMMAND, 0).bytes(&[&[0xf4, 0xeb, 0xfd]]).0
}

/// Adds a driver's start of the device in `slot`, with these queues, whose rings are at `rings`.
pub(crate) fn drive_in(code: Code, slot: u32, queues: &[u16], rings: u32) -> Code {
    let (config, registers, table) = (ECAM + (slot << 15), REGISTERS + slot * SPACING, TABLES + slot * SPACING);
    // BARs 2 and 4, of 64 bits each; memory and bus master.
    let placed = code
        .word(config + 4, 0)
        .dword(config + 0x18, registers)
        .dword(config + 0x1c, 0)
        .dword(config + 0x20, table)
        .dword(config + 0x24, 0)
        .word(config + 4, 6);
    drive(placed, registers, table, queues, 0, rings)
}

/// The threads of a process: their IDs and names, without those that the kernel adds to a process that uses KVM.
pub(crate) fn tasks(pid: u32) -> Vec<(i32, String)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let named = tasks.filter_map(|task| {
        let path = task.unwrap().path();
        let name = fs::read_to_string(path.join("comm")).ok()?;
        Some((path.file_name()?.to_str()?.parse().ok()?, name.trim().to_string()))
    });
    named.filter(|(_, name)| !name.starts_with("kvm-") && !name.starts_with("iou-")).collect()
}
