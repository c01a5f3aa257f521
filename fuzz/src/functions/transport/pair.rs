//! A virtio function next to the rules: each operation is applied to both, and they must agree.

use std::sync::LazyLock;

use pci::{Access, BarIndex, Device, Dword, Reach, ResetKind, Rid, WindowId};
use virtio_devices::testing::{FakeDevice, memory};
use virtio_devices::{Memory, Outcome, Signals, VirtioFunction};
use virtio_queue::QueueT;

use super::rules::{COMMON_REGISTERS, QUEUE_SIZES, Rules};
use crate::input::Input;

const RID: Rid = Rid::from_bits(3 << 3);
pub const REGISTERS_BAR: u8 = 2;
pub const MSIX_BAR: u8 = 4;
/// The sizes of the BARs in bytes.
pub const BAR_LEN: [u64; 6] = [0, 0, 0x2000, 0, 0x1000, 0];
pub const PBA: u64 = 0x800;

// The kinds of operation.
pub const CONFIG_WRITE: u8 = 0;
pub const CONFIG_READ: u8 = 1;
pub const BAR_WRITE: u8 = 2;
pub const BAR_READ: u8 = 3;
pub const COMMON: u8 = 4;
pub const WINDOW_WRITE: u8 = 5;
pub const WINDOW_READ: u8 = 6;
pub const RESET: u8 = 7;
pub const REFUSE: u8 = 8;
pub const RESTORE: u8 = 9;
pub const TAMPER: u8 = 10;
pub const KINDS: u8 = 11;

static MEMORY: LazyLock<Memory> = LazyLock::new(memory);

/// A function, and the rules for it.
pub struct Pair {
    pub function: VirtioFunction<FakeDevice>,
    pub rules: Rules,
    pub config_access: u64,
    pub msix: u64,
    pub pcie: u64,
    pub power: u64,
}

impl Pair {
    /// A function in its power-on state.
    pub fn function() -> VirtioFunction<FakeDevice> {
        let function = VirtioFunction::plain(FakeDevice::new(&QUEUE_SIZES), RID, MEMORY.clone());
        function.expect("the queue sizes are valid")
    }

    /// A function in its power-on state, with its rules and the offsets of its capabilities.
    pub fn new() -> Self {
        let function = Self::function();
        let mut this = Self { function, rules: Rules::new(), config_access: 0, msix: 0, pcie: 0, power: 0 };
        let mut offset = this.config(0x34, 1);
        while offset != 0 {
            match (this.config(offset, 1), this.config(offset + 3, 1)) {
                (0x09, 5) => this.config_access = offset,
                (0x10, _) => this.pcie = offset,
                (0x11, _) => this.msix = offset,
                (0x01, _) => this.power = offset,
                _ => {}
            }
            offset = this.config(offset + 1, 1);
        }
        this
    }

    /// Reads configuration space. An access that is not a configuration request returns nothing.
    fn config(&self, offset: u64, len: usize) -> u64 {
        let mut data = [0; 8];
        if let Some(access) = Access::decode(offset, len) {
            access.extract(self.function_read(access.dword()), &mut data[..len]);
        }
        u64::from_le_bytes(data)
    }

    fn function_read(&self, dword: Dword) -> u32 {
        Device::config_read(&self.function, RID, dword)
    }

    /// The access described by the configuration access capability.
    fn access(&self) -> Option<(u8, u64, usize)> {
        let at = self.config_access;
        let (bar, offset, len) = (self.config(at + 4, 1) as u8, self.config(at + 8, 4), self.config(at + 12, 4));
        let legal = bar < 6 && matches!(len, 1 | 2 | 4) && offset % len == 0;
        legal.then_some((bar, offset, len as usize))
    }

    /// True if Bus Master Enable is set and the function is in D0.
    fn powered(&self) -> bool {
        self.config(4, 2) & 4 != 0 && self.config(self.power + 4, 2) & 3 == 0
    }

    /// Performs one operation, and checks its effects and all registers.
    pub fn apply(&mut self, input: &mut Input<'_>) {
        let before = (self.windows(), self.messages(), self.function.is_running());
        let Outcome { effects, stopping, .. } = self.apply_one(input);
        let after = (self.windows(), self.messages(), self.function.is_running());
        assert!(effects.windows || before.0 == after.0, "windows change without an effect: {after:x?}");
        assert!(effects.messages || before.1 == after.1, "messages change without an effect: {after:x?}");
        assert!(effects.queues || before.2 == after.2, "queues start or stop without an effect");
        assert_eq!(effects.reset, None, "a function resets itself without an effect");
        assert!(stopping.is_empty());
        self.compare();
    }

    fn apply_one(&mut self, input: &mut Input<'_>) -> Outcome {
        let kind = input.u8() % KINDS;
        match kind {
            CONFIG_WRITE => {
                let (offset, len, value) = (input.u16(), input.u8(), input.array::<4>());
                self.config_write(offset.into(), &value[..usize::from(len % 5)])
            }
            CONFIG_READ => {
                let (offset, len) = (u64::from(input.u16()), usize::from(input.u8() % 5));
                self.config_read(offset, len);
                Outcome::none()
            }
            BAR_WRITE => {
                let (bar, offset, len) = (input.u8() % 6, input.u32(), usize::from(input.u8() % 17));
                let data = [input.array::<8>(), [0; 8]].concat();
                self.bar_write(bar, offset.into(), &data[..len])
            }
            BAR_READ => {
                let (bar, offset, len) = (input.u8() % 6, u64::from(input.u32()), usize::from(input.u8() % 17));
                self.bar_read(bar, offset, len);
                Outcome::none()
            }
            COMMON => {
                let (offset, len) = COMMON_REGISTERS[usize::from(input.u8() % 24)];
                let value: [u8; 4] = input.array();
                self.bar_write(REGISTERS_BAR, offset, &value[..len])
            }
            WINDOW_WRITE | WINDOW_READ => {
                let (bar, offset, len) = (input.u8(), input.u16(), input.u8() % 5);
                let at = self.config_access;
                let _ = self.config_write(at + 4, &[bar]);
                let _ = self.config_write(at + 8, &u32::from(offset).to_le_bytes());
                let _ = self.config_write(at + 12, &u32::from(len).to_le_bytes());
                if kind == WINDOW_WRITE {
                    let value: [u8; 4] = input.array();
                    return self.config_write(at + 16, &value[..usize::from(len)]);
                }
                self.config_read(at + 16, 4);
                Outcome::none()
            }
            RESET => {
                let outcome = Device::reset(&mut self.function, ResetKind::Conventional);
                self.rules = Rules::new();
                outcome
            }
            REFUSE => {
                self.function.device_mut().refuse = input.u8() & 1 == 1;
                Outcome::none()
            }
            RESTORE => {
                self.restore();
                Outcome::none()
            }
            TAMPER => {
                self.restore_tampered(input);
                Outcome::none()
            }
            _ => Outcome::none(),
        }
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) -> Outcome {
        let Some(access) = Access::decode(offset, data.len()) else { return Outcome::none() };
        let write = access.write(data);
        let described = self.access();
        let before = (self.powered(), self.rules.status);
        let outcome = Device::config_write(&mut self.function, RID, access.dword(), write);
        let dword = u64::from(access.dword().offset());
        if dword == self.config_access + 16
            && let Some((bar, at, len)) = described
            && write.mask().to_le_bytes()[..len] == [0xff; 4][..len]
        {
            self.store(bar, at, &write.value().to_le_bytes()[..len]);
        }
        if dword == self.pcie + 8 && write.value() & 0x8000 != 0 {
            self.rules = Rules::new();
        }
        if before != (self.powered(), self.rules.status) {
            self.rules.settle(self.powered(), self.function.device().refuse);
        }
        outcome
    }

    /// Reading configuration space has no side effects, except through an access to the ISR status.
    fn config_read(&mut self, offset: u64, len: usize) {
        let Some(access) = Access::decode(offset, len) else { return };
        let is_data = u64::from(access.dword().offset()) == self.config_access + 16;
        match self.access().filter(|_| is_data) {
            Some((bar, at, described)) => {
                let expected = self.load(bar, at, described);
                let read = self.function_read(access.dword()).to_le_bytes();
                if let Some(expected) = expected {
                    assert_eq!(read[..described], expected, "{described} bytes at {at:#x} of BAR {bar}");
                }
                assert_eq!(read[described..], [0; 4][described..]);
            }
            None => drop(self.function_read(access.dword())),
        }
    }

    /// Writes to a BAR, and updates the rules accordingly.
    pub fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) -> Outcome {
        let window = WindowId::Bar(BarIndex::new(bar).expect("below 6"));
        let status = self.rules.status;
        let outcome = self.function.mmio_write(window, offset, data);
        self.store(bar, offset, data);
        if self.rules.status != status {
            self.rules.settle(self.powered(), self.function.device().refuse);
        }
        outcome
    }

    /// Applies a write to the rules.
    fn store(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if bar == REGISTERS_BAR && offset < 0x40 {
            self.rules.write(offset, data);
        }
    }

    /// Reads from a BAR, and compares the result with the rules.
    pub fn bar_read(&mut self, bar: u8, offset: u64, len: usize) {
        let window = WindowId::Bar(BarIndex::new(bar).expect("below 6"));
        let expected = self.load(bar, offset, len);
        let mut data = vec![0x55; len];
        self.function.mmio_read(window, offset, &mut data);
        if let Some(expected) = expected {
            assert_eq!(data, expected, "{len} bytes at {offset:#x} of BAR {bar}");
        }
    }

    /// Expected result of a read, or `None` for structures that are not the transport's.
    fn load(&mut self, bar: u8, offset: u64, len: usize) -> Option<Vec<u8>> {
        if offset >= BAR_LEN[usize::from(bar)] || offset + len as u64 > BAR_LEN[usize::from(bar)] {
            return Some(vec![0xff; len]);
        }
        let zeros = vec![0; len];
        match (bar, offset) {
            (REGISTERS_BAR, 0..0x40) if COMMON_REGISTERS[..23].contains(&(offset, len)) => {
                Some(self.rules.read(offset).to_le_bytes()[..len].into())
            }
            (REGISTERS_BAR, 0x100) if len == 1 => Some(vec![std::mem::take(&mut self.rules.isr)]),
            // The device-specific configuration.
            (REGISTERS_BAR, 0x200..0x1000) => None,
            (REGISTERS_BAR, _) => Some(zeros),
            (MSIX_BAR, PBA) if len == 8 => {
                // A message that may be sent is not pending.
                let waiting: Vec<_> = self.rules.pending.iter().copied().collect();
                let waiting = waiting.into_iter().filter(|vector| self.message(*vector).is_none());
                Some(waiting.fold(0u64, |bits, vector| bits | 1 << vector).to_le_bytes().into())
            }
            _ => None,
        }
    }

    fn windows(&self) -> Vec<pci::Window> {
        let mut windows = Vec::new();
        self.function.windows(&mut windows);
        windows
    }

    /// The messages that may be sent, as reported by the function.
    pub fn messages(&self) -> Vec<(u64, u32)> {
        let mut messages = Vec::new();
        self.function.messages(Reach::Device, &mut messages);
        assert!(messages.iter().all(|message| message.requester == RID));
        messages.iter().map(|message| (message.address, message.data)).collect()
    }

    /// The message of `vector`, read from the table, if it may be sent.
    fn message(&mut self, vector: u16) -> Option<(u64, u32)> {
        // MSI-X Enable set and Function Mask clear.
        let control = self.config(self.msix + 2, 2);
        if !self.rules.has_run || !self.powered() || control >> 14 != 0b10 {
            return None;
        }
        let mut entry = [0; 16];
        self.function.mmio_read(WindowId::Bar(BarIndex::ALL[4]), u64::from(vector) * 16, &mut entry);
        let dword = |n: usize| u32::from_le_bytes(entry[n..n + 4].try_into().expect("four bytes"));
        (dword(12) & 1 == 0).then(|| (u64::from(dword(4)) << 32 | u64::from(dword(0)), dword(8)))
    }

    fn expected_messages(&mut self) -> Vec<(u64, u32)> {
        let vectors: Vec<_> = self.rules.used_vectors.iter().copied().collect();
        vectors.into_iter().filter_map(|vector| self.message(vector)).collect()
    }

    /// Checks all registers that can be read without side effects.
    pub fn compare(&mut self) {
        let mut data = [0; 4];
        for (offset, len) in COMMON_REGISTERS.into_iter().take(23) {
            self.function.mmio_read(WindowId::Bar(BarIndex::ALL[2]), offset, &mut data[..len]);
            let expected = self.rules.read(offset).to_le_bytes();
            assert_eq!(data[..len], expected[..len], "register {offset:#x}, {:x?}", self.rules);
        }
        assert_eq!(self.function.is_running(), self.rules.running, "{:x?}", self.rules);
        assert_eq!(self.messages(), self.expected_messages(), "{:x?}", self.rules);
        if self.rules.running {
            self.compare_queues();
        }
    }

    /// Checks that the device got the queues that the driver enabled, with the driver's addresses and sizes.
    fn compare_queues(&self) {
        let device = self.function.device();
        assert_eq!(device.started.as_ref().map(|(features, _)| *features), Some(self.rules.features()));
        let given = device.queues.iter().map(|(index, queue)| {
            let queue = queue.lock();
            assert!(queue.ready() && queue.next_avail() == 0 && queue.next_used() == 0);
            (*index, queue.size(), [queue.desc_table(), queue.avail_ring(), queue.used_ring()])
        });
        let enabled = (0..).zip(&self.rules.queues).filter(|(_, queue)| queue.enabled);
        assert!(given.eq(enabled.map(|(index, queue)| (index, queue.size, queue.addresses))), "{:x?}", self.rules);
    }
}
