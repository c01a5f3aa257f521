//! Devices of machines that are saved and restored at any moment.

use pci::VfIndex;

use super::driver::Driver;
use super::guest::{Machine, assert_same};
use crate::config::{NetConfig, PlannedVm};
use crate::devices::opened_before::OpenedBefore;

/// `cli; hlt; jmp back to hlt`
const IDLE: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];
/// Address of drivers' rings.
const RINGS: u64 = 0x40_0000;
const RINGS_OF_ONE: u64 = 0x4_0000;
/// Address of buffers.
const BUFFERS: u64 = 0x60_0000;

fn with(further: &str) -> String {
    format!(r#"{{"serial":{{"mode":"Null"}},"console":{{"mode":"Null"}},{further}}}"#)
}

/// A machine with a PF and 4 VFs on a switch.
fn nic() -> String {
    with(r#""net":[{"id":"pf0","switch":"veb","sriov_vfs":4,"mac":"02:00:00:00:00:10"}]"#)
}

/// All of the configuration space of a PF and its VFs, as a guest reads it.
fn image(machine: &Machine, pf: u16) -> Vec<u32> {
    let functions = std::iter::once(pf).chain(0x100..0x104);
    functions
        .flat_map(|rid| (0..0x400).map(move |n| (rid, 4 * n)))
        .map(|(rid, at)| machine.config_read(rid, at))
        .collect()
}

/// U4: enabled VFs stay enabled, and none is reset, at whatever moment the state is saved.
#[test]
fn save_between_any_steps_of_vf_enabling_restores_exactly() {
    let mut machine = Machine::boot(IDLE, &nic());
    machine.vm.pause();
    let pf = machine.address("pf0").rid.to_bits();
    let (sriov, vf) = (machine.sriov(pf), 0x100);
    let [power, pcie, msix] = [1, 0x10, 0x11].map(|id| machine.capability(pf, id).unwrap());
    let [vf_pcie, vf_msix] = [0x10, 0x11].map(|id| {
        machine.config_write(pf, sriov + 0x10, &[1, 0]);
        machine.config_write(pf, sriov + 8, &[1, 0]);
        let at = machine.capability(vf, id).unwrap();
        machine.config_write(pf, sriov + 8, &[0, 0]);
        at
    });
    let bar = machine.config_read(pf, 0x1c);
    let vf_bar = machine.config_read(pf, sriov + 0x30);
    let steps: Vec<(u16, u64, Vec<u8>)> = vec![
        (pf, 4, vec![6, 0]),
        // The PF's registers move up by 4 GiB.
        (pf, 4, vec![0, 0]),
        (pf, 0x1c, (bar + 1).to_le_bytes().to_vec()),
        (pf, 4, vec![6, 0]),
        (pf, msix + 2, vec![0, 0x80]),
        (pf, sriov + 0x10, vec![3, 0]),
        (pf, sriov + 8, vec![1, 0]),
        (pf, sriov + 8, vec![9, 0]),
        (vf, 4, vec![4, 0]),
        (vf + 2, 4, vec![4, 0]),
        (vf, vf_msix + 2, vec![0, 0x80]),
        // The PF sleeps and wakes.
        (pf, power + 4, vec![3, 0]),
        (pf, power + 4, vec![0, 0]),
        // VF BARs move.
        (pf, sriov + 8, vec![1, 0]),
        (pf, sriov + 0x30, (vf_bar + 1).to_le_bytes().to_vec()),
        (pf, sriov + 8, vec![9, 0]),
        // A function level reset of a VF, and the register value before it.
        (vf + 2, vf_pcie + 9, vec![0x80]),
        (vf + 2, 4, vec![4, 0]),
        (pf, sriov + 8, vec![0, 0]),
        (pf, sriov + 0x10, vec![4, 0]),
        (pf, sriov + 8, vec![9, 0]),
        // An FLR of the PF, which disables its VFs.
        (pf, pcie + 9, vec![0x80]),
        (pf, 4, vec![6, 0]),
    ];
    let mut had_vfs = 0;
    for (n, (rid, at, data)) in steps.iter().enumerate() {
        machine.config_write(*rid, *at, data);
        let before = machine.save();
        let after = machine.moved_paused(&before);
        assert_same(&after.save(), &before);
        assert!(image(&after, pf) == image(&machine, pf), "step {n}");
        let windows = |machine: &Machine| machine.vm.devices.find("pf0").unwrap().slot().windows();
        assert_eq!(windows(&after), windows(&machine), "step {n}");
        had_vfs += usize::from(after.config_read(vf, 0x34) != u32::MAX);
        machine = after;
    }
    assert!(had_vfs > 8, "{had_vfs}");
    machine.vm.resume().unwrap();
}

/// A frame from the PF to a VF: both drivers keep their rings, and the switch has both addresses.
#[test]
fn a_pf_and_its_vf_continue_with_their_rings_on_their_switch() {
    let mut machine = Machine::boot(IDLE, &nic());
    let pf = machine.address("pf0").rid.to_bits();
    let sriov = machine.sriov(pf);
    let registers = machine.enable(pf);
    machine.config_write(pf, sriov + 0x10, &[2, 0]);
    machine.config_write(pf, sriov + 8, &[9, 0]);
    machine.config_write(0x100, 4, &[4, 0]);
    let [low, high] = [0x2c, 0x30].map(|at| u64::from(machine.config_read(pf, sriov + at)));
    let vf_registers = high << 32 | low & !0xf;
    let pf_driver = Driver::start(&machine, registers, RINGS, &[0, 1]);
    let vf_driver = Driver::start(&machine, vf_registers, RINGS + RINGS_OF_ONE, &[0, 1]);
    let mac = {
        let mut mac = [0; 6];
        crate::exits::MmioHandler::read(&**machine.vm.devices.bus(), vf_registers + 0x200, &mut mac[..4]);
        crate::exits::MmioHandler::read(&**machine.vm.devices.bus(), vf_registers + 0x204, &mut mac[4..]);
        mac
    };
    let frame = |n: u8| {
        let mut frame = vec![0; 12];
        frame.extend(mac);
        frame.extend([2, 0, 0, 0, 0, 0x10, 0x88, 0xb5]);
        frame.resize(12 + 60, n);
        frame
    };
    let (out, inward) = (BUFFERS, BUFFERS + 0x1000);
    for n in 0..4u8 {
        machine.write(out, &frame(n));
        vf_driver.send(&machine, 0, n.into(), &[(inward, 2048, true)]);
        pf_driver.send(&machine, 1, n.into(), &[(out, 72, false)]);
        pf_driver.wait(&machine, 1, u16::from(n) + 1);
        vf_driver.wait(&machine, 0, u16::from(n) + 1);
        assert_eq!(machine.read(inward + 12 + 56), u32::from_le_bytes([n; 4]));
        machine = machine.moved();
        assert_eq!([&pf_driver, &vf_driver].map(|driver| driver.status(&machine)), [0xf; 2]);
    }
}

/// The size of a VF's part of the VF BAR at `at`, which is not decoded.
fn slice(machine: &Machine, pf: u16, at: u64) -> u64 {
    let before = machine.config_read(pf, at);
    machine.config_write(pf, at, &[0xff; 4]);
    let mask = machine.config_read(pf, at) & !0xf;
    machine.config_write(pf, at, &before.to_le_bytes());
    u64::from(mask.wrapping_neg())
}

#[test]
fn state_is_at_most_64_kib_with_8_vfs_and_1_mib_with_255() {
    for (vfs, most) in [(8u16, 64 << 10), (255, 1 << 20)] {
        let nic = format!(r#""net":[{{"id":"pf0","switch":"veb","sriov_vfs":{vfs},"mac":"02:00:00:00:00:10"}}]"#);
        let mut machine = Machine::boot(IDLE, &with(&nic));
        let pf = machine.address("pf0").rid.to_bits();
        let sriov = machine.sriov(pf);
        machine.enable(pf);
        let slices = [0x24, 0x2c].map(|at| slice(&machine, pf, sriov + at));
        machine.config_write(pf, sriov + 0x10, &vfs.to_le_bytes());
        machine.config_write(pf, sriov + 8, &[9, 0]);
        let bars = [0x24, 0x2c].map(|at| {
            let [low, high] = [at, at + 4].map(|at| u64::from(machine.config_read(pf, sriov + at)));
            high << 32 | low & !0xf
        });
        for index in 0..vfs {
            let vf = 0x100 + index;
            machine.config_write(vf, 4, &[4, 0]);
            let msix = machine.capability(vf, 0x11).unwrap();
            machine.config_write(vf, msix + 2, &[0, 0x80]);
            let [table, registers] = [0, 1].map(|n| bars[n] + u64::from(index) * slices[n]);
            for vector in 0..3u32 {
                let entry = [0xfee0_0000, 0, 0x4000 + u32::from(index) * 4 + vector, 0].map(u32::to_le_bytes).concat();
                for (n, dword) in (0..).zip(entry.chunks(4)) {
                    let at = table + u64::from(vector) * 16 + n * 4;
                    crate::exits::MmioHandler::write(&**machine.vm.devices.bus(), at, dword);
                }
            }
            Driver::start(&machine, registers, RINGS, &[0, 1]);
        }
        machine.vm.pause();
        let state = machine.save();
        let len = serde_json::to_string(&state).unwrap().len();
        println!("{len} bytes with {vfs} VFs");
        assert!(len <= most, "{len} bytes with {vfs} VFs");
    }
}

#[test]
fn a_disk_continues_with_the_next_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    for io_uring in [true, false] {
        let json =
            with(&format!(r#""disks":[{{"id":"d","path":"{}","disable_io_uring":{}}}]"#, path.display(), !io_uring));
        let mut machine = Machine::boot(IDLE, &json);
        let rid = machine.address("d").rid.to_bits();
        let registers = machine.enable(rid);
        let driver = Driver::start(&machine, registers, RINGS, &[0]);
        // Reads of the first sector; each finds what the previous one wrote.
        let (header, data, status) = (BUFFERS, BUFFERS + 0x1000, BUFFERS + 0x2000);
        for n in 0..6u8 {
            let kind = u32::from(n % 2 == 0);
            machine.write(header, &[kind.to_le_bytes().as_slice(), &[0; 12]].concat());
            machine.write(data, &vec![if kind == 1 { n } else { 0xff }; 512]);
            driver.send(&machine, 0, n.into(), &[(header, 16, false), (data, 512, kind == 0), (status, 1, true)]);
            driver.wait(&machine, 0, u16::from(n) + 1);
            if kind == 0 {
                assert_eq!(machine.read(data), u32::from_le_bytes([n - 1; 4]));
            }
            // The first machine has the file locked, and ends before the next one is made.
            machine = machine.moved_away();
        }
    }
}

/// Devices are restored where they were, which the configuration alone would not reproduce.
#[test]
fn restored_devices_keep_their_slots_after_plug_and_unplug() {
    let net = |id: &str, vfs| format!(r#"{{"id":"{id}","switch":"veb","sriov_vfs":{vfs}}}"#);
    let json = with(&format!(r#""net":[{},{},{}]"#, net("a", 300), net("b", 2), net("c", 1)));
    let mut machine = Machine::boot(IDLE, &json);
    let slot = machine.address("a").rid.device();
    machine.vm.unplug("a");
    machine.vm.ged.write_slots(8 + u16::from(slot / 8), 1 << (slot % 8));
    assert_eq!(machine.vm.take_ejected().len(), 1);
    // Takes the first of the two free buses, and slot 1.
    let mut config = machine.planned().config().clone();
    config.net.remove(0);
    for json in [net("d", 1), net("e", 4)] {
        let before = PlannedVm::new(config.clone()).unwrap();
        config.net.push(serde_json::from_str::<NetConfig>(&json).unwrap());
        let planned = PlannedVm::new(config.clone()).unwrap();
        config = planned.config().clone();
        machine.vm.add(planned.added_to(before.plan()).unwrap(), OpenedBefore::Nothing).unwrap();
    }
    machine.vm.unplug("b");
    machine.plan(config);
    machine.vm.pause();
    let before = machine.save();
    let after = machine.moved_paused(&before);
    assert_same(&after.save(), &before);
    let places = |machine: &Machine| {
        let place = |id| machine.vm.devices.find(id).unwrap().placement();
        ["b", "c", "d", "e"].map(place)
    };
    assert_eq!(places(&after), places(&machine));
    let buses = places(&after).map(|place| place.first_vf_bus());
    assert_eq!(buses, [3, 4, 1, 2].map(Some));
    assert_eq!(places(&after)[3].vfs.unwrap().vf_rid(places(&after)[3].rid, VfIndex(3)).to_bits(), 0x203);
    // The restored guest is still asked to release one, and releases it.
    let mut after = after;
    let slot = after.address("b").rid.device();
    assert_eq!(after.vm.ged.take_events() & 1, 1);
    after.vm.ged.write_slots(8 + u16::from(slot / 8), 1 << (slot % 8));
    assert_eq!(after.vm.take_ejected().len(), 1);
    assert_eq!(after.vm.remove_unplugged(), []);
}
