//! Machines whose configuration is edited after they were saved.

use std::fs::File;

use super::guest::Machine;
use crate::config::VmConfig;
use crate::exits::MmioHandler as _;
use crate::kvm::Kvm;
use crate::machine_state::MachineState;

/// `cli; hlt; jmp back to hlt`
const IDLE: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

/// A machine whose drivers have started each device, its state, and its folder.
fn machine() -> (Machine, MachineState, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    for (name, len) in [("disk", 8 << 20), ("pmem", 2 << 20)] {
        File::create(path(name)).unwrap().set_len(len).unwrap();
    }
    let (disk, pmem, socket) = (path("disk"), path("pmem"), path("socket"));
    let json = format!(
        r#"{{
            "cpus": {{"boot_vcpus": 1, "max_vcpus": 4}},
            "serial": {{"mode": "Null"}}, "console": {{"mode": "Null"}},
            "disks": [{{"id": "disk", "path": "{disk}", "readonly": true}}],
            "pmem": [{{"id": "pmem", "file": "{pmem}"}}],
            "vsock": {{"id": "vsock", "cid": 3, "socket": "{socket}"}},
            "balloon": {{"id": "balloon", "size": 4096}},
            "net": [{{"id": "nic", "switch": "veb", "sriov_vfs": 1, "mtu": 1400}}]
        }}"#
    );
    let mut machine = Machine::boot(IDLE, &json);
    machine.vm.pause();
    for id in ["disk", "pmem", "vsock", "balloon", "nic"] {
        let registers = machine.enable(machine.address(id).rid.to_bits());
        for status in [1, 3] {
            machine.vm.devices.bus().write(registers + 0x14, &[status]);
        }
    }
    let state = machine.vm.save_machine().unwrap();
    (machine, state, folder)
}

#[test]
fn an_edited_configuration_is_compared_with_the_guests() {
    let (mut machine, state, folder) = machine();
    let own = machine.planned().config().clone();
    let mut sockets = 0..;
    let mut outcome = |edit: &dyn Fn(&mut VmConfig)| {
        let mut config = own.clone();
        // The previous machine may still be listening at its socket.
        let socket = format!("socket{}", sockets.next().unwrap());
        config.vsock.as_mut().unwrap().socket = folder.path().join(socket);
        edit(&mut config);
        machine.plan(config);
        machine.try_restored(&state).map_err(|error| error.to_string())
    };
    let mut refusal = |edit: &dyn Fn(&mut VmConfig)| outcome(edit).map(drop).unwrap_err();
    let told = "--net id=nic: its driver has read mtu 1400, but the device here has 1300; configure it as it was";
    assert_eq!(refusal(&|config| config.net[0].mtu = Some(1300)), told);
    let told =
        "--pmem id=pmem: its driver has read discard_writes off, but the device here has on; configure it as it was";
    assert_eq!(refusal(&|config| config.pmem[0].discard_writes = true), told);
    let told = refusal(&|config| config.disks[0].serial = Some("other".to_string()));
    assert_eq!(
        told,
        "--disk id=disk: its driver has read serial disk, but the device here has other; configure it as it was"
    );
    let told = "cpus.max_vcpus: 8 in the configuration, but the guest was started with 4; give 4";
    assert_eq!(refusal(&|config| config.cpus.max_vcpus = 8), told);
    let told = "cpus.max_phys_bits: 40 in the configuration, but the guest was started with 46; give 46";
    assert_eq!(refusal(&|config| config.cpus.max_phys_bits = 40), told);
    let told = "cpus.nested: false in the configuration, but the guest was started with true; give true";
    assert_eq!(refusal(&|config| config.cpus.nested = false), told);
    let told = "cpus.kvm_hyperv: true in the configuration, but the guest was started with false; give false";
    assert_eq!(refusal(&|config| config.cpus.kvm_hyperv = true), told);
    let disk = File::options().write(true).open(folder.path().join("disk")).unwrap();
    disk.set_len(4 << 20).unwrap();
    let told = refusal(&|_| ());
    let then =
        "--disk id=disk: its driver has read capacity (sectors of 512 bytes) 16384, but the device here has 8192; ";
    assert!(told.starts_with(then), "{told}");
    disk.set_len(8 << 20).unwrap();
    // Nothing has to be done, or the driver is notified.
    for (id, is_told, edit) in [
        ("nic", false, (&|_: &mut VmConfig| ()) as &dyn Fn(&mut VmConfig)),
        ("nic", false, &|config| config.net[0].mtu = Some(1500)),
        ("balloon", true, &|config| config.balloon.as_mut().unwrap().size = 8192),
        ("vsock", true, &|config| config.vsock.as_mut().unwrap().cid = 4),
    ] {
        let restored = outcome(edit).unwrap();
        let registers = restored.enable(restored.address(id).rid.to_bits());
        let mut isr = [0];
        restored.vm.devices.bus().read(registers + 0x100, &mut isr);
        assert_eq!(isr[0] & 2 != 0, is_told, "{id}");
        // The machine resumes, and so does the next one.
        restored.vm.save_machine().unwrap();
    }
}

#[test]
fn a_saved_guest_of_hyperv_needs_a_host_that_has_it() {
    let mut machine = Machine::boot(IDLE, r#"{"serial": {"mode": "Null"}, "console": {"mode": "Null"}}"#);
    machine.vm.pause();
    let mut state = machine.vm.save_machine().unwrap();
    let leaf = state.cpuid.iter_mut().find(|leaf| leaf.leaf == 0x4000_0001).unwrap();
    leaf.registers[0] = u32::from_le_bytes(*b"Hv#1");
    let told = "cpus.kvm_hyperv: false in the configuration, but the guest was started with true; give true";
    assert_eq!(machine.try_restored(&state).map(drop).unwrap_err().to_string(), told);
    let mut config = machine.planned().config().clone();
    config.cpus.kvm_hyperv = true;
    machine.plan(config);
    let restored = machine.try_restored(&state).map(drop).map_err(|error| error.to_string());
    let lacking = "--cpus kvm_hyperv=on: the KVM of this host has no Hyper-V enlightenments (KVM_CAP_HYPERV_SYNIC); \
                   choose a host whose kernel has them (CONFIG_KVM_HYPERV), or boot the guest without";
    let expected = if Kvm::open().unwrap().has_hyperv() { Ok(()) } else { Err(lacking.to_string()) };
    assert_eq!(restored, expected);
}
