//! A guest's instructions, including a driver of virtio devices.

/// Instructions in flat 32-bit mode.
#[derive(Default)]
pub(crate) struct Code(pub Vec<u8>);

impl Code {
    pub(crate) fn bytes(mut self, parts: &[&[u8]]) -> Self {
        parts.iter().for_each(|part| self.0.extend(*part));
        self
    }

    /// `mov dword [address], value`
    pub(crate) fn dword(self, address: u32, value: u32) -> Self {
        self.bytes(&[&[0xc7, 0x05], &address.to_le_bytes(), &value.to_le_bytes()])
    }

    /// `mov word [address], value`
    pub(crate) fn word(self, address: u32, value: u16) -> Self {
        self.bytes(&[&[0x66, 0xc7, 0x05], &address.to_le_bytes(), &value.to_le_bytes()])
    }

    /// `mov byte [address], value`
    pub(crate) fn byte(self, address: u32, value: u8) -> Self {
        self.bytes(&[&[0xc6, 0x05], &address.to_le_bytes(), &[value]])
    }
}

/// The size of a queue's rings, in bytes: descriptors, and both rings at 4 KiB and 8 KiB.
pub(crate) const RINGS: u32 = 0x1_0000;
/// The number of a queue's descriptors.
pub(crate) const SIZE: u16 = 16;

/// Adds a driver's start of a device with its registers and MSI-X table at these addresses, with these queues, these
/// features and VIRTIO_F_VERSION_1 (`virtio 1.4 §3.1.1`). The queues' rings are consecutive from `rings`. Each queue
/// has its own vector, if there are enough.
pub(crate) fn drive(code: Code, registers: u32, table: u32, queues: &[u16], features: u64, rings: u32) -> Code {
    let vectors = (0..4).fold(code, |code, vector: u32| {
        let entry = table + 16 * vector;
        code.dword(entry, 0xfee0_0000).dword(entry + 4, 0).dword(entry + 8, 0x30 + vector).dword(entry + 12, 0)
    });
    let negotiated = vectors
        .byte(registers + 0x14, 1)
        .byte(registers + 0x14, 3)
        .dword(registers + 8, 1)
        .dword(registers + 0xc, (features >> 32) as u32 | 1)
        .dword(registers + 8, 0)
        .dword(registers + 0xc, features as u32)
        .byte(registers + 0x14, 0xb)
        .word(registers + 0x10, 0);
    let set_up = queues.iter().zip(0..).fold(negotiated, |code, (queue, number)| {
        let ring = rings + number * RINGS;
        code.word(registers + 0x16, *queue)
            .word(registers + 0x18, SIZE)
            .word(registers + 0x1a, queue + 1)
            .dword(registers + 0x20, ring)
            .dword(registers + 0x24, 0)
            .dword(registers + 0x28, ring + 0x1000)
            .dword(registers + 0x2c, 0)
            .dword(registers + 0x30, ring + 0x2000)
            .dword(registers + 0x34, 0)
            .word(registers + 0x1c, 1)
    });
    set_up.byte(registers + 0x14, 0xf)
}
