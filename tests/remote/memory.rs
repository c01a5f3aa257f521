//! Memory added to a running guest. These tests need /dev/kvm.

use std::fs;

use serde_json::{Value, json};

use crate::files::Files;
use crate::vmm::{Vmm, wait_for};

/// The register of added memory, as in the ACPI tables.
const ADDED: u16 = 0xb100;
/// Bits 24 to 31 of the length of the memory in the first slot.
const LENGTH: u16 = 0xb133;

/// `mov dx, port; in al, dx`
fn input(port: u16) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xec]
}

/// `add al, '0'; mov dx, 0x3f8; out dx, al`
const PRINT: [u8; 7] = [0x04, 0x30, 0x66, 0xba, 0xf8, 0x03, 0xee];

/// A guest that prints the size of its memory map at 4 GiB in units of 128 MiB, and each time that memory is added, the
/// size of the first slot in units of 16 MiB.
fn guest() -> Vec<u8> {
    // mov esi, 0x7000: the memory map, of entries of 24 bytes; mov ecx, 16
    let mut code = b"\xbe\0\x70\0\0\xb9\x10\0\0\0".to_vec();
    // again: cmp dword [esi + 4], 1; jne next; cmp dword [esi], 0; jne next; mov eax, [esi + 8]; shr eax, 27;
    // jmp found;
    code.extend(b"\x83\x7e\x04\x01\x75\x0d\x83\x3e\0\x75\x08\x8b\x46\x08\xc1\xe8\x1b\xeb\x07");
    // next: add esi, 24; loop again; xor eax, eax; found:
    code.extend(b"\x83\xc6\x18\xe2\xe8\x31\xc0");
    code.extend(PRINT);
    // wait: test al, al; jz wait; jmp wait
    let mut wait = [&input(ADDED)[..], b"\x84\xc0\x74\xf7", &input(LENGTH), &PRINT, b"\xeb"].concat();
    wait.push((-(wait.len() as i16 + 1)) as u8);
    [code, wait].concat()
}

fn memory(vmm: &Vmm) -> (Value, Value, Value) {
    let info: Value = serde_json::from_str(&vmm.done(&["info"])).unwrap();
    let memory = &info["config"]["memory"];
    (memory["size"].clone(), memory["hotplug_size"].clone(), info["memory_actual_size"].clone())
}

const MIB: u64 = 1 << 20;

fn sizes(size: u64, room: u64) -> (Value, Value, Value) {
    (json!(size * MIB), json!(room * MIB), json!(size * MIB))
}

#[test]
fn memory_is_added_to_a_running_guest_and_stays_after_a_reboot() {
    let files = Files::new();
    let (kernel, serial) = (files.kernel(&guest()), files.path("serial"));
    let serial_file = format!("file={}", serial.display());
    let options = ["--kernel", &kernel, "--memory", "size=64M,hotplug_size=1G", "--serial", &serial_file];
    let vmm = Vmm::start(&options);
    let said = || fs::read_to_string(&serial).unwrap_or_default();
    wait_for("the guest", || said() == "0");
    assert_eq!(memory(&vmm), sizes(64, 1024));

    let refused = vmm.refused(&["resize", "--memory", "100M"]);
    assert!(
        refused.contains("in steps of 128M; ask for 64M or 192M") && refused.ends_with("(status 400)"),
        "{refused}"
    );
    let refused = vmm.refused(&["resize", "--memory", "1216M"]);
    assert!(refused.contains("there is room for 1G") && refused.ends_with("(status 409)"), "{refused}");
    assert_eq!((memory(&vmm), said()), (sizes(64, 1024), "0".to_string()));

    vmm.done(&["resize", "--memory", "192M"]);
    wait_for("the memory", || said() == "08");
    assert_eq!(memory(&vmm), sizes(192, 1024));
    // A paused guest gets memory, too.
    vmm.done(&["pause"]);
    vmm.done(&["resize", "--memory", "448M"]);
    vmm.done(&["resume"]);
    wait_for("more memory", || said() == "088");
    assert_eq!(memory(&vmm), sizes(448, 1024));

    vmm.done(&["reboot"]);
    wait_for("the memory after the reboot", || said() == "0883");
    assert_eq!(memory(&vmm), sizes(448, 1024));
    for size in [576, 704, 832, 960, 1088_u64] {
        let before = said().len();
        vmm.done(&["resize", "--memory", &format!("{size}M")]);
        wait_for("memory", || said().len() > before);
    }
    assert!(vmm.refused(&["resize", "--memory", "1216M"]).contains("there is room for 0"));

    // Less memory, and more than can be added, takes effect at the next start.
    vmm.done(&["resize", "--memory", "64M"]);
    assert_eq!(memory(&vmm), sizes(64, 1024));
    vmm.done(&["reboot"]);
    wait_for("its absence after the reboot", || said().ends_with('0'));
    vmm.done(&["resize", "--memory", "192M"]);
    wait_for("the memory", || said().ends_with("08"));
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn memory_can_be_added_eight_times_until_the_guest_restarts() {
    let files = Files::new();
    let kernel = files.kernel(&guest());
    let vmm = Vmm::start(&["--kernel", &kernel, "--memory", "size=64M,hotplug_size=2G"]);
    for n in 1..=8 {
        vmm.done(&["resize", "--memory", &format!("{}M", 64 + 128 * n)]);
    }
    let refused = vmm.refused(&["resize", "--memory", "1216M"]);
    assert!(refused.contains("8 times until the guest restarts") && refused.ends_with("(status 409)"), "{refused}");
    vmm.done(&["reboot"]);
    vmm.done(&["resize", "--memory", "1216M"]);
    assert_eq!(memory(&vmm), sizes(1216, 2048));
}

/// The sizes of a VM with a memory device, in MiB: at boot, the additional requested size, and the total of the guest.
fn with_device(vmm: &Vmm) -> (u64, Value, u64) {
    let info: Value = serde_json::from_str(&vmm.done(&["info"])).unwrap();
    let memory = &info["config"]["memory"];
    let mib = |size: &Value| size.as_u64().unwrap() / MIB;
    (mib(&memory["size"]), memory["hotplugged_size"].clone(), mib(&info["memory_actual_size"]))
}

/// The guest has no driver, so that its memory stays the same.
#[test]
fn a_memory_device_gets_a_size_request_at_once_and_after_reboot() {
    let files = Files::new();
    let (kernel, serial) = (files.kernel(&guest()), files.path("serial"));
    let serial_file = format!("file={}", serial.display());
    let memory = "size=64M,hotplug_method=virtio-mem,hotplug_size=1G,hotplugged_size=2M";
    let vmm = Vmm::start(&["--kernel", &kernel, "--memory", memory, "--serial", &serial_file]);
    let said = || fs::read_to_string(&serial).unwrap_or_default();
    wait_for("the guest, whose memory map has nothing at 4 GiB", || said() == "0");
    assert_eq!(with_device(&vmm), (64, json!(2 * MIB), 64));
    let info: Value = serde_json::from_str(&vmm.done(&["info"])).unwrap();
    assert!(info["device_tree"]["_mem0"].is_object(), "{info}");
    vmm.done(&["resize", "--memory", "1088M"]);
    assert_eq!(with_device(&vmm), (64, json!(1024 * MIB), 64));
    for (size, what) in [
        ("1090M", "there is room for 1G (hotplug_size)"),
        ("65M", "memory is added in steps of 2M"),
        ("62M", "memory of the start, 64M, is not taken away"),
    ] {
        let refused = vmm.refused(&["resize", "--memory", size]);
        assert!(refused.contains(what) && (refused.contains("(status 4")), "{refused}");
    }
    assert_eq!(vmm.refused(&["resize-zone", "--id", "z", "--size", "1G"]).matches("no memory zone z").count(), 1);
    vmm.done(&["reboot"]);
    wait_for("the guest again", || said() == "00");
    assert_eq!(with_device(&vmm), (64, json!(1024 * MIB), 64));
    vmm.done(&["resize", "--memory", "64M"]);
    assert_eq!(with_device(&vmm), (64, json!(0), 64));
    assert!(vmm.refused(&["remove-device", "_mem0"]).contains("cannot be removed"));
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn zones_are_resized_by_their_names() {
    let files = Files::new();
    let kernel = files.kernel(&guest());
    let zones = ["id=a,size=64M,hotplug_size=128M,shared=on", "id=b,size=64M,hotplug_size=256M,hotplugged_size=2M"];
    let memory = "size=0,hotplug_method=virtio-mem";
    let vmm = Vmm::start(&["--kernel", &kernel, "--memory", memory, "--memory-zone", zones[0], zones[1]]);
    let sizes = || {
        let info: Value = serde_json::from_str(&vmm.done(&["info"])).unwrap();
        [0, 1].map(|n| info["config"]["memory"]["zones"][n]["hotplugged_size"].clone())
    };
    assert_eq!(sizes(), [Value::Null, json!(2 * MIB)]);
    vmm.done(&["resize-zone", "--id", "a", "--size", "192M"]);
    assert_eq!(sizes(), [json!(128 * MIB), json!(2 * MIB)]);
    let refused = vmm.refused(&["resize-zone", "--id", "a", "--size", "194M"]);
    assert!(refused.contains("id=a,desired_ram=203423744: there is room for 128M"), "{refused}");
    assert!(vmm.refused(&["resize", "--memory", "1G"]).contains("vm.resize-zone"));
    assert_eq!(sizes(), [json!(128 * MIB), json!(2 * MIB)]);
}

#[test]
fn numa_nodes_are_the_same_by_command_line_and_json() {
    let files = Files::new();
    let kernel = files.kernel(&guest());
    let vmm = Vmm::start(
        &[
            &["--kernel", &kernel, "--cpus", "boot=1,max=4", "--memory", "size=0,hotplug_method=virtio-mem"][..],
            &["--memory-zone", "id=a,size=64M", "id=b,size=64M,hotplug_size=128M"],
            &["--numa", "guest_numa_id=0,cpus=[0-1],memory_zones=[a],pci_segments=[0],distances=[1@30]"],
            &["--numa", "guest_numa_id=1,cpus=[2,3],memory_zones=[b],device_id=__rng"],
        ]
        .concat(),
    );
    let config = || serde_json::from_str::<Value>(&vmm.done(&["info"])).unwrap()["config"].clone();
    let before = config();
    let expected = json!([
        {
            "guest_numa_id": 0, "cpus": [0, 1], "distances": [{"destination": 1, "distance": 30}],
            "memory_zones": ["a"], "pci_segments": [0],
        },
        {"guest_numa_id": 1, "cpus": [2, 3], "memory_zones": ["b"], "device_id": "__rng"},
    ]);
    assert_eq!(before["numa"], expected);
    vmm.done(&["reboot"]);
    // The printed configuration can be created and booted again.
    vmm.done(&["shutdown"]);
    vmm.done(&["delete"]);
    let path = files.path("again.json");
    fs::write(&path, before.to_string()).unwrap();
    vmm.done(&["create", &path.display().to_string()]);
    vmm.done(&["boot"]);
    assert_eq!(config()["numa"], expected);
    let mut wrong = before;
    wrong["numa"][1]["distances"] = json!([{"destination": 0, "distance": 9}]);
    fs::write(&path, wrong.to_string()).unwrap();
    vmm.done(&["delete"]);
    let refused = vmm.refused(&["create", &path.display().to_string()]);
    assert!(refused.contains("numa[1].distances=[0@9]: another node is farther away"), "{refused}");
}

#[test]
fn without_room_another_size_counts_from_the_next_start_on() {
    let files = Files::new();
    let (kernel, serial) = (files.kernel(&guest()), files.path("serial"));
    let serial_file = format!("file={}", serial.display());
    let vmm = Vmm::start(&["--kernel", &kernel, "--memory", "size=64M", "--serial", &serial_file]);
    let said = || fs::read_to_string(&serial).unwrap_or_default();
    wait_for("the guest", || said() == "0");
    vmm.done(&["resize", "--memory", "4G"]);
    assert_eq!(memory(&vmm).0, json!(4096 * MIB));
    vmm.done(&["reboot"]);
    wait_for("memory above 4 GiB", || said() == "08");
    let refused = vmm.refused(&["resize", "--memory", "1M"]);
    assert!(refused.contains("does not fit into the guest's memory"), "{refused}");
    assert!(vmm.refused(&["resize", "--memory", "0"]).ends_with("(status 400)"));
    assert_eq!(memory(&vmm).0, json!(4096 * MIB));
}
