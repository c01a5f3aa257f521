//! The device configuration of a disk (`virtio 1.4 §5.2.4`, `struct virtio_blk_config`).

use virtio_bindings::virtio_blk::*;

use super::geometry::Geometry;
use super::operation::MAX_RANGE;
use crate::device::config::{ConfigField, Rule, read};

/// Offset of the writable field: true if writes may stay in a cache.
pub(crate) const WRITEBACK: u64 = 32;
/// The largest data segment in bytes, as the driver reads it.
const SEGMENT_SIZE: u32 = 64 << 10;
/// The length of the fields.
const LEN: usize = 60;

/// The most segments of data in a request.
pub(crate) const SEG_MAX: ConfigField = ConfigField::new("seg_max", 12, 4, Rule::Served).of(VIRTIO_BLK_F_SEG_MAX);
/// The block size in bytes: a part of a disk's contents.
pub(crate) const BLK_SIZE: ConfigField = ConfigField::new("blk_size", 20, 4, Rule::Served).of(VIRTIO_BLK_F_BLK_SIZE);
/// The size of physical blocks, in blocks, as a power of two.
pub(crate) const PHYSICAL: ConfigField =
    ConfigField::new("physical_block_exp", 24, 1, Rule::Served).of(VIRTIO_BLK_F_TOPOLOGY);
/// The fields. Those of features that are not offered read 0.
pub(crate) const FIELDS: &[ConfigField] = &[
    ConfigField::new("capacity (sectors of 512 bytes)", 0, 8, Rule::Grows),
    ConfigField::new("size_max", 8, 4, Rule::Same).of(VIRTIO_BLK_F_SIZE_MAX),
    SEG_MAX,
    ConfigField::new("geometry", 16, 4, Rule::Same).of(VIRTIO_BLK_F_GEOMETRY),
    BLK_SIZE,
    PHYSICAL,
    ConfigField::new("alignment_offset", 25, 1, Rule::Same).of(VIRTIO_BLK_F_TOPOLOGY),
    ConfigField::new("min_io_size", 26, 2, Rule::Served).of(VIRTIO_BLK_F_TOPOLOGY),
    ConfigField::new("opt_io_size", 28, 4, Rule::Same).of(VIRTIO_BLK_F_TOPOLOGY),
    ConfigField::new("writeback", 32, 1, Rule::Saved).of(VIRTIO_BLK_F_CONFIG_WCE),
    ConfigField::reserved(33, 1),
    ConfigField::new("num_queues", 34, 2, Rule::Same).of(VIRTIO_BLK_F_MQ),
    ConfigField::new("max_discard_sectors", 36, 4, Rule::Same).of(VIRTIO_BLK_F_DISCARD),
    ConfigField::new("max_discard_seg", 40, 4, Rule::Same).of(VIRTIO_BLK_F_DISCARD),
    ConfigField::new("discard_sector_alignment", 44, 4, Rule::Served).of(VIRTIO_BLK_F_DISCARD),
    ConfigField::new("max_write_zeroes_sectors", 48, 4, Rule::Same).of(VIRTIO_BLK_F_WRITE_ZEROES),
    ConfigField::new("max_write_zeroes_seg", 52, 4, Rule::Same).of(VIRTIO_BLK_F_WRITE_ZEROES),
    // Zeroing works with and without freeing space.
    ConfigField::new("write_zeroes_may_unmap", 56, 1, Rule::Announced).of(VIRTIO_BLK_F_WRITE_ZEROES),
    ConfigField::reserved(57, 3),
];

/// Values of the fields.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Config {
    /// The disk's size and blocks.
    pub geometry: Geometry,
    /// The most segments of data in a request.
    pub segments: u32,
    /// True if writes may stay in a cache until a flush.
    pub writeback: bool,
    /// The number of queues.
    pub queues: u16,
    /// True if ranges can be zeroed.
    pub zero: bool,
    /// True if ranges can be discarded, and zeroing may free their space.
    pub discard: bool,
}

impl Config {
    /// Reads at `offset`. Bytes beyond the fields read 0.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        read(&self.bytes(), offset, data);
    }

    fn bytes(&self) -> [u8; LEN] {
        let Geometry { sectors, block_size, physical_exponent } = self.geometry;
        let mut bytes = [0; LEN];
        let mut put = |offset: usize, field: &[u8]| bytes[offset..offset + field.len()].copy_from_slice(field);
        put(0, &sectors.to_le_bytes());
        put(8, &SEGMENT_SIZE.to_le_bytes());
        put(12, &self.segments.to_le_bytes());
        put(20, &block_size.to_le_bytes());
        put(24, &[physical_exponent]);
        // In blocks: the unit that the storage writes without reading first.
        put(26, &(1u16 << physical_exponent).to_le_bytes());
        put(32, &[self.writeback.into()]);
        put(34, &self.queues.to_le_bytes());
        if self.discard {
            put(36, &MAX_RANGE.to_le_bytes());
            put(40, &1u32.to_le_bytes());
            put(44, &(block_size / 512).to_le_bytes());
        }
        if self.zero {
            put(48, &MAX_RANGE.to_le_bytes());
            put(52, &1u32.to_le_bytes());
            put(56, &[self.discard.into()]);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_standard_has_them_and_zero_beyond() {
        let geometry = Geometry { sectors: 0x0102_0304_0506, block_size: 512, physical_exponent: 3 };
        let mut config = Config { geometry, segments: 126, writeback: true, queues: 4, zero: true, discard: true };
        let read = |config: &Config, offset, len| {
            let mut data = vec![0xff; len];
            config.read(offset, &mut data);
            data.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))
        };
        let fields = [
            (0, 8, 0x0102_0304_0506),
            (8, 4, 0x1_0000),
            (12, 4, 126),
            (16, 4, 0),
            (20, 4, 512),
            (24, 1, 3),
            (25, 1, 0),
            (26, 2, 8),
            (28, 4, 0),
            (32, 1, 1),
            (33, 1, 0),
            (34, 2, 4),
            (36, 4, u64::from(MAX_RANGE)),
            (40, 4, 1),
            (44, 4, 1),
            (48, 4, u64::from(MAX_RANGE)),
            (52, 4, 1),
            (56, 1, 1),
            (57, 8, 0),
            (u64::MAX, 8, 0),
        ];
        for (offset, len, expected) in fields {
            assert_eq!(read(&config, offset, len), expected, "offset {offset}");
        }
        config.discard = false;
        let ranges = |config: &Config| [36, 40, 44, 48, 52, 56].map(|offset| read(config, offset, 4));
        assert_eq!(ranges(&config), [0, 0, 0, u64::from(MAX_RANGE), 1, 0]);
        config.zero = false;
        assert_eq!(ranges(&config), [0; 6]);
    }
}
