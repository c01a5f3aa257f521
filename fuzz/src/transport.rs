//! A virtio function: the registers of the transport, by memory and by the PCI configuration access capability, its queues, and its
//! vectors, against the rules of the standard written out a second time.
//!
//! The device behind it starts no thread: it takes whatever queues it is given, and the queues are the registers' own, nonsense
//! included. After each operation the registers read what they should, the queues run if and only if they should, and what may be
//! sent follows from the registers and was told by an effect. A function that is restored to what another one saved takes its place,
//! and nobody can tell; one that is restored to a state with changes refuses it, or is what the state says.

mod restore;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use pci::{Access, BarIndex, Device, Dword, Effects, ResetKind, Rid, WindowId};
use virtio_devices::testing::{FAKE_FEATURE, FakeDevice, memory};
use virtio_devices::{Memory, NO_VECTOR, VirtioFunction, VirtioPci};
use virtio_queue::QueueT;

use crate::input::{Input, Seed};

const RID: Rid = Rid::from_bits(3 << 3);
const QUEUE_SIZES: [u16; 3] = [256, 1, 32_768];
const VECTORS: u16 = 4;
const OFFERED: u64 = 1 << 32 | FAKE_FEATURE;

const REGISTERS_BAR: u8 = 2;
const MSIX_BAR: u8 = 4;
/// How much the two BARs have.
const BAR_LEN: [u64; 6] = [0, 0, 0x2000, 0, 0x1000, 0];
const PBA: u64 = 0x800;

// Bits of the device status.
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;
const FAILED: u8 = 128;
const STATUS_BITS: u8 = 1 | 2 | DRIVER_OK | FEATURES_OK | NEEDS_RESET | FAILED;

// The kinds of operation.
const CONFIG_WRITE: u8 = 0;
const CONFIG_READ: u8 = 1;
const BAR_WRITE: u8 = 2;
const BAR_READ: u8 = 3;
const COMMON: u8 = 4;
const WINDOW_WRITE: u8 = 5;
const WINDOW_READ: u8 = 6;
const RESET: u8 = 7;
const REFUSE: u8 = 8;
const RESTORE: u8 = 9;
const TAMPER: u8 = 10;
const KINDS: u8 = 11;

/// The registers of the common configuration and their widths.
const COMMON_REGISTERS: [(u64, usize); 24] = [
    (0x00, 4),
    (0x04, 4),
    (0x08, 4),
    (0x0c, 4),
    (0x10, 2),
    (0x12, 2),
    (0x14, 1),
    (0x15, 1),
    (0x16, 2),
    (0x18, 2),
    (0x1a, 2),
    (0x1c, 2),
    (0x1e, 2),
    (0x20, 4),
    (0x24, 4),
    (0x28, 4),
    (0x2c, 4),
    (0x30, 4),
    (0x34, 4),
    (0x38, 2),
    (0x3a, 2),
    (0x3c, 2),
    (0x3e, 2),
    // Not a register.
    (0x11, 1),
];

static MEMORY: LazyLock<Memory> = LazyLock::new(memory);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Queue {
    size: u16,
    vector: u16,
    enabled: bool,
    /// Descriptor table, available ring, used ring.
    addresses: [u64; 3],
}

/// What the registers must read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rules {
    status: u8,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: [u32; 4],
    config_vector: u16,
    queue_select: u16,
    queues: [Queue; 3],
    isr: u8,
    /// Vectors that something was mapped to since the last reset.
    used_vectors: BTreeSet<u16>,
    /// Vectors that a signal waits in.
    pending: BTreeSet<u16>,
    /// The queues have run since the last reset.
    has_run: bool,
    running: bool,
}

impl Rules {
    fn new() -> Self {
        let queue = |size| Queue { size, vector: NO_VECTOR, enabled: false, addresses: [0; 3] };
        Self {
            status: 0,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: [0; 4],
            config_vector: NO_VECTOR,
            queue_select: 0,
            queues: QUEUE_SIZES.map(queue),
            isr: 0,
            used_vectors: BTreeSet::new(),
            pending: BTreeSet::new(),
            has_run: false,
            running: false,
        }
    }

    fn has(&self, bit: u8) -> bool {
        self.status & bit != 0
    }

    fn features(&self) -> u64 {
        let [low, high, ..] = self.driver_features.map(u64::from);
        if self.has(FEATURES_OK) { (high << 32 | low) & OFFERED } else { 0 }
    }

    /// Whether FEATURES_OK would be accepted: nothing but what is offered, and VERSION_1.
    fn acceptable(&self) -> bool {
        let [low, high, third, fourth] = self.driver_features;
        u64::from(low) & !OFFERED == 0 && high == 1 && third == 0 && fourth == 0
    }

    fn read(&self, offset: u64) -> u32 {
        let word =
            |words: &[u32], select: u32| usize::try_from(select).ok().and_then(|n| words.get(n)).copied().unwrap_or(0);
        let queue = self.queues.get(usize::from(self.queue_select));
        let address = |n: usize, high: bool| {
            queue.map_or(0, |queue| if high { (queue.addresses[n] >> 32) as u32 } else { queue.addresses[n] as u32 })
        };
        match offset {
            0x00 => self.device_feature_select,
            0x04 => word(&[OFFERED as u32, (OFFERED >> 32) as u32], self.device_feature_select),
            0x08 => self.driver_feature_select,
            0x0c => word(&self.driver_features, self.driver_feature_select),
            0x10 => self.config_vector.into(),
            0x12 => 3,
            0x14 => self.status.into(),
            0x16 => self.queue_select.into(),
            0x18 => queue.map_or(0, |queue| queue.size.into()),
            0x1a => queue.map_or(NO_VECTOR, |queue| queue.vector).into(),
            0x1c => queue.is_some_and(|queue| queue.enabled).into(),
            0x1e => queue.map_or(0, |_| self.queue_select.into()),
            0x20..0x38 => address(((offset - 0x20) / 8) as usize, offset % 8 == 4),
            _ => 0,
        }
    }

    /// A write of the common configuration.
    fn write(&mut self, offset: u64, data: &[u8]) {
        if !COMMON_REGISTERS[..23].contains(&(offset, data.len())) {
            return;
        }
        let mut bytes = [0; 4];
        bytes[..data.len()].copy_from_slice(data);
        let value = u32::from_le_bytes(bytes);
        let (negotiated, locked) = (self.has(FEATURES_OK), self.has(DRIVER_OK));
        let queue = self.queues.get_mut(usize::from(self.queue_select));
        match offset {
            0x00 => self.device_feature_select = value,
            0x08 => self.driver_feature_select = value,
            0x0c if !negotiated && self.driver_feature_select < 4 => {
                self.driver_features[self.driver_feature_select as usize] = value;
            }
            0x10 => self.config_vector = Self::map(&mut self.used_vectors, value as u16),
            0x14 => self.write_status(value as u8),
            0x16 => self.queue_select = value as u16,
            0x1a => {
                // A vector has its eventfd from now on, but for a queue that does not exist.
                if let Some(queue) = queue {
                    queue.vector = Self::map(&mut self.used_vectors, value as u16);
                }
            }
            0x18 | 0x1c | 0x20..0x38 => {
                let max = QUEUE_SIZES.get(usize::from(self.queue_select)).copied().unwrap_or(0);
                if let Some(queue) = queue.filter(|queue| !locked && !queue.enabled) {
                    queue.configure(offset, value, max);
                }
            }
            _ => {}
        }
    }

    fn map(used: &mut BTreeSet<u16>, vector: u16) -> u16 {
        if vector >= VECTORS {
            return NO_VECTOR;
        }
        used.insert(vector);
        vector
    }

    fn write_status(&mut self, value: u8) {
        if value == 0 {
            *self = Self::new();
            return;
        }
        let mut status = self.status | value & STATUS_BITS & !NEEDS_RESET;
        if !self.has(FEATURES_OK) && !self.acceptable() {
            status &= !FEATURES_OK;
        }
        if status & FEATURES_OK == 0 {
            status &= !DRIVER_OK;
        }
        self.status = status;
    }

    /// Lets the queues run or stand still, after something that they depend on may have changed.
    fn settle(&mut self, powered: bool, refuse: bool) {
        let ready = self.has(DRIVER_OK) && !self.has(NEEDS_RESET) && !self.has(FAILED);
        let wanted = ready && powered;
        if wanted && !self.running {
            self.has_run = true;
            if refuse {
                self.status |= NEEDS_RESET;
                self.signal_config();
                return;
            }
        }
        self.running = wanted;
    }

    fn signal_config(&mut self) {
        if self.config_vector == NO_VECTOR {
            self.isr |= 2;
        } else {
            self.pending.insert(self.config_vector);
        }
    }
}

impl Queue {
    fn configure(&mut self, offset: u64, value: u32, max: u16) {
        match offset {
            0x18 if value.count_ones() == 1 && value <= max.into() => self.size = value as u16,
            0x1c if value == 1 => {
                let [descriptors, available, used] = self.addresses;
                self.enabled = descriptors % 16 == 0 && available % 2 == 0 && used % 4 == 0;
            }
            0x20..0x38 => {
                let (address, value) = (&mut self.addresses[((offset - 0x20) / 8) as usize], u64::from(value));
                *address = match offset % 8 {
                    4 => *address & 0xffff_ffff | value << 32,
                    _ => *address & !0xffff_ffff | value,
                };
            }
            _ => {}
        }
    }
}

struct Pair {
    function: VirtioFunction<FakeDevice>,
    rules: Rules,
    config_access: u64,
    msix: u64,
    pcie: u64,
    power: u64,
}

impl Pair {
    fn function() -> VirtioFunction<FakeDevice> {
        let function = VirtioFunction::plain(FakeDevice::new(&QUEUE_SIZES), RID, MEMORY.clone());
        function.expect("queues that can be")
    }

    fn new() -> Self {
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

    /// Reads configuration space; nothing for an access that is none.
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

    /// The access that the configuration access capability describes.
    fn access(&self) -> Option<(u8, u64, usize)> {
        let at = self.config_access;
        let (bar, offset, len) = (self.config(at + 4, 1) as u8, self.config(at + 8, 4), self.config(at + 12, 4));
        let legal = bar < 6 && matches!(len, 1 | 2 | 4) && offset % len == 0;
        legal.then_some((bar, offset, len as usize))
    }

    /// Bus Master Enable in D0.
    fn powered(&self) -> bool {
        self.config(4, 2) & 4 != 0 && self.config(self.power + 4, 2) & 3 == 0
    }

    fn apply(&mut self, input: &mut Input<'_>) {
        let before = (self.windows(), self.messages(), self.function.is_running());
        let effects = self.apply_one(input);
        let after = (self.windows(), self.messages(), self.function.is_running());
        assert!(effects.windows || before.0 == after.0, "windows change without an effect: {after:x?}");
        assert!(effects.messages || before.1 == after.1, "messages change without an effect: {after:x?}");
        assert!(effects.queues || before.2 == after.2, "queues start or stop without an effect");
        assert_eq!(effects.reset, None, "a function does its resets itself");
        assert!(self.function.take_stopping().is_empty());
        self.compare();
    }

    fn apply_one(&mut self, input: &mut Input<'_>) -> Effects {
        let kind = input.u8() % KINDS;
        match kind {
            CONFIG_WRITE => {
                let (offset, len, value) = (input.u16(), input.u8(), input.array::<4>());
                self.config_write(offset.into(), &value[..usize::from(len % 5)])
            }
            CONFIG_READ => {
                let (offset, len) = (u64::from(input.u16()), usize::from(input.u8() % 5));
                self.config_read(offset, len);
                Effects::NONE
            }
            BAR_WRITE => {
                let (bar, offset, len) = (input.u8() % 6, input.u32(), usize::from(input.u8() % 17));
                let data = [input.array::<8>(), [0; 8]].concat();
                self.bar_write(bar, offset.into(), &data[..len])
            }
            BAR_READ => {
                let (bar, offset, len) = (input.u8() % 6, u64::from(input.u32()), usize::from(input.u8() % 17));
                self.bar_read(bar, offset, len);
                Effects::NONE
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
                Effects::NONE
            }
            RESET => {
                let effects = Device::reset(&mut self.function, ResetKind::Conventional);
                self.rules = Rules::new();
                effects
            }
            REFUSE => {
                self.function.device_mut().refuse = input.u8() & 1 == 1;
                Effects::NONE
            }
            RESTORE => {
                self.restore();
                Effects::NONE
            }
            TAMPER => {
                self.restore_tampered(input);
                Effects::NONE
            }
            _ => Effects::NONE,
        }
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) -> Effects {
        let Some(access) = Access::decode(offset, data.len()) else { return Effects::NONE };
        let write = access.write(data);
        let described = self.access();
        let before = (self.powered(), self.rules.status);
        let effects = Device::config_write(&mut self.function, RID, access.dword(), write);
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
        effects
    }

    /// Reads of configuration space have no side effect but that of an access to the ISR status.
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

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) -> Effects {
        let window = WindowId::Bar(BarIndex::new(bar).expect("below 6"));
        let status = self.rules.status;
        let effects = self.function.mmio_write(window, offset, data);
        self.store(bar, offset, data);
        if self.rules.status != status {
            self.rules.settle(self.powered(), self.function.device().refuse);
        }
        effects
    }

    /// What a write means for the registers of the transport.
    fn store(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if bar == REGISTERS_BAR && offset < 0x40 {
            self.rules.write(offset, data);
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, len: usize) {
        let window = WindowId::Bar(BarIndex::new(bar).expect("below 6"));
        let expected = self.load(bar, offset, len);
        let mut data = vec![0x55; len];
        self.function.mmio_read(window, offset, &mut data);
        if let Some(expected) = expected {
            assert_eq!(data, expected, "{len} bytes at {offset:#x} of BAR {bar}");
        }
    }

    /// What a read must return; `None` for structures that are not the transport's.
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
            // The device configuration.
            (REGISTERS_BAR, 0x200..0x1000) => None,
            (REGISTERS_BAR, _) => Some(zeros),
            (MSIX_BAR, PBA) if len == 8 => {
                // What may be sent does not wait.
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

    fn messages(&self) -> Vec<(u64, u32)> {
        let mut messages = Vec::new();
        VirtioPci::messages(&self.function, &mut messages);
        assert!(messages.iter().all(|message| message.requester == RID));
        messages.iter().map(|message| (message.address, message.data)).collect()
    }

    /// The message of `vector` if it may be sent, as the table says.
    fn message(&mut self, vector: u16) -> Option<(u64, u32)> {
        // Enabled, and the function not masked.
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

    fn compare(&mut self) {
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

    /// The device has been given the queues that the driver enabled, as the driver described them.
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

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`], and returns the device status, whether the queues run, and how many messages may be sent.
fn run_to_end(input: &[u8]) -> (u8, bool, usize) {
    let mut input = Input::new(input);
    let mut pair = Pair::new();
    pair.compare();
    while !input.is_empty() {
        pair.apply(&mut input);
    }
    // What cannot be read without being changed, and the registers of all queues.
    pair.bar_read(REGISTERS_BAR, 0x100, 1);
    pair.bar_read(MSIX_BAR, PBA, 8);
    for queue in 0..4u16 {
        let _ = pair.bar_write(REGISTERS_BAR, 0x16, &queue.to_le_bytes());
        pair.compare();
    }
    (pair.rules.status, pair.rules.running, pair.messages().len())
}

fn common(seed: Seed, register: u8, value: u32) -> Seed {
    let n = COMMON_REGISTERS.iter().position(|(offset, _)| *offset == u64::from(register)).unwrap_or(0);
    seed.with([COMMON, n as u8]).with(value.to_le_bytes())
}

fn config(seed: Seed, offset: u16, len: u8, value: u32) -> Seed {
    seed.with([CONFIG_WRITE]).with(offset.to_le_bytes()).with([len]).with(value.to_le_bytes())
}

/// Bus Master, MSI-X with all vectors, ACKNOWLEDGE to FEATURES_OK, and a vector for the configuration.
fn negotiate() -> Seed {
    let pair = Pair::new();
    let mut seed = config(Seed::new(), 4, 2, 6);
    seed = config(seed, pair.msix as u16 + 2, 2, 0x8000);
    for vector in 0..VECTORS {
        for (offset, value) in [(0, 0xfee0_0000), (8, 0x40 + u32::from(vector)), (12, 0)] {
            let at = u32::from(vector) * 16 + offset;
            seed =
                seed.with([BAR_WRITE, MSIX_BAR]).with(at.to_le_bytes()).with([4]).with(u64::from(value).to_le_bytes());
        }
    }
    for (register, value) in [(0x14, 1), (0x14, 3), (0x08, 1), (0x0c, 1), (0x08, 0), (0x0c, 32), (0x14, 11), (0x10, 0)]
    {
        seed = common(seed, register, value);
    }
    seed
}

fn queue(seed: Seed, index: u16, size: u16, addresses: [u64; 3]) -> Seed {
    let seed = common(common(seed, 0x16, index.into()), 0x18, size.into());
    let mut seed = common(seed, 0x1a, u32::from(index) + 1);
    for (register, address) in (0x20..).step_by(8).zip(addresses) {
        seed = common(common(seed, register, address as u32), register + 4, (address >> 32) as u32);
    }
    common(seed, 0x1c, 1)
}

/// A restore with three changes.
fn tampered(seed: Seed, changes: [(u8, u8, u16); 3]) -> Seed {
    let seed = seed.with([TAMPER, 2]);
    changes.into_iter().fold(seed, |seed, (what, n, value)| seed.with([what, n]).with(value.to_le_bytes()))
}

/// Seeds: a driver that comes up, by memory and by the PCI configuration access capability; nonsense queues; resets of each kind;
/// a start that fails; D3hot and back; restores in each of these states.
pub fn seeds() -> Vec<Vec<u8>> {
    let pair = Pair::new();
    let driver_ok = |seed| common(seed, 0x14, 15);
    let queues = |seed| queue(queue(seed, 0, 128, [0x1000, 0x2000, 0x3000]), 1, 1, [0x4000, 0x5000, 0x6000]);
    let up = || driver_ok(queues(negotiate()));
    let nonsense = queue(queue(negotiate(), 2, 32_768, [!15, !1, !3]), 0, 256, [8, 1, 2]);
    let window = |seed: Seed, offset: u16, len: u8, value: u32| {
        seed.with([WINDOW_WRITE, REGISTERS_BAR]).with(offset.to_le_bytes()).with([len]).with(value.to_le_bytes())
    };
    let by_window = [(0x14, 1, 1), (0x14, 1, 3), (0x08, 4, 1), (0x0c, 4, 1), (0x14, 1, 11), (0x14, 1, 15)];
    let by_window =
        by_window.into_iter().fold(config(Seed::new(), 4, 2, 6), |seed, (at, len, value)| window(seed, at, len, value));
    let by_window = by_window.with([WINDOW_READ, REGISTERS_BAR, 0, 1, 1]);
    let d3 = config(config(up(), pair.power as u16 + 4, 2, 3), pair.power as u16 + 4, 2, 0);
    let read_isr = [BAR_READ, REGISTERS_BAR, 0, 1, 0, 0, 1];
    let read_pba = [BAR_READ, MSIX_BAR, 0, 8, 0, 0, 8];
    let masked = config(queues(negotiate()).with([REFUSE, 1]), pair.msix as u16 + 2, 2, 0xc000);
    let unmasked = config(driver_ok(masked).with(read_isr).with(read_pba), pair.msix as u16 + 2, 2, 0x8000);
    let refused = unmasked.clone().with(read_pba);
    vec![
        up().with(read_isr).done(),
        driver_ok(nonsense).done(),
        by_window.done(),
        refused.done(),
        d3.done(),
        common(up(), 0x14, 0).done(),
        config(up(), pair.pcie as u16 + 8, 2, 0x8000).done(),
        up().with([RESET]).done(),
        common(driver_ok(common(queues(negotiate()).with([REFUSE, 1]), 0x10, 0xffff)), 0x14, 0).with(read_isr).done(),
        common(up(), 0x14, 128).done(),
        up().with([BAR_WRITE, REGISTERS_BAR, 0, 0x10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0])
            .with([CONFIG_READ, 0, 0, 4])
            .done(),
        common(up().with([RESTORE]), 0x10, 0xffff).with([RESTORE]).with(read_pba).done(),
        unmasked.with([RESTORE]).with(read_isr).done(),
        tampered(up(), [(4, 1, 0), (11, 0, 0), (0, 0, 11)]).done(),
        tampered(tampered(up(), [(13, 0, 7), (2, 0, 0), (14, 0, 2)]), [(8, 0, 1), (12, 0, 1), (3, 0, 64)]).done(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_bring_up_the_driver_and_take_it_down_in_each_way() {
        let ends: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let down = (0, false, 0);
        let up = (15, true, 3);
        let refused = (15 | NEEDS_RESET, false, 3);
        let failed = (15 | FAILED, false, 3);
        let restored = [up, refused, up, up];
        let plain = [up, (15, true, 3), (15, true, 0), refused, up, down, down, down, down, failed, up];
        assert_eq!(ends, [&plain[..], &restored].concat());
    }
}
