//! Saved states of a machine with any changes.
//!
//! A state is text that is refused, or that is the same when written again. Its parts are restored or refused as a
//! whole: a restored part is saved as the same state, and a refused one has changed nothing. CPUs are compared and
//! clocks continue for any numbers.

use std::cell::RefCell;
use std::sync::Arc;

use machine::acpi::event_state::{EventDeviceState, MemoryHotplugState, SlotsState, VcpuHotplugState};
use machine::acpi::ged::GenericEventDevice;
use serde_json::Value;
use vmm::config::{ConsoleConfig, ConsoleMode};
use vmm::machine_state::blob::Blob;
use vmm::machine_state::clock::ClockState;
use vmm::machine_state::compatibility::{CpuidLeaf, check};
use vmm::machine_state::irqchip::IrqchipState;
use vmm::machine_state::vcpu_state::VcpuState;
use vmm::machine_state::version::MACHINE_STATE_VERSION;
use vmm::machine_state::{LayoutState, MachineState, SavedDevice};
use vmm::serial::{SerialConsole, SerialState};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::functions::saved_state::{change, place_of};
use crate::input::{Input, Seed};

/// The most vCPUs of the machine.
const MAX_VCPUS: u8 = 8;

thread_local! {
    static STATE: RefCell<Value> = serde_json::to_value(state()).expect("a state is JSON").into();
    static SERIAL: SerialConsole = SerialConsole::open(&ConsoleConfig::new(ConsoleMode::Null))
        .expect("nothing is opened")
        .expect("there is a port");
}

/// A machine with pending changes of many kinds.
fn state() -> MachineState {
    let blob = |len: usize| Blob::new((0..len).map(|n| if n % 40 == 7 { n as u8 } else { 0 }).collect());
    let vcpu = |id| VcpuState {
        id,
        mp_state: u32::from(id),
        regs: blob(144),
        sregs: blob(312),
        pdptrs: (id == 1).then_some([1, 2, 3, 4]),
        xsave: blob(4096),
        xcrs: Some(blob(392)),
        debug: blob(128),
        lapic: blob(1024),
        tsc_ahead: 0,
        msrs: vec![(0x277, 7), (0x6e0, 1 << 40)],
        nested: Some(blob(128)),
        events: blob(64),
    };
    let leaf = |leaf, subleaf| CpuidLeaf { leaf, subleaf, flags: 1, registers: [7, 1 << 5, 3, 1 << 4] };
    MachineState {
        told: Vec::new(),
        guest_vfs: Vec::new(),
        empty_root_buses: vec![0x40, 0x60],
        version: MACHINE_STATE_VERSION,
        layout: LayoutState {
            address_bits: 46,
            memory_at_boot: 512 << 20,
            regions: vec![(0, 512 << 20), (4 << 30, 128 << 20)],
            plugged: (4 << 30, 4 << 30),
            mmio64: (8 << 30, 1 << 45),
        },
        cpuid: vec![leaf(0, 0), leaf(1, 0), leaf(7, 0), leaf(7, 1), leaf(0x8000_0008, 0)],
        clock: ClockState { kvmclock: 1 << 40, realtime: Some(1 << 60), tsc: 1 << 50, tsc_khz: 2_000_000, pm_timer: 9 },
        irqchip: IrqchipState { chips: [blob(520), blob(520), blob(520)] },
        vcpus: (0..3).map(vcpu).collect(),
        wanted_vcpus: 2,
        wanted_memory: 512 << 20,
        events: EventDeviceState {
            events: 5,
            slots: vec![SlotsState { segment: 0, bus: 64, plugged: 2, unplugged: 4, ejected: 8 }],
            vcpus: VcpuHotplugState {
                present: vec![0, 1],
                added: vec![1],
                asked: vec![1],
                leaving: vec![1],
                ejected: vec![2],
            },
            memory: MemoryHotplugState { regions: vec![(4 << 30, (4 << 30) + (128 << 20))], added: 1 },
        },
        serial: Some(SerialState { input: b"yes".to_vec(), interrupt_enable: 3, ..SerialState::default() }),
        consoles: Default::default(),
        firmware: None,
        legacy: None,
        devices: vec![SavedDevice {
            id: "_disk0".to_string(),
            segment: 0,
            bus: 64,
            slot: 3,
            first_vf_bus: Some(1),
            leaving: true,
            state: None,
        }],
        stop: None,
        triple_faults: 3,
    }
}

/// Runs the changes of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns true if the event device was restored; `None` if the input is not a state.
fn run_to_end(input: &[u8]) -> Option<bool> {
    let mut input = Input::new(input);
    let cut = usize::from(input.u16());
    let mut value = STATE.with_borrow(Value::clone);
    while !input.is_empty() {
        change(&mut value, &mut input);
    }
    let text = serde_json::to_vec(&value).expect("a value is JSON");
    if cut > 0 {
        let part = text.get(..cut.min(text.len() - 1)).unwrap_or_default();
        assert!(serde_json::from_slice::<MachineState>(part).is_err(), "a part of a state is none");
    }
    let state: MachineState = serde_json::from_slice(&text).ok()?;
    let again = serde_json::to_vec(&state).expect("a state is JSON");
    assert_eq!(serde_json::from_slice::<MachineState>(&again).expect("its own bytes"), state);
    let host = STATE.with_borrow(|value| serde_json::from_value::<MachineState>(value.clone())).expect("a state").cpuid;
    if let Err(error) = check(&state.cpuid, &host) {
        let line = error.to_string();
        assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
    }
    for now in [0, state.clock.kvmclock, state.clock.kvmclock.saturating_add(1_000), u64::MAX] {
        let _ = state.clock.tsc_at(now);
    }
    if let Some(serial) = &state.serial {
        restore_serial(serial);
    }
    Some(restore_events(&state.events))
}

fn restore_serial(state: &SerialState) {
    SERIAL.with(|serial| {
        let port = serial.port();
        port.reset();
        let before = port.save();
        let expected = if port.restore(state) { state } else { &before };
        assert_eq!(port.save(), *expected);
        assert!(port.interrupt().read().is_err(), "it interrupts when it is reminded");
        port.remind();
        (0..8).for_each(|offset| _ = port.read(offset));
    });
}

fn restore_events(state: &EventDeviceState) -> bool {
    let machine = Arc::new(EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
    let device = GenericEventDevice::new(Arc::clone(&machine)).expect("an eventfd");
    let before = device.save();
    let is_restored = device.restore(state, MAX_VCPUS);
    let after = device.save();
    if !is_restored {
        assert_eq!(after, before);
        return false;
    }
    // Slots without pending events, and the order of the others, are not part of the state.
    let vcpus = device.running_vcpus();
    assert!(vcpus.first() == Some(&0) && vcpus.iter().all(|id| *id < MAX_VCPUS), "{vcpus:?}");
    assert_eq!((after.events, &after.vcpus, &after.memory), (state.events, &state.vcpus, &state.memory));
    let has_released = !state.vcpus.ejected.is_empty() || after.slots.iter().any(|slots| slots.ejected != 0);
    // A slot may occur twice.
    assert!(machine.read().is_ok() || !has_released);
    assert_eq!(device.remind(), state.events != 0);
    let mut ejected = device.take_ejected().into_iter();
    assert!(ejected.all(|at| at.segment < 96 && (at.segment == 0 || at.rid.bus() == 0) && at.rid.function() == 0));
    true
}

/// Seeds: the unchanged state, a truncated one, and values that no machine can have.
pub fn seeds() -> Vec<Vec<u8>> {
    let number = |at: &str| STATE.with_borrow(|state| place_of(state, at));
    let changed = |kind: u8, at: &str, value: u32| {
        let seed = Seed::new().with([0, 0]).with([kind]).with(number(at).to_le_bytes());
        seed.with([0, 0]).with(value.to_le_bytes()).done()
    };
    // Changes of `saved_state`: set, flip a bit, set to null, remove.
    vec![
        Seed::new().with([0, 0]).done(),
        Seed::new().with([77, 1]).done(),
        changed(0, "/events/events", 0xff),
        changed(0, "/events/vcpus/present/0", 7),
        changed(0, "/events/vcpus/ejected/0", 9),
        changed(0, "/events/memory/added", 2),
        changed(0, "/events/slots/0/segment", 96),
        changed(1, "/cpuid/2/registers/1", 16),
        changed(0, "/clock/tsc_khz", 0),
        changed(2, "/serial", 0),
        changed(0, "/serial/input/0", 256),
        changed(3, "/version", 0),
        changed(0, "/vcpus/0/regs", 1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_restored_and_refused() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let (restored, refused) = (Some(true), Some(false));
        let events = [restored, restored, refused, refused, refused, refused, refused];
        assert_eq!(done, [&events[..], &[restored, restored, restored, None, None, None]].concat());
    }
}
