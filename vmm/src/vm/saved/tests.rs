//! Machines on this host's own /dev/kvm, saved at any moment.

use std::time::{Duration, Instant};

use super::guest::{COUNT, GO, MISTAKE, Machine, assert_same};
use super::*;

const PLAIN: &str = r#"{"serial":{"mode":"Null"},"console":{"mode":"Null"}}"#;

/// `mov [address], eax`
fn store(address: u64) -> Vec<u8> {
    [&[0xa3][..], &(address as u32).to_le_bytes()].concat()
}

/// `mov dword [MISTAKE], 1`, and stop.
fn mistake() -> Vec<u8> {
    [&[0xc7, 0x05][..], &(MISTAKE as u32).to_le_bytes(), &1u32.to_le_bytes(), &[0xfa, 0xf4, 0xeb, 0xfd]].concat()
}

/// Counts in EAX, not in memory: `again: inc eax; mov [COUNT], eax; jmp again`
fn counting() -> Vec<u8> {
    [&[0x40][..], &store(COUNT), &[0xeb, 0xf8]].concat()
}

/// A loop of `body`, which may use EAX and EDX, and `jne` of 2 bytes to a mistake at its end. It counts in EBX.
fn checking(body: &[u8]) -> Vec<u8> {
    let mut code = vec![0x43]; // inc ebx
    code.extend(body);
    let mistake = mistake();
    // je over the mistake
    code.extend([0x74, mistake.len() as u8]);
    code.extend(mistake);
    code.extend([0x89, 0x1d]); // mov [COUNT], ebx
    code.extend((COUNT as u32).to_le_bytes());
    let back = -(code.len() as i32 + 5);
    code.push(0xe9);
    code.extend(back.to_le_bytes());
    code
}

#[test]
fn a_guest_continues_to_count_where_it_stopped() {
    let machine = Machine::boot(&counting(), PLAIN);
    machine.counts_beyond(1000);
    let mut machine = machine;
    for _ in 0..5 {
        machine.vm.pause();
        let (before, state) = (machine.read(COUNT), machine.save());
        // Saving changes nothing. The clock continues.
        let (mut first, second) = (machine.vm.save_machine().unwrap(), machine.vm.save_machine().unwrap());
        first.clock = second.clock.clone();
        assert_eq!(first, second);
        let mut next = machine.restored(&state);
        assert_same(&next.save(), &state);
        // The counter is in a register.
        next.write(COUNT, &[0; 4]);
        next.vm.resume().unwrap();
        next.counts_beyond(before);
        // The first machine can resume as well.
        machine.vm.resume().unwrap();
        machine.counts_beyond(before);
        machine = next;
    }
}

#[test]
fn only_a_paused_machine_is_saved() {
    let mut machine = Machine::new(&counting(), PLAIN);
    assert!(matches!(machine.vm.save_machine(), Err(SaveError::NotPaused)));
    machine.vm.power_on().unwrap();
    assert!(matches!(machine.vm.save_machine(), Err(SaveError::NotPaused)));
    machine.vm.pause();
    assert!(machine.vm.save_machine().is_ok());
}

/// Writes the count to the scratch register of the serial port, and reads it back.
#[test]
fn a_guest_in_the_middle_of_a_port_access_continues() {
    // mov al, bl; mov edx, 0x3ff; out dx, al; xor eax, eax; in al, dx; cmp al, bl
    let body = [0x88, 0xd8, 0xba, 0xff, 0x03, 0, 0, 0xee, 0x31, 0xc0, 0xec, 0x38, 0xd8];
    let mut machine = Machine::boot(&checking(&body), PLAIN);
    for round in 0..30 {
        machine.counts_beyond(round);
        machine = machine.moved();
        let count = machine.read(COUNT);
        machine.counts_beyond(count);
    }
}

/// Writes the count to a register of configuration space, and reads it back by an exit: 8 bytes, in two accesses.
#[test]
fn a_guest_in_the_middle_of_an_access_to_a_device_continues() {
    // mov [0xe800800c], bl; movzx eax, byte [0xe800800c]; cmp al, bl
    let register = 0xe800_800c_u32.to_le_bytes();
    let body = [&[0x88, 0x1d][..], &register, &[0x0f, 0xb6, 0x05], &register, &[0x38, 0xd8]].concat();
    let mut machine = Machine::boot(&checking(&body), PLAIN);
    for round in 0..30 {
        machine.counts_beyond(round);
        machine = machine.moved();
        let count = machine.read(COUNT);
        machine.counts_beyond(count);
    }
}

/// Several exits belong to one instruction.
#[test]
fn a_guest_in_the_middle_of_a_string_of_accesses_continues() {
    // mov esi, buffer; mov ecx, 100; mov edx, 0x3ff; rep outsb; in al, dx; cmp al, [esi - 1]
    let buffer = 0x31_0000_u32.to_le_bytes();
    let body =
        [&[0xbe][..], &buffer, &[0xb9, 100, 0, 0, 0, 0xba, 0xff, 0x03, 0, 0, 0xf3, 0x6e, 0xec, 0x3a, 0x46, 0xff]];
    let mut machine = Machine::new(&checking(&body.concat()), PLAIN);
    machine.write(0x31_0000, &(0..100).collect::<Vec<u8>>());
    machine.vm.power_on().unwrap();
    for round in 0..20 {
        machine = machine.moved();
        machine.counts_beyond(round);
    }
}

#[test]
fn a_halted_vcpu_stays_halted_until_it_is_woken() {
    // cli; hlt; inc dword [COUNT]; jmp back
    let code = [&[0xfa, 0xf4, 0xff, 0x05][..], &(COUNT as u32).to_le_bytes(), &[0xeb, 0xf6]].concat();
    let mut machine = Machine::boot(&code, PLAIN);
    let start = Instant::now();
    loop {
        machine.vm.pause();
        let is_halted = machine.vm.save_machine().unwrap().vcpus[0].mp_state == 3;
        machine.vm.resume().unwrap();
        if is_halted {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "it never halts");
        std::thread::sleep(Duration::from_millis(1));
    }
    machine = machine.moved();
    machine.vm.pause();
    let state = machine.vm.save_machine().unwrap();
    assert_eq!(state.vcpus[0].mp_state, 3, "KVM_MP_STATE_HALTED");
    machine.vm.resume().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(machine.read(COUNT), 0);
}

/// A vCPU that was never started, and one that is started after the move.
#[test]
fn a_vcpu_that_was_never_started_is_started_afterwards() {
    // again: inc dword [COUNT]; cmp dword [GO], 0; je again
    let mut code =
        [&[0xff, 0x05][..], &(COUNT as u32).to_le_bytes(), &[0x83, 0x3d], &(GO as u32).to_le_bytes(), &[0, 0x74]]
            .concat();
    code.push((-(code.len() as i32 + 1)) as u8);
    // The local APIC: INIT, and a start-up message for page 0x10, to APIC 1.
    for (register, value) in [(0x310, 1 << 24), (0x300, 0x4500), (0x310, 1 << 24), (0x300, 0x4610)] {
        code.extend([0xc7, 0x05]);
        code.extend((0xfee0_0000_u32 + register).to_le_bytes());
        code.extend(u32::to_le_bytes(value));
    }
    code.extend([0xeb, 0xfe]);
    let mut machine = Machine::boot(
        &code,
        r#"{"cpus":{"boot_vcpus":2,"max_vcpus":4},"serial":{"mode":"Null"},"console":{"mode":"Null"}}"#,
    );
    machine.counts_beyond(10);
    machine = machine.moved();
    // In real mode: mov word [0x5000], 0x1234; jmp $
    machine.write(0x1_0000, &[0xc7, 0x06, 0x00, 0x50, 0x34, 0x12, 0xeb, 0xfe]);
    machine.write(GO, &[1]);
    let start = Instant::now();
    while machine.read(0x5000) != 0x1234 {
        assert!(start.elapsed() < Duration::from_secs(30), "vCPU 1 does not start");
        std::thread::sleep(Duration::from_millis(1));
    }
    machine = machine.moved();
    machine.vm.pause();
    assert_eq!(machine.vm.save_machine().unwrap().vcpus.len(), 2);
}

/// An interrupt waits in the local APIC of a guest that does not take interrupts.
#[test]
fn an_interrupt_that_waits_is_taken_afterwards() {
    let handler = 0x31_0000_u32;
    let mut code = vec![0xfa, 0xbc, 0, 0, 0x32, 0]; // cli; mov esp, 0x320000
    code.extend([0x0f, 0x01, 0x1d]); // lidt [0x312000]
    code.extend(0x31_2000_u32.to_le_bytes());
    // Software-enable the local APIC, and send vector 0x40 to itself.
    for (register, value) in [(0xf0, 0x1ff), (0x300, 0x4_0040)] {
        code.extend([0xc7, 0x05]);
        code.extend((0xfee0_0000_u32 + register).to_le_bytes());
        code.extend(u32::to_le_bytes(value));
    }
    let again = code.len();
    code.extend([0xff, 0x05]); // inc dword [COUNT]
    code.extend((COUNT as u32).to_le_bytes());
    code.extend([0x83, 0x3d]); // cmp dword [GO], 0
    code.extend((GO as u32).to_le_bytes());
    code.push(0);
    code.push(0x74);
    code.push((again as i32 - (code.len() as i32 + 1)) as u8);
    code.extend([0xfb, 0xeb, 0xfe]); // sti; jmp $
    let mut machine = Machine::new(&code, PLAIN);
    // The interrupt descriptor of vector 0x40 and the table's own; the handler: mov dword [0x311000], 7; jmp $
    let [a, b, c, d] = handler.to_le_bytes();
    machine.write(0x31_3000 + 8 * 0x40, &[a, b, 0x10, 0, 0, 0x8e, c, d]);
    machine.write(0x31_2000, &[0xff, 0x07, 0x00, 0x30, 0x31, 0x00]);
    machine.write(handler.into(), &[0xc7, 0x05, 0, 0x10, 0x31, 0, 7, 0, 0, 0, 0xeb, 0xfe]);
    machine.vm.power_on().unwrap();
    machine.counts_beyond(10);
    machine = machine.moved();
    let count = machine.read(COUNT);
    machine.counts_beyond(count);
    assert_eq!(machine.read(0x31_1000), 0);
    machine.write(GO, &[1]);
    let start = Instant::now();
    while machine.read(0x31_1000) != 7 {
        assert!(start.elapsed() < Duration::from_secs(30), "the interrupt is lost");
        std::thread::sleep(Duration::from_millis(1));
    }
}
