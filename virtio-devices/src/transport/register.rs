//! The registers of the common configuration (`virtio 1.4 §4.1.4.3`), and the access width of each.

/// Half of a 64-bit register, which drivers access as two of 32 bits (`virtio 1.4 §4.1.3.1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// Bits 31:0.
    Low,
    /// Bits 63:32.
    High,
}

impl Half {
    /// This half of `value`.
    pub(crate) const fn of(self, value: u64) -> u32 {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        match self {
            Self::Low => u32::from_le_bytes([a, b, c, d]),
            Self::High => u32::from_le_bytes([e, f, g, h]),
        }
    }

    /// `value` with this half replaced by `half`.
    pub(crate) const fn replace(self, value: u64, half: u32) -> u64 {
        match self {
            Self::Low => value & !0xffff_ffff | half as u64,
            Self::High => value & 0xffff_ffff | (half as u64) << 32,
        }
    }
}

/// The part of a virtqueue whose address a register holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Area {
    /// The descriptor area: the descriptor table.
    Descriptor,
    /// The driver area: the available ring.
    Driver,
    /// The device area: the used ring.
    Device,
}

/// A register of the common configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    DeviceFeatureSelect,
    DeviceFeature,
    DriverFeatureSelect,
    DriverFeature,
    ConfigMsixVector,
    NumQueues,
    DeviceStatus,
    ConfigGeneration,
    QueueSelect,
    QueueSize,
    QueueMsixVector,
    QueueEnable,
    QueueNotifyOff,
    QueueAddress(Area, Half),
    QueueNotifConfigData,
    QueueReset,
    AdminQueueIndex,
    AdminQueueNum,
}

impl Register {
    /// The length of the common configuration, up to and including admin_queue_num.
    pub(crate) const SPACE: u64 = 0x40;

    /// The register at `offset` that is `len` bytes wide. `None` for an access of another width, which drivers must not
    /// make (`virtio 1.4 §4.1.3.1`).
    pub(crate) const fn decode(offset: u64, len: usize) -> Option<Self> {
        use Area::{Descriptor, Device, Driver};
        use Half::{High, Low};
        Some(match (offset, len) {
            (0x00, 4) => Self::DeviceFeatureSelect,
            (0x04, 4) => Self::DeviceFeature,
            (0x08, 4) => Self::DriverFeatureSelect,
            (0x0c, 4) => Self::DriverFeature,
            (0x10, 2) => Self::ConfigMsixVector,
            (0x12, 2) => Self::NumQueues,
            (0x14, 1) => Self::DeviceStatus,
            (0x15, 1) => Self::ConfigGeneration,
            (0x16, 2) => Self::QueueSelect,
            (0x18, 2) => Self::QueueSize,
            (0x1a, 2) => Self::QueueMsixVector,
            (0x1c, 2) => Self::QueueEnable,
            (0x1e, 2) => Self::QueueNotifyOff,
            (0x20, 4) => Self::QueueAddress(Descriptor, Low),
            (0x24, 4) => Self::QueueAddress(Descriptor, High),
            (0x28, 4) => Self::QueueAddress(Driver, Low),
            (0x2c, 4) => Self::QueueAddress(Driver, High),
            (0x30, 4) => Self::QueueAddress(Device, Low),
            (0x34, 4) => Self::QueueAddress(Device, High),
            (0x38, 2) => Self::QueueNotifConfigData,
            (0x3a, 2) => Self::QueueReset,
            (0x3c, 2) => Self::AdminQueueIndex,
            (0x3e, 2) => Self::AdminQueueNum,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_the_space_belongs_to_exactly_one_register() {
        let mut owners = [0; Register::SPACE as usize];
        for offset in 0..Register::SPACE + 8 {
            for len in 0..=16 {
                if Register::decode(offset, len).is_some() {
                    assert!(offset.is_multiple_of(len as u64), "{len} bytes at {offset:#x} are aligned");
                    owners[offset as usize..][..len].iter_mut().for_each(|owner| *owner += 1);
                }
            }
        }
        assert_eq!(owners, [1; Register::SPACE as usize]);
    }

    #[test]
    fn a_half_replaces_what_it_reads() {
        let value = 0x8877_6655_4433_2211;
        assert_eq!((Half::Low.of(value), Half::High.of(value)), (0x4433_2211, 0x8877_6655));
        assert_eq!(Half::Low.replace(value, 0xdead_beef), 0x8877_6655_dead_beef);
        assert_eq!(Half::High.replace(value, 0xdead_beef), 0xdead_beef_4433_2211);
    }
}
