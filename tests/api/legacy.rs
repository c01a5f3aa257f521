//! Linux kernels that need hardware of older PCs according to their command lines.

use std::fs;

use serde_json::{Value, json};

use crate::rig::vmm::Vmm;
use crate::tiny::Code;

/// A guest that prints which of that hardware it finds, and if both PICs are masked.
fn guest() -> Code {
    let found = Code::default()
        .out32(0xcf8, 0x8000_0000)
        .input32(0xcfc)
        .print_if_eax(0x0d57_8086, "bridge ")
        .out(0x70, 0x0d)
        .bytes(&[0x31, 0xc0]) // xor eax, eax
        .input(0x71)
        .print_if_eax(0x80, "clock ");
    let table = Code::default()
        // mov esi, [esi + 4]; mov eax, [esi]
        .bytes(&[0x8b, 0x76, 0x04, 0x8b, 0x06])
        .print_if_eax(u32::from_le_bytes(*b"PCMP"), "table ")
        // mov eax, [esi + 44 + 20]: the second entry, a CPU with the local APIC 1, enabled
        .bytes(&[0x8b, 0x46, 64])
        .print_if_eax(0x0114_0100, "cpu1 ");
    let skip = u8::try_from(table.0.len()).unwrap();
    found
        // mov esi, 0xf0000; again: cmp dword [esi], "_MP_"; je found
        .bytes(&[0xbe, 0, 0, 0x0f, 0, 0x81, 0x3e, b'_', b'M', b'P', b'_', 0x74, 13])
        // add esi, 16; cmp esi, 0x100000; jb again; jmp past the table
        .bytes(&[0x83, 0xc6, 16, 0x81, 0xfe, 0, 0, 0x10, 0, 0x72, 0xed, 0xeb, skip])
        .bytes(&table.0)
        .bytes(&[0x31, 0xc0])
        .input(0x21)
        .print_if_eax(0xff, "masked ")
        .bytes(&[0x31, 0xc0])
        .input(0xa1)
        .print_if_eax(0xff, "masked")
        .power_off()
}

/// The output of a Linux guest with this command line and these settings of the platform.
fn printed(command_line: &str, platform: &Value) -> String {
    let vmm = Vmm::start();
    let kernel = vmm.files.write("linux", &guest().linux());
    let mut config = vmm.config(json!([]));
    config["payload"] = json!({"kernel": kernel, "cmdline": command_line});
    config["serial"] = json!({"mode": "File", "file": vmm.files.path("serial")});
    config["platform"] = platform.clone();
    let (mut client, serial) = (vmm.client(), vmm.files.path("serial"));
    client.put_json("vm.create", &config).expect(204);
    client.put("vm.boot").expect(204);
    crate::rig::vmm::wait_for("the guest's end", || {
        fs::read_to_string(&serial).unwrap_or_default().ends_with("masked masked")
    });
    fs::read_to_string(serial).unwrap()
}

#[test]
fn linux_finds_the_hardware_that_its_command_line_asks_for() {
    for (command_line, expected) in [
        ("console=ttyS0 quiet", "masked masked"),
        ("console=ttyS0 acpi=off", "bridge clock table cpu1 masked masked"),
        ("pci=nommconf,realloc quiet", "bridge masked masked"),
        ("noapic -- acpi=off", "masked masked"),
    ] {
        assert_eq!(printed(command_line, &Value::Null), expected, "{command_line}");
    }
}

#[test]
fn a_kernel_without_acpi_gets_legacy_hardware_by_an_option() {
    let platform = json!({"legacy_hardware": true});
    assert_eq!(printed("quiet", &platform), "bridge clock table cpu1 masked masked");
}
