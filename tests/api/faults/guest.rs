//! A guest that enables the VFs of a NIC and drives the first one, when the host tells it to.

/// Where the host writes a command, which the guest takes back when it is done. In the guest's memory.
pub(super) const COMMAND: u32 = 0x30_0000;
/// Where the guest writes the status of the VF's device.
pub(super) const STATUS: u32 = COMMAND + 4;
/// Enable two VFs, and start the first one's driver.
pub(super) const ENABLE: u32 = 1;
/// Reset the VF, and disable both.
pub(super) const DISABLE: u32 = 2;
/// The status of a device whose driver runs (`virtio 1.4 §2.1`): ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
pub(super) const RUNNING: u32 = 0xf;

const ECAM: u32 = 0xe800_0000;
/// The SR-IOV capability of the PF in slot 1 (`PCIe 6.2 §9.3.3`).
const SRIOV: u32 = ECAM + (1 << 15) + 0x100;
/// VF 0 is the first function of bus 1.
const VF: u32 = ECAM + (1 << 20);
/// Where the guest places the VF BARs: virtio's registers, and the MSI-X table.
const REGISTERS: u32 = 0xd300_0000;
const TABLE: u32 = 0xd400_0000;

/// Instructions in flat 32-bit mode.
#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    fn bytes(mut self, parts: &[&[u8]]) -> Self {
        parts.iter().for_each(|part| self.0.extend(*part));
        self
    }

    /// `mov dword [address], value`
    fn dword(self, address: u32, value: u32) -> Self {
        self.bytes(&[&[0xc7, 0x05], &address.to_le_bytes(), &value.to_le_bytes()])
    }

    /// `mov word [address], value`
    fn word(self, address: u32, value: u16) -> Self {
        self.bytes(&[&[0x66, 0xc7, 0x05], &address.to_le_bytes(), &value.to_le_bytes()])
    }

    /// `mov byte [address], value`
    fn byte(self, address: u32, value: u8) -> Self {
        self.bytes(&[&[0xc6, 0x05], &address.to_le_bytes(), &[value]])
    }
}

/// The guest's instructions.
pub(super) fn code() -> Vec<u8> {
    let done = |code: Code| code.dword(COMMAND, 0);
    let (enable, disable) = (done(enable()), done(disable()));
    let len = |code: &Code| i32::try_from(code.0.len()).unwrap();
    // 0: mov eax, [COMMAND]; 5: cmp eax, ENABLE; 8: je 30; 14: cmp eax, DISABLE; 17: je; 23: pause; 25: jmp 0
    let back_from = |end: i32| (-(end + 5)).to_le_bytes();
    let (enable_at, disable_at) = (30, 30 + len(&enable) + 5);
    let code = Code::default()
        .bytes(&[&[0xa1], &COMMAND.to_le_bytes()])
        .bytes(&[&[0x83, 0xf8, ENABLE as u8], &[0x0f, 0x84], &(enable_at - 14i32).to_le_bytes()])
        .bytes(&[&[0x83, 0xf8, DISABLE as u8], &[0x0f, 0x84], &(disable_at - 23).to_le_bytes()])
        .bytes(&[&[0xf3, 0x90], &[0xe9], &back_from(25)]);
    assert_eq!(len(&code), enable_at);
    let code = code.bytes(&[&enable.0, &[0xe9], &back_from(enable_at + len(&enable))]);
    code.bytes(&[&disable.0, &[0xe9], &back_from(disable_at + len(&disable))]).0
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
    let vectors = (0..4).fold(code, |code, vector: u32| {
        let entry = TABLE + 16 * vector;
        code.dword(entry, 0xfee0_0000).dword(entry + 4, 0).dword(entry + 8, 0x30 + vector).dword(entry + 12, 0)
    });
    // VIRTIO_F_VERSION_1 is bit 32.
    let features = vectors
        .byte(REGISTERS + 0x14, 1)
        .byte(REGISTERS + 0x14, 3)
        .dword(REGISTERS + 8, 1)
        .dword(REGISTERS + 0xc, 1)
        .dword(REGISTERS + 8, 0)
        .dword(REGISTERS + 0xc, 0)
        .byte(REGISTERS + 0x14, 0xb)
        .word(REGISTERS + 0x10, 0);
    let queues = (0..2).fold(features, |code, queue: u16| {
        let ring = 0x40_0000 + (u32::from(queue) << 16);
        code.word(REGISTERS + 0x16, queue)
            .word(REGISTERS + 0x18, 16)
            .word(REGISTERS + 0x1a, queue + 1)
            .dword(REGISTERS + 0x20, ring)
            .dword(REGISTERS + 0x24, 0)
            .dword(REGISTERS + 0x28, ring + 0x1000)
            .dword(REGISTERS + 0x2c, 0)
            .dword(REGISTERS + 0x30, ring + 0x2000)
            .dword(REGISTERS + 0x34, 0)
            .word(REGISTERS + 0x1c, 1)
    });
    // mov al, [status]; and eax, 0xff; mov [STATUS], eax
    queues.byte(REGISTERS + 0x14, RUNNING as u8).bytes(&[
        &[0xa0],
        &(REGISTERS + 0x14).to_le_bytes(),
        &[0x25, 0xff, 0, 0, 0, 0xa3],
        &STATUS.to_le_bytes(),
    ])
}

fn disable() -> Code {
    Code::default().byte(REGISTERS + 0x14, 0).word(VF + 4, 0).word(SRIOV + 8, 0)
}
