//! States that no machine can be in.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::guest::Machine;
use crate::machine_state::MachineState;
use crate::machine_state::compatibility::CpuidLeaf;

/// `cli; hlt; jmp back to hlt`
const IDLE: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

/// A machine with something of everything.
fn machine() -> Machine {
    let json = r#"{
        "cpus": {"boot_vcpus": 2, "max_vcpus": 4},
        "serial": {"mode": "Null"}, "console": {"mode": "Null"},
        "balloon": {"size": 0}, "watchdog": true, "pvpanic": true, "guest_channel": true,
        "net": [{"id": "pf0", "switch": "veb", "sriov_vfs": 2, "mac": "02:00:00:00:00:10"}]
    }"#;
    let mut machine = Machine::boot(IDLE, json);
    let pf = machine.address("pf0").rid.to_bits();
    let sriov = machine.sriov(pf);
    machine.config_write(pf, sriov + 0x10, &[2, 0]);
    machine.config_write(pf, sriov + 8, &[9, 0]);
    machine.config_write(0x100, 4, &[4, 0]);
    machine.vm.press_power_button();
    machine.vm.pause();
    machine
}

/// Values to try in place of `value`.
fn others(value: &Value) -> Vec<Value> {
    let mut others = vec![Value::Null, json!(-1), json!("x"), json!([])];
    match value {
        Value::Number(number) => {
            let number = number.as_u64().unwrap_or(0);
            let numbers = [0, number.wrapping_add(1), 0xffff_ffff, u64::MAX];
            others.extend(numbers.map(Value::from));
        }
        Value::Bool(is) => others.push(Value::Bool(!is)),
        Value::String(text) => {
            // Blobs of all ones, of another length, and of nothing.
            if let Some(len) = text.split(' ').next().and_then(|len| len.parse::<usize>().ok()) {
                let ones = |len: usize| json!(format!("{len} 0:{}", "ff".repeat(len)));
                others.extend([ones(len), ones(len + 16), ones(16), json!("0"), json!("65536")]);
            }
        }
        Value::Array(items) => {
            if let Some(first) = items.first() {
                others.push([items.clone(), vec![first.clone()]].concat().into());
                others.push(items[1..].to_vec().into());
                others.push(vec![first.clone(); 3000].into());
            }
        }
        _ => {}
    }
    others
}

/// The paths of all values, without those that differ from others only in their position in a list.
fn paths(value: &Value, path: &str, kind: &str, seen: &mut HashSet<String>, found: &mut Vec<String>) {
    if !seen.insert(kind.to_string()) {
        return;
    }
    found.push(path.to_string());
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                paths(field, &format!("{path}/{name}"), &format!("{kind}/{name}"), seen, found);
            }
        }
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                // For numbers in a row, such as registers, only the first ones.
                let which = if item.is_number() { n.min(2) } else { 0 };
                paths(item, &format!("{path}/{n}"), &format!("{kind}/{which}"), seen, found);
            }
        }
        _ => {}
    }
}

#[test]
fn any_altered_state_value_is_refused_in_one_line_or_valid() {
    let machine = machine();
    let state: Value = serde_json::from_slice(&machine.save()).unwrap();
    let mut found = Vec::new();
    paths(&state, "", "", &mut HashSet::new(), &mut found);
    assert!(found.len() > 100, "{}", found.len());
    let (mut refused, mut taken) = (0, 0);
    for path in &found {
        for other in others(state.pointer(path).unwrap()) {
            let mut wrong = state.clone();
            *wrong.pointer_mut(path).unwrap() = other.clone();
            let Ok(wrong) = serde_json::from_value::<MachineState>(wrong) else {
                refused += 1;
                continue;
            };
            match machine.try_restored(&wrong) {
                Err(error) => {
                    let line = error.to_string();
                    assert!(!line.contains('\n') && line.len() < 400, "{path} = {other}: {line}");
                    refused += 1;
                }
                // An accepted state can be saved again.
                Ok(machine) => {
                    machine.save();
                    taken += 1;
                }
            }
        }
    }
    assert!(refused > 500 && taken > 50, "{refused} refused, {taken} taken");
}

/// Later versions read a state of version 1, and write the same bytes.
#[test]
fn a_state_of_version_1_is_read() {
    let golden = include_str!("golden/machine_state-1.json").trim_end();
    let state: MachineState = serde_json::from_str(golden).unwrap();
    assert_eq!(serde_json::to_string(&state).unwrap(), golden);
}

#[test]
fn a_state_that_ends_early_is_refused_at_each_byte() {
    // A small state: it is parsed once for each of its bytes.
    let mut state = machine().vm.save_machine().unwrap();
    state.vcpus.truncate(1);
    state.vcpus[0].msrs.truncate(2);
    state.cpuid.truncate(2);
    state.devices.truncate(1);
    let state = serde_json::to_vec(&state).unwrap();
    assert!(serde_json::from_slice::<MachineState>(&state).is_ok());
    for len in 0..state.len() {
        assert!(serde_json::from_slice::<MachineState>(&state[..len]).is_err(), "{len}");
    }
    let further = [&state[..state.len() - 1], br#","more":1}"#].concat();
    assert!(serde_json::from_slice::<MachineState>(&further).is_err());
}

#[test]
fn many_regions_of_memory_are_refused_before_they_are_compared() {
    let machine = machine();
    let state = machine.vm.save_machine().unwrap();
    let refused = |change: &dyn Fn(&mut MachineState)| {
        let mut other = state.clone();
        change(&mut other);
        let began = Instant::now();
        let said = machine.try_restored(&other).map(drop).unwrap_err().to_string();
        assert_eq!(said, "saved state with an impossible value in the number of regions of memory");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    };
    // 10^12 comparisons, if each is compared with each.
    let many = || (1..1_000_000).map(|n| (n << 40, (n << 40) + 1));
    refused(&|state| {
        state.layout.regions = many().map(|(start, _)| (start, 4096)).collect();
        state.events.memory.regions = many().collect();
    });
    refused(&|state| state.events.memory.regions = many().take(9).collect());
    // All of them before the last restart; each would be mapped.
    refused(&|state| {
        state.layout.plugged = (0, u64::MAX);
        state.layout.regions = many().map(|(start, _)| (start, 4096)).collect();
    });
}

#[test]
fn a_state_of_another_machine_is_refused_by_what_differs() {
    let machine = machine();
    let state = machine.vm.save_machine().unwrap();
    let refusal = |change: &dyn Fn(&mut MachineState)| {
        let mut other = state.clone();
        change(&mut other);
        machine.try_restored(&other).map(drop).unwrap_err().to_string()
    };
    assert_eq!(refusal(&|state| state.version = 9), "saved state of version 9; this program reads version 1");
    let told = refusal(&|state| state.devices[0].id = "other".to_string());
    assert!(told.starts_with("saved state of a machine with devices other; the configuration has instead "), "{told}");
    let told = refusal(&|state| state.serial = None);
    assert!(
        told.starts_with("saved state of a machine with no serial port; the configuration has a serial port"),
        "{told}"
    );
    let told = refusal(&|state| state.layout.memory_at_boot *= 2);
    assert!(told.starts_with("saved state of a machine with 8M of memory"), "{told}");
    let told = refusal(&|state| state.layout.address_bits = 52);
    assert!(told.contains("it has 52 bits of physical addresses, and this host has "), "{told}");
    let told = refusal(&|state| state.clock.tsc_khz = 0);
    assert!(told.contains("its time stamp counter has 0 kHz, and this host's has "), "{told}");
    let told = refusal(&|state| state.vcpus[1].msrs.push((0xdead_beef, 5)));
    assert!(told.ends_with("model-specific register 0xdeadbeef cannot be set to 0x5 on this host"), "{told}");
    let is_seventh = |leaf: &&CpuidLeaf| (leaf.leaf, leaf.subleaf) == (7, 0);
    let bit = state.cpuid.iter().find(is_seventh).unwrap().registers[1].trailing_ones();
    let told = refusal(&|state| {
        state.cpuid.iter_mut().find(|leaf| is_seventh(&&**leaf)).unwrap().registers[1] |= 1 << bit;
    });
    let expected = format!("saved state of a guest with another CPU: leaf 0x7.0 EBX bit {bit}");
    assert!(told.starts_with(&expected) && told.ends_with(" is not on this host"), "{told}");
    assert_eq!(
        refusal(&|state| drop(state.vcpus.pop())),
        "saved state with an impossible value in the numbers of vCPUs"
    );
    let told = refusal(&|state| state.devices[0].slot = state.devices[1].slot);
    assert!(told.contains("slot"), "{told}");
    // The unchanged state is still accepted.
    assert!(machine.try_restored(&state).is_ok());
}
