//! Tiny guests on the machine's own /dev/kvm. Without it, these tests fail.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::os::unix::fs::FileExt;

use common::{CODE_OFFSET, Code, Guest, wait_for};

#[test]
fn a_guest_prints_and_powers_off() {
    let guest = Guest::new(&Code::default().print("hello").power_off());
    guest.run().unwrap();
    assert_eq!(guest.output(), "hello");
}

#[test]
fn missing_memory_and_ports_read_all_ones() {
    let code = Code::default()
        .load(0xd000_0000)
        .print_if_eax(u32::MAX, "memory ")
        .store(0xd000_0000, 1)
        .bytes(&[0x31, 0xc0]) // xor eax, eax
        .input(0x70)
        .print_if_eax(0xff, "port ")
        .bytes(&[0x66, 0xba, 0xfc, 0x0c, 0xed]) // mov dx, 0xcfc; in eax, dx
        .print_if_eax(u32::MAX, "configuration ports")
        .power_off();
    let guest = Guest::with_kernel(&code.linux());
    guest.run().unwrap();
    assert_eq!(guest.output(), "memory port configuration ports");
}

#[test]
fn a_debug_console_takes_characters_at_its_port() {
    let code = Code::default()
        .bytes(&[0x31, 0xc0]) // xor eax, eax
        .input(0xe9)
        .print_if_eax(0xe9, "there ")
        .out(0xe9, b'h')
        .out(0xe9, b'i')
        .print("said")
        .power_off();
    let mut guest = Guest::new(&code);
    guest.run().unwrap();
    assert_eq!(guest.output(), "said", "there is none by default");
    let file = guest.path("debug");
    guest.config.debug_console = format!("file={}", file.display()).parse().unwrap();
    guest.run().unwrap();
    assert_eq!((guest.output().as_str(), common::output(&file).as_str()), ("there said", "hi"));
}

/// Prints which of the ports that firmware needs exist.
fn ports_of_firmware() -> Code {
    Code::default()
        .out32(0xcf8, 0x8000_0000)
        .input32(0xcfc)
        .print_if_eax(0x0d57_8086, "bridge ")
        .out(0x70, 0x0d)
        .bytes(&[0x31, 0xc0]) // xor eax, eax
        .input(0x71)
        .print_if_eax(0x80, "clock ")
        .input32(0x608)
        // The timer changes: mov ebx, eax; in eax, dx; sub eax, ebx; jz back to in
        .bytes(&[0x89, 0xc3, 0xed, 0x29, 0xd8, 0x74, 0xfb])
        .bytes(&[0x31, 0xc0])
        .print_if_eax(0, "timer")
        .power_off()
}

#[test]
fn firmware_has_its_ports_however_it_is_given() {
    let file = ports_of_firmware().firmware();
    let mut guest = Guest::with_kernel(&file);
    guest.run().unwrap();
    assert_eq!(guest.output(), "bridge clock timer");
    guest.config.payload.firmware = guest.config.payload.kernel.take();
    // Neither has an effect: the initramfs is not even opened.
    guest.config.payload.cmdline = Some("x".repeat(0x1_0000));
    guest.config.payload.initramfs = Some(guest.path("no such file"));
    guest.run().unwrap();
    assert_eq!(guest.output(), "bridge clock timer");
}

#[test]
fn a_kernel_that_is_not_linux_has_the_ports_of_firmware() {
    let mut guest = Guest::new(&ports_of_firmware());
    guest.run().unwrap();
    assert_eq!(guest.output(), "bridge clock timer");
    std::fs::write(guest.path("kernel"), ports_of_firmware().linux()).unwrap();
    guest.config.platform = Some("legacy_hardware=on".parse().unwrap());
    guest.run().unwrap();
    assert_eq!(guest.output(), "bridge clock timer", "Linux with the option");
}

#[test]
fn the_ecam_has_the_host_bridge_and_nothing_else() {
    let code = Code::default()
        .load(0xe800_0000)
        .print_if_eax(0x0d57_8086, "bridge ")
        .load(0xe800_1000)
        .print_if_eax(u32::MAX, "function 1 is absent ")
        .load(0xe810_0000)
        .print_if_eax(u32::MAX, "bus 1 is absent")
        .power_off();
    let guest = Guest::new(&code);
    guest.run().unwrap();
    assert_eq!(guest.output(), "bridge function 1 is absent bus 1 is absent");
}

/// Runs a guest that ends every boot with `reset`, until its kernel file has been replaced.
///
/// The next boot must print the text of the new file: nothing of the guest's old memory may remain.
fn check_reset(vcpus: u32, reset: &Code) {
    let life = |name: &str| Code::default().print("[").load(0x30_0000).print_if_eax(0, name).store(0x30_0000, 1);
    let first = life("first").bytes(&reset.0);
    let last = life("last").power_off();
    let guest = Guest::new(&first).with_vcpus(vcpus);
    let kernel = std::fs::OpenOptions::new().write(true).open(guest.path("kernel")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_for(&guest.path("serial"), "[first[first");
            kernel.write_all_at(&last.elf()[CODE_OFFSET as usize..], CODE_OFFSET).unwrap();
        });
        guest.run().unwrap();
    });
    let output = guest.output();
    assert!(output.starts_with("[first[first") && output.ends_with("[first[last"), "{output}");
}

#[test]
fn the_acpi_reset_register_starts_the_guest_again() {
    check_reset(1, &Code::default().out(0x602, 1).spin());
}

#[test]
fn the_keyboard_controllers_reset_line_starts_the_guest_again() {
    check_reset(1, &Code::default().out(0x64, 0xfe).spin());
}

#[test]
fn a_triple_fault_starts_the_guest_again() {
    // There is no IDT: xor ecx, ecx; div ecx
    check_reset(1, &Code::default().bytes(&[0x31, 0xc9, 0xf7, 0xf1]));
}

/// Wakes all other vCPUs with INIT and two SIPIs, which make them run `code` in real mode at 0x8000.
fn wake_others(code: &[u8]) -> Code {
    const INTERRUPT_COMMAND: u32 = 0xfee0_0300;
    const SPURIOUS_INTERRUPT: u32 = 0xfee0_00f0;
    const ALL_OTHERS: u32 = 3 << 18;
    let copy = code.chunks(4).zip((0x8000..).step_by(4)).fold(Code::default(), |copy, (chunk, address)| {
        let mut dword = [0x90; 4];
        dword[..chunk.len()].copy_from_slice(chunk);
        copy.store(address, u32::from_le_bytes(dword))
    });
    copy.store(SPURIOUS_INTERRUPT, 0x1ff)
        .store(INTERRUPT_COMMAND, ALL_OTHERS | 0x4500)
        .store(INTERRUPT_COMMAND, ALL_OTHERS | 0x4608)
        .store(INTERRUPT_COMMAND, ALL_OTHERS | 0x4608)
}

/// `mov dx, port; mov al, value; out dx, al` in 16-bit code.
fn out16(port: u16, value: u8) -> [u8; 6] {
    let [low, high] = port.to_le_bytes();
    [0xba, low, high, 0xb0, value, 0xee]
}

#[test]
fn the_second_vcpu_runs_when_the_first_wakes_it() {
    let second = [&out16(0x3f8, b'2')[..], &out16(0x600, 0x34), &[0xeb, 0xfe]].concat();
    let guest = Guest::new(&wake_others(&second).spin()).with_vcpus(2);
    guest.run().unwrap();
    assert_eq!(guest.output(), "2");
}

#[test]
fn a_vcpu_that_spins_is_stopped_when_another_powers_off() {
    let second = [0xeb, 0xfe];
    let guest = Guest::new(&wake_others(&second).print("off").power_off()).with_vcpus(4);
    guest.run().unwrap();
    assert_eq!(guest.output(), "off");
}

#[test]
fn the_firmware_at_the_reset_vector_resets() {
    // The second vCPU is in real mode, as when Linux resets this way: jmp 0xffff:0
    check_reset(2, &wake_others(&[0xea, 0x00, 0x00, 0xff, 0xff]).spin());
}

#[test]
fn a_guest_that_kvm_cannot_run_ends_with_an_error_of_one_line() {
    // A jump to an address without memory: there is no instruction to emulate.
    let guest = Guest::new(&Code::default().print("jump").bytes(&[0xb8, 0, 0, 0, 0xd0, 0xff, 0xe0]));
    let error = guest.run().unwrap_err().to_string();
    assert_eq!(guest.output(), "jump");
    assert!(error.starts_with("vCPU 0: ") && !error.contains('\n'), "{error}");
}

#[test]
fn a_guest_without_a_serial_port_finds_none() {
    let present = Code::default().bytes(&[0x31, 0xc0]).input(0x3fd);
    // A missing port reads 0xff. The guest reports it through its end: a power-off, or a jump to an address without
    // memory.
    let code = present.bytes(&[0x3c, 0xff, 0x74, 7, 0xb8, 0, 0, 0, 0xd0, 0xff, 0xe0]).power_off();
    let mut guest = Guest::new(&code);
    guest.run().unwrap_err();
    guest.config.serial = vmm::config::ConsoleConfig::off();
    guest.run().unwrap();
}

#[test]
fn memory_is_above_the_hole_too() {
    // In 32-bit mode only memory below the hole is visible: use the last dword below it.
    let code = Code::default().store(0xbfff_fffc, 7).load(0xbfff_fffc).print_if_eax(7, "there").power_off();
    let mut guest = Guest::new(&code);
    guest.config.memory.size = 4 << 30;
    guest.run().unwrap();
    assert_eq!(guest.output(), "there");
}

/// Guest address of the memory of the device in this slot.
fn place(slot: u32) -> u32 {
    0xd000_0000 + (slot << 24)
}

/// The registers of configuration space of the device in this slot.
fn function(slot: u32) -> u32 {
    0xe800_0000 + (slot << 15)
}

/// Guest address of virtio's registers of the device in this slot.
fn registers(slot: u32) -> u32 {
    place(slot) + 0x80_0000
}

/// Places the memory and the registers of a device, and enables their decoding.
fn placed(slot: u32) -> Code {
    let bars = [(0x10, place(slot)), (0x14, 0), (0x18, registers(slot)), (0x1c, 0)];
    bars.into_iter()
        .fold(Code::default(), |code, (offset, address)| code.store(function(slot) + offset, address))
        .store(function(slot) + 4, 2)
}

/// A guest with 2 MiB of persistent memory in slot 5, which starts with 7, and in slot 6, which is zero.
fn with_persistent_memory(code: &Code, discard_writes: bool) -> Guest {
    let mut guest = Guest::new(code);
    for (slot, first, discard_writes) in [(5, 7, discard_writes), (6, 0, false)] {
        let file = guest.path(&format!("pmem{slot}"));
        std::fs::write(&file, [first]).unwrap();
        std::fs::File::options().write(true).open(&file).unwrap().set_len(2 << 20).unwrap();
        let text = format!("file={},discard_writes={},pci_device_id={slot}", file.display(), on_off(discard_writes));
        guest.config.pmem.push(text.parse().unwrap());
    }
    guest
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

#[test]
fn a_file_is_memory_where_the_guest_places_it() {
    let moved = place(7);
    let code = placed(5)
        .load(place(5))
        .print_if_eax(7, "read ")
        .load(registers(5) + 0x200)
        .print_if_eax(place(5), "address ")
        .load(registers(5) + 0x208)
        .print_if_eax(2 << 20, "size ")
        .store(place(5), 8)
        .store(function(5) + 0x10, moved)
        .load(moved)
        .print_if_eax(8, "moved ")
        .load(place(5))
        .print_if_eax(u32::MAX, "gone ")
        .store(moved + 4, 9)
        .power_off();
    let guest = with_persistent_memory(&code, false);
    guest.run().unwrap();
    assert_eq!(guest.output(), "read address size moved gone ");
    let file = std::fs::read(guest.path("pmem5")).unwrap();
    assert_eq!((&file[..5], file.len()), (&[8, 0, 0, 0, 9][..], 2 << 20));
}

#[test]
fn discarded_pmem_writes_are_absent_after_a_guest_restart() {
    let restart = Code::default().store(place(6), 1).out(0x602, 1).spin().0;
    let code = placed(5)
        .bytes(&placed(6).0)
        .load(place(5))
        .print_if_eax(7, "clean ")
        .store(place(5), 8)
        .load(place(5))
        .print_if_eax(8, "written ")
        .load(place(6))
        // cmp eax, 0; jne past the restart
        .bytes(&[0x3d, 0, 0, 0, 0, 0x75, u8::try_from(restart.len()).unwrap()])
        .bytes(&restart)
        .power_off();
    let guest = with_persistent_memory(&code, true);
    guest.run().unwrap();
    assert_eq!(guest.output(), "clean written clean written ");
    assert_eq!(std::fs::read(guest.path("pmem5")).unwrap()[0], 7);
    assert_eq!(std::fs::read(guest.path("pmem6")).unwrap()[0], 1);
}
