//! A VF in a VM of the guest's own KVM: a VM of this program, in a guest of this program, in the nested lab.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

#[path = "../../../api/rig/code.rs"]
mod code;
#[path = "../../../cli/files.rs"]
#[expect(dead_code, reason = "the tests of the command line use the rest")]
mod files;

use std::fs;
use std::time::{Duration, Instant};

use code::{Code, RINGS, drive};
use integration::{Api, Guest, Kernel, Pf, ProgramDisk, Subnet, Vf, spec_with_vfs, vf_mac, vf_taps, vmm_binary};

/// The first VF belongs to the nested VM, the other one to the guest's kernel.
const VFS: usize = 2;
/// Slot of the VF in the nested VM, which determines its configuration space; and the address that the nested guest
/// gives to its BARs.
const SLOT: u32 = 5;
const CONFIG: u32 = 0xe800_0000 + (SLOT << 15);
const REGISTERS: u32 = 0xd300_0000;
const TABLE: u32 = 0xd400_0000;
/// Address of the nested guest's rings, followed by buffers of a page each.
const RECEIVE: u32 = 0x40_0000;
const TRANSMIT: u32 = RECEIVE + RINGS;
const BUFFERS: u32 = 0x3000;
/// The number of receive buffers.
const COUNT: u32 = 8;
/// The first doorbell; each further queue's is 4 bytes later.
const DOORBELLS: u32 = REGISTERS + 0x1000;
/// VIRTIO_F_ACCESS_PLATFORM. The VF is behind the guest's IOMMU, so its driver must accept this.
const FEATURES: u64 = 1 << 33;
/// The lengths of the header before a frame, and of a frame; the nested guest prints this much of each packet.
const HEADER: usize = 12;
const FRAME: usize = 60;
/// Time that the nested VM may take for an answer. Each of its exits causes hundreds at the first level.
const PATIENCE: Duration = Duration::from_secs(120);

/// ARP request for `target`'s address from `own`, with this MAC address; the requested address follows.
fn question(mac: [u8; 6], own: Subnet) -> Vec<u8> {
    let parts: [&[u8]; 8] = [
        &[0; HEADER],
        &[0xff; 6],
        &mac,
        &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
        &mac,
        &own.guest().octets(),
        &[0; 6],
        &own.host().octets(),
    ];
    let mut packet = parts.concat();
    packet.resize(HEADER + FRAME, 0);
    packet
}

/// The nested VM's guest: it starts the driver of its VF, sends `packet`, and writes each packet that it receives to
/// its serial port.
fn driver(packet: &[u8]) -> Vec<u8> {
    let placed = Code::default()
        .word(CONFIG + 4, 0)
        .dword(CONFIG + 0x18, REGISTERS)
        .dword(CONFIG + 0x1c, 0)
        .dword(CONFIG + 0x20, TABLE)
        .dword(CONFIG + 0x24, 0)
        .word(CONFIG + 4, 6);
    let started = drive(placed, REGISTERS, TABLE, &[0, 1], FEATURES, RECEIVE);
    // Descriptors have an address, a length and flags; flag 2 means that the device writes (`virtio 1.4 §2.7.5`).
    let offered = (0..COUNT).fold(started, |code, n| {
        let descriptor = RECEIVE + 16 * n;
        let code = code.dword(descriptor, RECEIVE + BUFFERS + 0x1000 * n).dword(descriptor + 8, 0x1000);
        code.word(descriptor + 12, 2).word(RECEIVE + 0x1004 + 2 * n, n as u16)
    });
    let offered = offered.word(RECEIVE + 0x1002, COUNT as u16).word(DOORBELLS, 0);
    let words = packet.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let written = (0..).zip(words).fold(offered, |code, (n, word)| code.dword(TRANSMIT + BUFFERS + 4 * n, word));
    let sent = written
        .dword(TRANSMIT, TRANSMIT + BUFFERS)
        .dword(TRANSMIT + 8, packet.len() as u32)
        .word(TRANSMIT + 0x1002, 1)
        .word(DOORBELLS + 4, 1);
    let (used, buffers, len) = (RECEIVE + 0x2002, RECEIVE + BUFFERS, (HEADER + FRAME) as u32);
    let told = sent
        // xor ebx, ebx
        .bytes(&[&[0x31, 0xdb]])
        // wait: movzx eax, word [used]; cmp eax, ebx; pause; je wait
        .bytes(&[&[0x0f, 0xb7, 0x05], &used.to_le_bytes(), &[0x39, 0xd8, 0xf3, 0x90, 0x74, 0xf3]])
        // mov esi, ebx; shl esi, 12; add esi, buffers
        .bytes(&[&[0x89, 0xde, 0xc1, 0xe6, 0x0c, 0x81, 0xc6], &buffers.to_le_bytes()])
        // mov ecx, len; mov edx, 0x3f8; next: lodsb; out dx, al; loop next
        .bytes(&[&[0xb9], &len.to_le_bytes(), &[0xba, 0xf8, 0x03, 0, 0, 0xac, 0xee, 0xe2, 0xfc]]);
    // inc ebx; jmp wait
    told.bytes(&[&[0x43, 0xeb, 0xd7]]).0
}

/// True if `packet` is the host's reply to the ARP request of `mac`.
fn is_answer(packet: &[u8], mac: [u8; 6], own: Subnet) -> bool {
    let frame = &packet[HEADER..];
    let is_ours = frame[..6] == mac && frame[12..14] == [8, 6] && frame[20..22] == [0, 2];
    is_ours && frame[28..32] == own.host().octets() && frame[38..42] == own.guest().octets()
}

/// The bytes that the nested VM's guest has written.
fn written(guest: &mut Guest) -> Vec<u8> {
    let hex = guest.ok("od -An -v -tx1 /tmp/serial");
    hex.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn enabled(guest: &mut Guest) -> (Pf, Vec<Vf>) {
    let pf = Pf::find(guest);
    pf.set_num_vfs(guest, VFS);
    let vfs = pf.vfs(guest);
    (pf, vfs)
}

/// G51: a VM in the guest's own KVM drives a VF: it sends an ARP request to the host, and gets the reply. The VF
/// reaches only that VM's memory, and the guest's kernel has it back afterwards.
#[test]
fn a_nested_vm_owns_a_vf_and_gives_it_back() {
    let (api, own) = (Api::new("nested"), Subnet(0));
    let mac: Vec<u8> = vf_mac(0).split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    let mac: [u8; 6] = mac.try_into().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("kernel");
    fs::write(&kernel, files::kernel(&driver(&question(mac, own)))).unwrap();
    let disks = [ProgramDisk::of(&vmm_binary()), ProgramDisk::of(&kernel)];
    let spec = disks.iter().fold(spec_with_vfs(Kernel::V6_12, VFS).with_modules(), |spec, disk| disk.add_to(spec));
    let mut guest =
        Guest::boot(spec.memory("size=512M").arguments(&["--platform", "iommu=on", "--api-socket", &api.argument()]));
    guest.load_vfio();
    guest.load("kvm-amd");
    guest.take_program("cloud-hypervisor");
    guest.take_program_from("vdb", "kernel");
    let (pf, vfs) = enabled(&mut guest);
    let taps = vf_taps(VFS);
    taps[0].join(own);
    guest.give_to_vfio(&vfs[0].address);

    let device = format!("path=/sys/bus/pci/devices/{},id=vf,pci_device_id={SLOT}", vfs[0].address);
    guest.ok(&format!(
        "/tmp/cloud-hypervisor --kernel /tmp/kernel --cpus boot=1 --memory size=32M --serial file=/tmp/serial \
         --console off --device {device} > /tmp/vmm.log 2>&1 &"
    ));
    let until = Instant::now() + PATIENCE;
    loop {
        let runs = guest.run("pidof cloud-hypervisor").status == 0;
        let text = guest.run("cat /tmp/vmm.log").text;
        assert!(runs, "the nested VM has ended: {text}");
        if guest.run("[ -s /tmp/serial ]").status == 0 {
            let bytes = written(&mut guest);
            if bytes.chunks_exact(HEADER + FRAME).any(|packet| is_answer(packet, mac, own)) {
                break;
            }
        }
        assert!(Instant::now() < until, "the nested VM is not answered: {text}");
    }
    let counters = api.get("vm.counters").body;
    assert_eq!((&counters["__iommu"]["faults"], &counters["__iommu"]["refused"]), (&0.into(), &0.into()));
    vfs[1].ping_through(&mut guest, &taps, 1, Subnet(1));

    guest.ok("killall cloud-hypervisor");
    guest.wait_for("! pidof cloud-hypervisor");
    guest.take_from_vfio(&vfs[0].address);
    pf.vfs(&mut guest)[0].ping_through(&mut guest, &taps, 0, own);
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
