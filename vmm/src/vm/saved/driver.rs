//! A driver of virtio devices, which makes its accesses as a vCPU would.

use std::time::{Duration, Instant};

use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::guest::Machine;
use crate::exits::MmioHandler as _;

/// The number of a queue's descriptors.
const SIZE: u16 = 16;
/// The room of a queue's rings, in bytes.
const RINGS: u64 = 0x1_0000;

/// A function's driver: where its registers and rings are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Driver {
    registers: u64,
    rings: u64,
}

impl Driver {
    /// Starts the function whose registers are at `registers`, with these queues, whose rings are at `rings` and
    /// behind,
    /// and no feature but VIRTIO_F_VERSION_1 (`virtio 1.4 §3.1.1`).
    pub(super) fn start(machine: &Machine, registers: u64, rings: u64, queues: &[u16]) -> Self {
        let driver = Self { registers, rings };
        let byte = |offset, value: u8| driver.write(machine, offset, &[value]);
        let word = |offset, value: u16| driver.write(machine, offset, &value.to_le_bytes());
        let dword = |offset, value: u32| driver.write(machine, offset, &value.to_le_bytes());
        byte(0x14, 1);
        byte(0x14, 3);
        dword(8, 1);
        dword(0xc, 1);
        byte(0x14, 0xb);
        for queue in queues {
            let ring = driver.ring(*queue);
            word(0x16, *queue);
            word(0x18, SIZE);
            for (offset, address) in [(0x20, ring), (0x28, ring + 0x1000), (0x30, ring + 0x2000)] {
                dword(offset, address as u32);
                dword(offset + 4, 0);
            }
            word(0x1c, 1);
        }
        byte(0x14, 0xf);
        assert_eq!(driver.status(machine), 0xf);
        driver
    }

    pub(super) fn status(&self, machine: &Machine) -> u8 {
        let mut status = [0];
        machine.vm.devices.bus().read(self.registers + 0x14, &mut status);
        status[0]
    }

    fn write(&self, machine: &Machine, offset: u64, data: &[u8]) {
        machine.vm.devices.bus().write(self.registers + offset, data);
    }

    fn ring(&self, queue: u16) -> u64 {
        self.rings + u64::from(queue) * RINGS
    }

    /// Makes a chain available as the `n`th of `queue`, and rings. Each part is an address, a length, and whether the
    /// device writes it.
    pub(super) fn send(&self, machine: &Machine, queue: u16, n: u16, parts: &[(u64, u32, bool)]) {
        let memory = machine.vm.ram.memory().memory();
        let ring = self.ring(queue);
        for (index, (address, len, is_written)) in (0u16..).zip(parts) {
            let has_next = usize::from(index) + 1 < parts.len();
            let flags = u16::from(has_next) | u16::from(*is_written) << 1;
            let at = GuestAddress(ring + 16 * u64::from(index));
            memory.write_obj(*address, at).unwrap();
            memory.write_obj(*len, GuestAddress(at.0 + 8)).unwrap();
            memory.write_obj(flags, GuestAddress(at.0 + 12)).unwrap();
            memory.write_obj(index + 1, GuestAddress(at.0 + 14)).unwrap();
        }
        let available = ring + 0x1000;
        memory.write_obj(0u16, GuestAddress(available + 4 + 2 * u64::from(n % SIZE))).unwrap();
        memory.write_obj(n + 1, GuestAddress(available + 2)).unwrap();
        self.write(machine, 0x1000 + 4 * u64::from(queue), &queue.to_le_bytes());
    }

    /// Number of chains of `queue` that the device has given back.
    pub(super) fn used(&self, machine: &Machine, queue: u16) -> u16 {
        machine.vm.ram.memory().memory().read_obj(GuestAddress(self.ring(queue) + 0x2000 + 2)).unwrap()
    }

    /// Waits until the device has given `count` chains of `queue` back.
    pub(super) fn wait(&self, machine: &Machine, queue: u16, count: u16) {
        let start = Instant::now();
        while self.used(machine, queue) != count {
            assert!(start.elapsed() < Duration::from_secs(20), "queue {queue}: {}", self.used(machine, queue));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Machine {
    /// Enables memory and bus mastering of the function at `rid` of bus 0, and returns where its registers are.
    pub(super) fn enable(&self, rid: u16) -> u64 {
        self.config_write(rid, 4, &6u16.to_le_bytes());
        let [low, high] = [0x18, 0x1c].map(|offset| u64::from(self.config_read(rid, offset)));
        high << 32 | low & !0xf
    }

    /// The first register of the capability `id` of the function at `rid`.
    pub(super) fn capability(&self, rid: u16, id: u32) -> Option<u64> {
        let next = |at: u64, shift: u32| u64::from((self.config_read(rid, at) >> shift) & 0xfc);
        let mut at = next(0x34, 0);
        while at != 0 && self.config_read(rid, at) & 0xff != id {
            at = next(at, 8);
        }
        (at != 0).then_some(at)
    }

    /// The first register of the SR-IOV capability of the function at `rid`.
    pub(super) fn sriov(&self, rid: u16) -> u64 {
        let mut at = 0x100;
        while self.config_read(rid, at) & 0xffff != 0x10 {
            at = u64::from(self.config_read(rid, at) >> 20);
            assert_ne!(at, 0, "no PF");
        }
        at
    }
}
