//! State that is neither a device in a slot nor a register of a vCPU, and the guest's time.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::json;

use super::guest::{COUNT, Machine, assert_same};
use super::*;
use crate::arch::x86_64::legacy::LegacyHardware;
use crate::config::MemoryConfig;
use crate::exits::MmioHandler as _;

const PLAIN: &str = r#"{"serial":{"mode":"Null"},"console":{"mode":"Null"}}"#;
/// `cli; hlt; jmp back to hlt`
const IDLE: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

/// Reads ports of the machine as a guest does.
fn port<const N: usize>(machine: &Machine, port: u16) -> [u8; N] {
    let mut data = [0; N];
    machine.vm.running.as_ref().unwrap().vcpus.handlers().ports.read(port, &mut data);
    data
}

fn write(machine: &Machine, port: u16, data: &[u8]) {
    assert_eq!(machine.vm.running.as_ref().unwrap().vcpus.handlers().ports.write(port, data), None);
}

/// True if the PIC of a paused machine has a request of `pin`, now or soon: KVM injects the interrupt of an eventfd
/// from a work item. The requests are byte 1 of a PIC (`struct kvm_pic_state`).
fn is_requested_soon(machine: &Machine, pin: u32) -> bool {
    let start = Instant::now();
    loop {
        if machine.vm.save_machine().unwrap().irqchip.chips[0].bytes()[9] >> pin & 1 == 1 {
            return true;
        }
        if start.elapsed() > Duration::from_secs(10) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Moves the machine, whose interrupt on `pin` was lost, and returns true if it was sent again.
fn interrupts_again(machine: &mut Machine, pin: u32) -> bool {
    machine.vm.pause();
    let mut state = machine.vm.save_machine().unwrap();
    // The requests are byte 1 of a PIC (`struct kvm_pic_state`).
    let mut pic = state.irqchip.chips[0].bytes().to_vec();
    pic[9] &= !(1 << pin);
    state.irqchip.chips[0] = crate::machine_state::blob::Blob::new(pic);
    let is_requested = |machine: &Machine| {
        let state = machine.vm.save_machine().unwrap();
        state.irqchip.chips[0].bytes()[9] >> pin & 1 == 1
    };
    let mut next = machine.moved_paused(&serde_json::to_vec(&state).unwrap());
    assert!(!is_requested(&next));
    next.vm.resume().unwrap();
    next.vm.pause();
    *machine = next;
    is_requested_soon(machine, pin)
}

#[test]
fn unread_serial_input_survives_a_move_and_interrupts_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serial");
    let json = format!(r#"{{"serial":{{"mode":"Socket","socket":"{}"}},"console":{{"mode":"Null"}}}}"#, path.display());
    let mut machine = Machine::boot(IDLE, &json);
    machine.vm.read_input().unwrap();
    write(&machine, 0x3f9, &[1]);
    write(&machine, 0x3ff, &[0x5a]);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"yes").unwrap();
    let start = Instant::now();
    while machine.vm.serial.as_ref().unwrap().port().save().input.len() < 3 {
        assert!(start.elapsed() < Duration::from_secs(10), "no input");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(client);
    let mut machine = machine.moved_away();
    assert_eq!(port(&machine, 0x3ff), [0x5a]);
    machine.vm.pause();
    assert!(is_requested_soon(&machine, 4), "the interrupt came");
    assert_eq!([(); 3].map(|()| port(&machine, 0x3f8)), [*b"y", *b"e", *b"s"]);
}

/// A pseudo-terminal that no program has opened yet.
#[test]
fn unread_output_is_kept_for_a_later_reader() {
    let json = r#"{"serial":{"mode":"Pty"},"console":{"mode":"Null"}}"#;
    let mut machine = Machine::boot(IDLE, json);
    machine.vm.read_input().unwrap();
    b"login: ".iter().for_each(|byte| write(&machine, 0x3f8, &[*byte]));
    machine.vm.pause();
    let before = machine.save();
    let mut machine = machine.moved_paused(&before);
    assert_same(&machine.save(), &before);
    machine.vm.read_input().unwrap();
    let path = machine.vm.ptys()[0].unwrap().to_path_buf();
    let mut user = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut bytes = [0; 7];
    std::io::Read::read_exact(&mut user, &mut bytes).unwrap();
    assert_eq!(&bytes, b"login: ");
}

#[test]
fn events_that_the_guest_has_not_read_are_reported_again() {
    let json = r#"{"cpus":{"boot_vcpus":1,"max_vcpus":4},"serial":{"mode":"Null"},"console":{"mode":"Null"},
                   "memory":{"size":8388608,"hotplug_size":1073741824}}"#;
    let mut machine = Machine::boot(IDLE, json);
    machine.vm.press_power_button();
    machine.vm.resize(3).unwrap();
    let mut config = machine.planned().config().clone();
    config.memory.size = 264 << 20;
    let memory: MemoryConfig = config.memory.clone();
    machine.vm.resize_memory(memory).unwrap();
    // The edited configuration applies.
    machine.plan(config);
    machine.vm.pause();
    let before = machine.save();
    let mut machine = machine.moved_paused(&before);
    assert_same(&machine.save(), &before);
    assert_eq!(machine.vm.ram.size(), 264 << 20);
    assert!(interrupts_again(&mut machine, 5));
    machine.vm.resume().unwrap();
    // The power button, vCPUs 1 and 2, and a region of memory.
    assert_eq!(port(&machine, 0x610), [0b1110]);
    assert_eq!([0xb000, 0xb020, 0xb020].map(|at| port(&machine, at)), [[7], [6], [0]]);
    assert_eq!([0xb100, 0xb100].map(|at| port(&machine, at)), [[1], [0]]);
    // The guest releases one of the vCPUs again, and the machine has not noticed yet.
    machine.vm.resize(2).unwrap();
    write(&machine, 0xb060, &[4]);
    machine = machine.moved();
    assert!(machine.vm.event().read().is_ok());
    assert!(machine.vm.take_ejected().is_empty());
    machine.vm.pause();
    let state = machine.vm.save_machine().unwrap();
    assert_eq!(state.vcpus.iter().map(|vcpu| vcpu.id).collect::<Vec<_>>(), [0, 1]);
    let mut machine = machine.moved_paused(&serde_json::to_vec(&state).unwrap());
    machine.vm.resume().unwrap();
    machine.vm.resize(4).unwrap();
    machine.vm.pause();
    assert_eq!(machine.vm.save_machine().unwrap().vcpus.len(), 4);
    // Added memory is part of the next start and of later ones.
    machine.vm.reset().unwrap();
    let machine = machine.moved();
    let start = machine.vm.layout.hotplug.start;
    assert_eq!(machine.vm.layout.plugged, start..start + (256 << 20));
}

#[test]
fn requests_of_the_guest_are_done_where_it_continues() {
    // mov edx, 0x602; mov al, 1; out dx, al: a reset
    let code = [0xba, 0x02, 0x06, 0, 0, 0xb0, 1, 0xee, 0xeb, 0xfe];
    let mut machine = Machine::boot(&code, PLAIN);
    let start = Instant::now();
    while machine.vm.event().read().is_err() {
        assert!(start.elapsed() < Duration::from_secs(10), "no stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    machine.vm.pause();
    let before = machine.save();
    let mut machine = machine.moved_paused(&before);
    assert_same(&machine.save(), &before);
    assert!(machine.vm.event().read().is_ok());
    assert!(matches!(machine.vm.take_stop(), Some(Stop::Reset)));
    machine.vm.reset().unwrap();
    assert!(!machine.vm.is_paused());
}

#[test]
fn firmware_ports_keep_their_values_and_the_timer_continues() {
    let json = r#"{"payload":{"firmware":"x"},"serial":{"mode":"Null"},"console":{"mode":"Null"}}"#;
    let mut machine = Machine::boot(IDLE, json);
    write(&machine, 0xcf8, &0x8000_0800_u32.to_le_bytes());
    write(&machine, 0x70, &[0x32]);
    let timer = |machine: &Machine| u32::from_le_bytes(port(machine, 0x608));
    std::thread::sleep(Duration::from_millis(20));
    let before = timer(&machine);
    machine = machine.moved();
    assert!(timer(&machine) > before, "it continued");
    assert_eq!(port(&machine, 0xcf8), 0x8000_0800_u32.to_le_bytes());
    assert_eq!(port(&machine, 0x71), [0x20], "the century");
}

/// A Linux guest with this command line.
fn with_command_line(cmdline: &str) -> Machine {
    let json = json!({"payload": {"cmdline": cmdline}, "serial": {"mode": "Null"}, "console": {"mode": "Null"}});
    Machine::boot(IDLE, &json.to_string())
}

/// The ports of configuration space, the timer and the clock that the machine has, and its MP table.
fn legacy(machine: &Machine) -> LegacyHardware {
    write(machine, 0xcf8, &0x8000_0000_u32.to_le_bytes());
    write(machine, 0x70, &[0x0d]);
    LegacyHardware {
        config_ports: port(machine, 0xcfc) == 0x0d57_8086_u32.to_le_bytes(),
        mp_table: machine.read(0xf_ffe0) == u32::from_le_bytes(*b"_MP_"),
        pm_timer: port(machine, 0x608) != [0xff; 4],
        clock: port(machine, 0x71) == [0x80],
    }
}

#[test]
fn a_kernel_has_the_hardware_that_its_command_line_needs() {
    for cmdline in ["quiet", "quiet acpi=off", "pci=nommconf", "nopv"] {
        assert_eq!(legacy(&with_command_line(cmdline)), LegacyHardware::of_linux(cmdline), "{cmdline}");
    }
    let json = r#"{"platform":{"legacy_hardware":true},"serial":{"mode":"Null"},"console":{"mode":"Null"}}"#;
    assert_eq!(legacy(&Machine::boot(IDLE, json)), LegacyHardware::ALL);
}

#[test]
fn kvm_hyperv_brings_a_kernel_the_timer_and_the_clock() {
    let mut machine = with_command_line("pci=nommconf");
    machine.vm.cpus.kvm_hyperv = true;
    machine.vm.open_payload().unwrap();
    assert_eq!(machine.vm.legacy, LegacyHardware { mp_table: false, ..LegacyHardware::ALL });
    machine.vm.cpus.kvm_hyperv = false;
    machine.vm.open_payload().unwrap();
    assert_eq!(machine.vm.legacy, LegacyHardware::of_linux("pci=nommconf"));
}

#[test]
fn a_guest_keeps_its_legacy_hardware_until_it_restarts() {
    for (source, target) in [("acpi=off", "quiet"), ("quiet", "acpi=off nopv"), ("nopv", "pci=nommconf")] {
        let mut machine = with_command_line(source);
        let mut config = machine.planned().config().clone();
        config.payload.cmdline = Some(target.to_string());
        machine.plan(config);
        let mut machine = machine.moved().moved();
        assert_eq!(legacy(&machine), LegacyHardware::of_linux(source), "{source}");
        machine.vm.reset().unwrap();
        assert_eq!(legacy(&machine), LegacyHardware::of_linux(target), "{target}");
    }
}

/// Earlier versions saved no such hardware for kernels, because these had none.
#[test]
fn a_state_saved_before_has_the_hardware_that_there_was() {
    let mut machine = with_command_line("acpi=off");
    machine.vm.pause();
    let mut state = machine.vm.save_machine().unwrap();
    assert!(serde_json::to_string(&state).unwrap().contains("legacy"));
    state.legacy = None;
    let bytes = serde_json::to_vec(&state).unwrap();
    assert!(!String::from_utf8_lossy(&bytes).contains("legacy"));
    let mut machine = machine.moved_paused(&bytes);
    assert_same(&machine.save(), &bytes);
    machine.vm.resume().unwrap();
    let without_ports = LegacyHardware { mp_table: true, ..LegacyHardware::NONE };
    assert_eq!(legacy(&machine), without_ports, "the table is the guest's memory");
    // The state of a common guest has no such fields.
    let mut common = with_command_line("quiet");
    common.vm.pause();
    assert_eq!(common.vm.save_machine().unwrap().legacy, None);
}

#[test]
fn a_state_of_impossible_legacy_hardware_is_refused() {
    let mut machine = with_command_line("pci=nommconf");
    machine.vm.pause();
    let state = machine.vm.save_machine().unwrap();
    let refused = |change: &dyn Fn(&mut MachineState)| {
        let mut wrong = state.clone();
        change(&mut wrong);
        matches!(machine.try_restored(&wrong), Err(RestoreError::Value("the ports of firmware")))
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|state| state.firmware = state.legacy.as_ref().map(|legacy| legacy.ports.clone())));
    let legacy = |state: &mut MachineState, change: &dyn Fn(&mut LegacyState)| change(state.legacy.as_mut().unwrap());
    assert!(refused(&|state| legacy(state, &|legacy| legacy.hardware = LegacyHardware::NONE)));
    assert!(refused(&|state| legacy(state, &|legacy| legacy.ports.rtc_index = 1)), "there is no clock");
    assert!(refused(&|state| legacy(state, &|legacy| legacy.ports.config_address = 1)));
}

/// The inputs of both PICs that are masked (`struct kvm_pic_state`).
fn masked(machine: &mut Machine) -> [u8; 2] {
    machine.vm.pause();
    let state = machine.vm.save_machine().unwrap();
    machine.vm.resume().unwrap();
    [0, 1].map(|pic| state.irqchip.chips[pic].bytes()[10])
}

#[test]
fn the_pics_are_masked_until_a_guest_programs_them() {
    let mut machine = Machine::boot(IDLE, PLAIN);
    assert_eq!(masked(&mut machine), [0xff; 2]);
    machine.vm.reset().unwrap();
    assert_eq!(masked(&mut machine), [0xff; 2]);
    // Vectors from 0x30 on, and input 4 alone: mov al, value; out port, al
    let program = [(0x20, 0x11), (0x21, 0x30), (0x21, 4), (0x21, 1), (0x21, 0xef)];
    let code: Vec<u8> = program.iter().flat_map(|(port, value)| [0xb0, *value, 0xe6, *port]).collect();
    // inc dword [COUNT]; cli; hlt; jmp back to hlt
    let code = [&code[..], &[0xff, 0x05], &(COUNT as u32).to_le_bytes(), IDLE].concat();
    let machine = Machine::boot(&code, PLAIN);
    machine.counts_beyond(0);
    assert_eq!(masked(&mut machine.moved()), [0xef, 0xff]);
}

#[test]
fn a_guest_continues_without_the_file_that_it_was_booted_from() {
    let mut machine = Machine::boot(IDLE, PLAIN);
    machine.vm.pause();
    let before = machine.save();
    let kernel = machine.planned().config().payload.kernel.clone().unwrap();
    let contents = std::fs::read(&kernel).unwrap();
    std::fs::remove_file(&kernel).unwrap();
    let mut machine = machine.moved_paused(&before);
    assert_same(&machine.save(), &before);
    machine.vm.resume().unwrap();
    let error = machine.vm.reset().unwrap_err().to_string();
    assert!(error.starts_with("--kernel "), "{error}");
    std::fs::write(&kernel, contents).unwrap();
    machine.vm.reset().unwrap();
}

#[test]
fn the_guests_time_advances_by_the_time_that_passed() {
    // again: rdtsc; mov [COUNT + 16], eax; mov [COUNT + 20], edx; inc dword [COUNT]; jmp again
    let at = |offset: u64| ((COUNT + offset) as u32).to_le_bytes();
    let code =
        [&[0x0f, 0x31, 0xa3][..], &at(16), &[0x89, 0x15], &at(20), &[0xff, 0x05], &at(0), &[0xeb, 0xeb]].concat();
    let mut machine = Machine::boot(&code, PLAIN);
    let counter = |machine: &Machine| u64::from(machine.read(COUNT + 20)) << 32 | u64::from(machine.read(COUNT + 16));
    machine.counts_beyond(100);
    for _ in 0..3 {
        // The guest's last reading may be as old as this.
        let earliest = Instant::now();
        machine.counts_beyond(machine.read(COUNT) + 1);
        machine.vm.pause();
        let (before, moment) = (counter(&machine), Instant::now());
        let state = machine.vm.save_machine().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let mut next = machine.moved_paused(&serde_json::to_vec(&state).unwrap());
        let count = next.read(COUNT);
        next.vm.resume().unwrap();
        next.counts_beyond(count);
        next.vm.pause();
        let (after, elapsed) = (counter(&next), earliest.elapsed());
        let khz = u128::from(state.clock.tsc_khz);
        let ticks =
            |millis: u64, time: Duration| (millis * 1_000_000 + time.as_nanos() as u64) as u128 * khz / 1_000_000;
        assert!(u128::from(after - before) >= ticks(200, Duration::ZERO), "{before} {after}");
        assert!(u128::from(after - before) <= ticks(100, elapsed), "{before} {after} {elapsed:?}");
        let clock = next.vm.save_machine().unwrap().clock;
        let went = Duration::from_nanos(clock.kvmclock - state.clock.kvmclock);
        let range = Duration::from_millis(200)..moment.elapsed() + Duration::from_millis(100);
        assert!(range.contains(&went), "{went:?}");
        next.vm.resume().unwrap();
        machine = next;
    }
}

#[test]
fn a_vm_that_cannot_be_saved_is_refused_by_its_option() {
    let folder = tempfile::tempdir().unwrap();
    let pmem = json!({"id": "p", "file": folder.path(), "size": 2 << 20});
    let config = json!({"serial": {"mode": "Null"}, "console": {"mode": "Null"}, "pmem": [pmem]});
    let mut machine = Machine::boot(IDLE, &config.to_string());
    machine.vm.pause();
    let told = machine.vm.save_machine().unwrap_err().to_string();
    assert!(told.starts_with("--pmem id=p: file= is a folder: ") && !told.contains('\n'), "{told}");
    machine.vm.resume().unwrap();
}

#[test]
fn a_machine_that_was_restored_is_like_one_that_was_booted() {
    let mut machine = Machine::boot(IDLE, PLAIN).moved();
    let mut id = [0; 4];
    machine.vm.devices.bus().read(crate::arch::x86_64::layout::ECAM.start + (1 << 15), &mut id);
    assert_eq!(u32::from_le_bytes(id), 0x1043_1af4, "the console, in slot 1");
    machine.vm.reset().unwrap();
    machine.vm.pause();
    machine.vm.resume().unwrap();
    assert!(machine.vm.remove_unplugged().is_empty());
    assert!(matches!(machine.vm.save_machine(), Err(SaveError::NotPaused)));
}
