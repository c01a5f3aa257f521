//! NICs on further root buses of segment 0 (`--net numa=`), before and after a move.

use super::guest::{Machine, assert_same};
use crate::acpi::event_state::SlotsState;
use crate::config::{NetConfig, PlannedVm};
use crate::devices::opened_before::OpenedBefore;
use crate::machine_state::MachineState;
use crate::vm::error::VmError;

/// `cli; hlt; jmp back to hlt`
const IDLE: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];
/// The first port of the slots of root bus 0x40, after those of 96 segments and 63 other buses.
const SLOTS: u16 = 16 * (96 + 63);
/// The register of released devices.
const EJECT: u16 = 8;

/// A machine of two nodes, the first with segment 0, with these NICs.
fn machine(nets: &str) -> Machine {
    let numa = r#"[{"guest_numa_id":0,"pci_segments":[0]},{"guest_numa_id":1}]"#;
    let json = r#"{"serial":{"mode":"Null"},"console":{"mode":"Null"},"numa":"#.to_string();
    Machine::boot(IDLE, &format!(r#"{json}{numa},"net":{nets}}}"#))
}

fn nets() -> String {
    format!("[{},{}]", net("a", 300, ""), net("b", 4, r#","numa":1"#))
}

fn net(id: &str, vfs: u16, further: &str) -> String {
    format!(r#"{{"id":"{id}","switch":"veb","sriov_vfs":{vfs}{further}}}"#)
}

/// Adds a NIC to the running machine.
fn add(machine: &mut Machine, net: &str) -> Result<String, VmError> {
    let before = machine.planned().clone();
    let mut config = before.config().clone();
    config.net.push(serde_json::from_str::<NetConfig>(net).unwrap());
    let planned = PlannedVm::new(config.clone()).unwrap();
    let address = machine.vm.add(planned.added_to(before.plan()).unwrap(), OpenedBefore::Nothing)?;
    machine.plan(planned.config().clone());
    Ok(address.to_string())
}

/// The address in the first 64-bit VF BAR from `at` on.
fn bar(machine: &Machine, pf: u16, at: u64) -> u64 {
    u64::from(machine.config_read(pf, at + 4)) << 32 | u64::from(machine.config_read(pf, at) & !0xf)
}

#[test]
fn nics_on_two_root_buses_have_addresses_of_their_own() {
    let machine = machine(&nets());
    assert_eq!(["a", "b"].map(|id| machine.address(id).to_string()), ["0000:00:02.0", "0000:40:01.0"]);
    let vf_buses = ["a", "b"].map(|id| machine.vm.devices.find(id).unwrap().placement().first_vf_bus());
    assert_eq!(vf_buses, [Some(1), Some(0x41)]);
    let shares = machine.vm.devices.apertures()[0].split_among_roots(1);
    for (pf, share) in [(0x10, &shares[0]), (0x4008, &shares[1])] {
        let vf_bar = bar(&machine, pf, machine.sriov(pf) + 0x2c);
        for address in [bar(&machine, pf, 0x18), vf_bar] {
            assert!(share.mem32.contains(&address) || share.mem64.contains(&address), "{pf:x}: {address:x}");
        }
        // VF Enable and VF MSE, with two VFs.
        machine.config_write(pf, machine.sriov(pf) + 0x10, &[2, 0]);
        machine.config_write(pf, machine.sriov(pf) + 8, &[9, 0]);
    }
    let ids = [0x100, 0x101, 0x102, 0x4100, 0x4101, 0x4102].map(|vf| machine.config_read(vf, 0x2c) != u32::MAX);
    assert_eq!(ids, [true, true, false, true, true, false]);
    // The root bus has no host bridge function, and neither has a bus before it.
    assert_eq!([0x4000, 0x3f08, 0x6008].map(|rid| machine.config_read(rid, 0)), [u32::MAX; 3]);
}

#[test]
fn a_moved_machine_keeps_its_root_buses_and_their_news() {
    let mut machine = machine(&nets());
    assert_eq!(add(&mut machine, &net("c", 1, r#","numa":1"#)).unwrap(), "0000:40:02.0");
    machine.vm.unplug("b");
    machine.vm.pause();
    let before = machine.save();
    let state: MachineState = serde_json::from_slice(&before).unwrap();
    let news = SlotsState { segment: 0, bus: 0x40, plugged: 1 << 2, unplugged: 1 << 1, ejected: 0 };
    assert_eq!(state.events.slots, [news]);
    assert_eq!(state.devices.iter().filter(|device| device.bus == 0x40).count(), 2);
    let mut after = machine.moved_paused(&before);
    assert_same(&after.save(), &before);
    assert_eq!(["b", "c"].map(|id| after.address(id).to_string()), ["0000:40:01.0", "0000:40:02.0"]);
    // The guest releases it, and not the one in the same slot of bus 0.
    after.vm.ged.write_slots(SLOTS + EJECT, 1 << 1);
    let removed = after.vm.take_ejected();
    assert_eq!(removed.iter().map(|removed| removed.id.as_str()).collect::<Vec<_>>(), ["b"]);
    assert_eq!(after.address("__console").to_string(), "0000:00:01.0");
}

#[test]
fn a_state_of_a_machine_without_root_buses_says_nothing_of_them() {
    let mut machine = machine(&format!("[{}]", net("a", 2, r#","numa":0"#)));
    machine.vm.unplug("a");
    machine.vm.pause();
    let state: serde_json::Value = serde_json::from_slice(&machine.save()).unwrap();
    let parts = [&state["devices"], &state["events"]["slots"]];
    assert!(parts.iter().all(|part| !part.as_array().unwrap().is_empty() && !part.to_string().contains("\"bus\"")));
}

#[test]
fn a_root_bus_stays_when_its_last_nic_is_removed() {
    let mut machine = machine(&nets());
    machine.vm.unplug("b");
    machine.vm.ged.write_slots(SLOTS + EJECT, 1 << 1);
    assert_eq!(machine.vm.take_ejected().len(), 1);
    let mut config = machine.planned().config().clone();
    config.net.retain(|net| net.id.as_deref() != Some("b"));
    machine.plan(config);
    machine.vm.pause();
    let before = machine.save();
    let mut after = machine.moved_paused(&before);
    assert_same(&after.save(), &before);
    assert_eq!(after.vm.devices.roots(), machine.vm.devices.roots());
    // The guest knows the root bus from its tables: a NIC can be added to it again.
    assert_eq!(add(&mut after, &net("c", 1, r#","numa":1"#)).unwrap(), "0000:40:01.0");
    let mut state: MachineState = serde_json::from_slice(&before).unwrap();
    assert_eq!(state.empty_root_buses, [0x40]);
    state.empty_root_buses = vec![0x40, 0x60];
    let refused = machine.try_restored(&state).err().unwrap().to_string();
    assert_eq!(
        refused,
        "saved state of a machine with root buses 64, 96; the configuration has 64 (--numa); give the configuration \
         that was saved"
    );
}

#[test]
fn a_state_of_another_root_bus_is_refused() {
    let mut machine = machine(&nets());
    machine.vm.pause();
    let mut state: MachineState = serde_json::from_slice(&machine.save()).unwrap();
    let device = state.devices.iter_mut().find(|device| device.id == "b").unwrap();
    device.bus = 0;
    let refused = machine.try_restored(&state).err().unwrap().to_string();
    assert!(refused.contains("--net id=b on root bus 0") && refused.contains("root bus 64 (numa=)"), "{refused}");
}

#[test]
fn a_guest_without_root_buses_gets_no_nic_on_one() {
    let mut machine = machine(&format!("[{}]", net("a", 2, "")));
    let refused = add(&mut machine, &net("b", 1, r#","numa":1"#)).unwrap_err().to_string();
    assert_eq!(
        refused,
        "--net id=b,numa=1: the guest has no root bus of this node, because the VM was started without a NIC that has \
         numa=; start it with one, or leave numa out"
    );
    assert_eq!(add(&mut machine, &net("b", 1, r#","numa":0"#)).unwrap(), "0000:00:04.0");
}
