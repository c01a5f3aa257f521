//! A guest that enables the VFs of a NIC and drives the first one, at the host's command.

use crate::rig::code::{Code, drive};

/// Address in guest memory of the host's command; the guest clears it when done.
pub(crate) const COMMAND: u32 = 0x30_0000;
/// Address at which the guest writes the status of the VF's device.
pub(crate) const STATUS: u32 = COMMAND + 4;
/// Enable two VFs, and start the first one's driver.
pub(crate) const ENABLE: u32 = 1;
/// Reset the VF, and disable both.
pub(crate) const DISABLE: u32 = 2;
/// Clear Bus Master Enable of the first VF.
pub(crate) const MASTER_OFF: u32 = 3;
/// Set it again.
pub(crate) const MASTER_ON: u32 = 4;
/// The status of a device whose driver runs (`virtio 1.4 §2.1`): ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
pub(crate) const RUNNING: u32 = 0xf;

/// Rings of the VF's receive queue; those of its transmit queue follow.
pub(crate) const RINGS_AT: u32 = 0x40_0000;

const ECAM: u32 = 0xe800_0000;
/// The SR-IOV capability of the PF in slot 1 (`PCIe 6.2 §9.3.3`).
const SRIOV: u32 = ECAM + (1 << 15) + 0x100;
/// VF 0 is the first function of bus 1.
const VF: u32 = ECAM + (1 << 20);
/// Address of the VF BARs: virtio's registers, and the MSI-X table.
const REGISTERS: u32 = 0xd300_0000;
const TABLE: u32 = 0xd400_0000;

/// The guest's instructions.
pub(crate) fn code() -> Vec<u8> {
    let master = |on: u16| Code::default().word(VF + 4, on << 2);
    let commands = [(ENABLE, enable()), (DISABLE, disable()), (MASTER_OFF, master(0)), (MASTER_ON, master(1))];
    let commands = commands.map(|(command, code)| (command, code.dword(COMMAND, 0)));
    let len = |code: &Code| i32::try_from(code.0.len()).unwrap();
    let back_from = |end: i32| (-(end + 5)).to_le_bytes();
    // mov eax, [COMMAND]; for each command: cmp eax, command; je to its code; then pause; jmp 0
    let mut code = Code::default().bytes(&[&[0xa1], &COMMAND.to_le_bytes()]);
    let mut target = 5 + 9 * 4 + 7;
    for (command, body) in &commands {
        let next = len(&code) + 9;
        code = code.bytes(&[&[0x83, 0xf8, *command as u8], &[0x0f, 0x84], &(target - next).to_le_bytes()]);
        target += len(body) + 5;
    }
    let end = len(&code) + 2;
    code = code.bytes(&[&[0xf3, 0x90], &[0xe9], &back_from(end)]);
    for (_, body) in &commands {
        let end = len(&code) + len(body);
        code = code.bytes(&[&body.0, &[0xe9], &back_from(end)]);
    }
    code.0
}

fn enable() -> Code {
    let code = Code::default()
        .word(SRIOV + 0x10, 2)
        .dword(SRIOV + 0x24 + 8, REGISTERS)
        .dword(SRIOV + 0x24 + 12, 0)
        .dword(SRIOV + 0x24 + 16, TABLE)
        .dword(SRIOV + 0x24 + 20, 0)
        // VF Enable and VF MSE.
        .word(SRIOV + 8, 1 << 0 | 1 << 3)
        // Bus Master, and MSI-X Enable.
        .word(VF + 4, 1 << 2)
        .word(VF + 0x7e, 1 << 15);
    // The control queue, which is the third, stays disabled.
    let queues = drive(code, REGISTERS, TABLE, &[0, 1], 0, RINGS_AT);
    // mov al, [status]; and eax, 0xff; mov [STATUS], eax
    queues.bytes(&[&[0xa0], &(REGISTERS + 0x14).to_le_bytes(), &[0x25, 0xff, 0, 0, 0, 0xa3], &STATUS.to_le_bytes()])
}

fn disable() -> Code {
    Code::default().byte(REGISTERS + 0x14, 0).word(VF + 4, 0).word(SRIOV + 8, 0)
}
