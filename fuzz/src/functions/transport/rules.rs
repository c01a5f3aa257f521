//! A second implementation of the standard's rules for the transport's registers.

use std::collections::BTreeSet;

use virtio_devices::NO_VECTOR;
use virtio_devices::testing::FAKE_FEATURE;

pub const QUEUE_SIZES: [u16; 3] = [256, 1, 32_768];
pub const VECTORS: u16 = 4;
pub const OFFERED: u64 = 1 << 32 | FAKE_FEATURE;

// Bits of the device status.
pub const DRIVER_OK: u8 = 4;
pub const FEATURES_OK: u8 = 8;
pub const NEEDS_RESET: u8 = 64;
pub const FAILED: u8 = 128;
pub const STATUS_BITS: u8 = 1 | 2 | DRIVER_OK | FEATURES_OK | NEEDS_RESET | FAILED;

/// The registers of the common configuration, as offset and width.
pub const COMMON_REGISTERS: [(u64, usize); 24] = [
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

/// The registers of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queue {
    pub size: u16,
    vector: u16,
    pub enabled: bool,
    /// Addresses of the descriptor table, the available ring and the used ring.
    pub addresses: [u64; 3],
}

/// The expected values of the registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    pub status: u8,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: [u32; 4],
    config_vector: u16,
    queue_select: u16,
    pub queues: [Queue; 3],
    pub isr: u8,
    /// Vectors that were mapped since the last reset.
    pub used_vectors: BTreeSet<u16>,
    /// Vectors with a pending signal.
    pub pending: BTreeSet<u16>,
    /// True if the queues have run since the last reset.
    pub has_run: bool,
    pub running: bool,
}

impl Rules {
    /// The state after a reset.
    pub fn new() -> Self {
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

    /// The negotiated features.
    pub fn features(&self) -> u64 {
        let [low, high, ..] = self.driver_features.map(u64::from);
        if self.has(FEATURES_OK) { (high << 32 | low) & OFFERED } else { 0 }
    }

    /// True if FEATURES_OK should be accepted: only offered features are chosen, including VERSION_1.
    fn acceptable(&self) -> bool {
        let [low, high, third, fourth] = self.driver_features;
        u64::from(low) & !OFFERED == 0 && high == 1 && third == 0 && fourth == 0
    }

    /// The expected value of the common configuration's register at `offset`.
    pub fn read(&self, offset: u64) -> u32 {
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

    /// Writes `data` to the common configuration at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
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
                // From now on the vector has its eventfd, except for a queue that does not exist.
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

    /// Starts or stops the queues after a change of any condition.
    pub fn settle(&mut self, powered: bool, refuse: bool) {
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
        self.isr |= 2;
        if self.config_vector != NO_VECTOR {
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
