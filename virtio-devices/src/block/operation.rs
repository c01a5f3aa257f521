//! A driver's request (`virtio 1.4 §5.2.6`), checked against the disk. Nothing here touches the image.

use virtio_bindings::virtio_blk::*;

use super::geometry::{Geometry, SECTOR};

/// The most sectors that one request discards or zeroes: 128 MiB, which bounds its time.
pub(crate) const MAX_RANGE: u32 = 1 << 18;
/// The most bytes that one request transfers.
pub(crate) const MAX_TRANSFER: u64 = 256 << 20;
/// The length of a request's header: type, reserved, sector.
pub(crate) const HEADER: usize = 16;
/// The length of the single segment of a discard or write zeroes request: sector, count, flags.
pub(crate) const SEGMENT: usize = 16;

/// A valid request. Offsets and lengths are in bytes, and lie within the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Reads, starting at this offset.
    Read(u64),
    /// Writes, starting at this offset.
    Write(u64),
    /// Makes written data stable.
    Flush,
    /// Discards a range.
    Discard(Range),
    /// Zeroes a range, and frees its space if `unmap`.
    WriteZeroes {
        /// Range that becomes zero.
        range: Range,
        /// True if the space of the range may be freed.
        unmap: bool,
    },
    /// Reads the serial number.
    GetId,
}

/// A part of the disk in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, not 0.
    pub len: u64,
}

/// Reason why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Not supported by the disk (`VIRTIO_BLK_S_UNSUPP`).
    Unsupported,
    /// Not valid for the disk (`VIRTIO_BLK_S_IOERR`).
    Invalid,
}

/// The operations that a disk supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// Size and blocks.
    pub geometry: Geometry,
    /// True if the disk cannot be written.
    pub read_only: bool,
    /// True if ranges can be zeroed.
    pub zero: bool,
    /// True if ranges can be discarded, and zeroing may free their space. Implies `zero`.
    pub discard: bool,
}

impl Abilities {
    /// Parses a request's header, with `readable` bytes of data from the driver, which begin with `segment`, and room
    /// for `writable` bytes of data.
    pub(crate) fn parse(
        &self,
        header: [u8; HEADER],
        segment: &[u8],
        readable: usize,
        writable: usize,
    ) -> Result<Operation, Refusal> {
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([a, b, c, d]) {
            VIRTIO_BLK_T_IN => Ok(Operation::Read(self.transfer(sector, writable)?)),
            VIRTIO_BLK_T_OUT if self.read_only => Err(Refusal::Invalid),
            VIRTIO_BLK_T_OUT => Ok(Operation::Write(self.transfer(sector, readable)?)),
            VIRTIO_BLK_T_FLUSH => Ok(Operation::Flush),
            VIRTIO_BLK_T_GET_ID => Ok(Operation::GetId),
            VIRTIO_BLK_T_DISCARD if self.discard => match self.segment(segment, readable)? {
                // Only write zeroes has the flag (`virtio 1.4 §5.2.6.2`).
                (range, false) => Ok(Operation::Discard(range)),
                (_, true) => Err(Refusal::Unsupported),
            },
            VIRTIO_BLK_T_WRITE_ZEROES if self.zero => {
                let (range, unmap) = self.segment(segment, readable)?;
                Ok(Operation::WriteZeroes { range, unmap: unmap && self.discard })
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    /// The offset of a transfer of `len` bytes at `sector`.
    fn transfer(&self, sector: u64, len: usize) -> Result<u64, Refusal> {
        let len = u64::try_from(len).ok().filter(|len| *len <= MAX_TRANSFER).ok_or(Refusal::Invalid)?;
        Ok(self.range(sector, len)?.offset)
    }

    /// The range of `len` bytes at `sector`, which must be whole sectors, but not whole blocks of the disk: the block
    /// size is only a hint for performance, and the protocol's unit is the sector (`virtio 1.4 §5.2.5`). Boot loaders
    /// read single sectors of any disk.
    fn range(&self, sector: u64, len: u64) -> Result<Range, Refusal> {
        let Geometry { sectors, .. } = self.geometry;
        let offset = sector.checked_mul(SECTOR).ok_or(Refusal::Invalid)?;
        let end = offset.checked_add(len).ok_or(Refusal::Invalid)?;
        // Cannot overflow: the disk's size in bytes is that of a file.
        let is_inside = end <= sectors.saturating_mul(SECTOR);
        if len.is_multiple_of(SECTOR) && is_inside { Ok(Range { offset, len }) } else { Err(Refusal::Invalid) }
    }

    /// The range and the unmap flag of a discard or write zeroes request, which must have one segment.
    fn segment(&self, segment: &[u8], readable: usize) -> Result<(Range, bool), Refusal> {
        let segment: [u8; SEGMENT] = segment.try_into().map_err(|_| Refusal::Invalid)?;
        let [sector @ .., a, b, c, d, e, f, g, h] = segment;
        let (count, flags) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
            return Err(Refusal::Unsupported);
        }
        if readable != SEGMENT || count == 0 || count > MAX_RANGE {
            return Err(Refusal::Invalid);
        }
        let range = self.range(u64::from_le_bytes(sector), u64::from(count) * SECTOR)?;
        Ok((range, flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Abilities = Abilities {
        geometry: Geometry { sectors: 64, block_size: 512, physical_exponent: 0 },
        read_only: false,
        zero: true,
        discard: true,
    };
    const FOUR_K: Abilities =
        Abilities { geometry: Geometry { block_size: 4096, physical_exponent: 0, ..DISK.geometry }, ..DISK };

    fn header(kind: u32, sector: u64) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        header
    }

    fn segment(sector: u64, count: u32, flags: u32) -> [u8; SEGMENT] {
        let mut segment = [0; SEGMENT];
        segment[..8].copy_from_slice(&sector.to_le_bytes());
        segment[8..12].copy_from_slice(&count.to_le_bytes());
        segment[12..].copy_from_slice(&flags.to_le_bytes());
        segment
    }

    #[test]
    fn transfers_lie_within_the_disk_however_large_the_numbers_are() {
        let read = |disk: &Abilities, sector, len| disk.parse(header(VIRTIO_BLK_T_IN, sector), &[], 0, len);
        assert_eq!(read(&DISK, 63, 512), Ok(Operation::Read(63 * 512)));
        assert_eq!(read(&DISK, 64, 0), Ok(Operation::Read(64 * 512)));
        for (sector, len) in [(63, 1024), (64, 512), (0, 511), (u64::MAX, 512), (1 << 55, 0), (u64::MAX / 512, 512)] {
            assert_eq!(read(&DISK, sector, len), Err(Refusal::Invalid), "{sector} {len}");
        }
        assert_eq!(read(&DISK, 0, usize::MAX & !511), Err(Refusal::Invalid));
        let large = Abilities { geometry: Geometry { sectors: 1 << 40, ..DISK.geometry }, ..DISK };
        assert_eq!(read(&large, 1 << 39, 256 << 20), Ok(Operation::Read(1 << 48)));
        assert_eq!(read(&large, 1 << 39, (256 << 20) + 512), Err(Refusal::Invalid));
        assert_eq!(DISK.parse(header(VIRTIO_BLK_T_OUT, 2), &[], 1024, 0), Ok(Operation::Write(1024)));
    }

    #[test]
    fn a_disk_with_larger_blocks_takes_single_sectors() {
        let read = |sector, len| FOUR_K.parse(header(VIRTIO_BLK_T_IN, sector), &[], 0, len);
        assert_eq!(read(8, 4096), Ok(Operation::Read(4096)));
        assert_eq!(read(1, 4096), Ok(Operation::Read(512)));
        assert_eq!(read(9, 512), Ok(Operation::Read(9 * 512)));
        assert_eq!(read(8, 4095), Err(Refusal::Invalid));
        assert_eq!(FOUR_K.parse(header(VIRTIO_BLK_T_OUT, 3), &[], 512, 0), Ok(Operation::Write(3 * 512)));
        let range = Range { offset: 512, len: 1024 };
        let discard = FOUR_K.parse(header(VIRTIO_BLK_T_DISCARD, 0), &segment(1, 2, 0), SEGMENT, 0);
        assert_eq!(discard, Ok(Operation::Discard(range)));
    }

    #[test]
    fn a_read_only_disk_is_read_and_not_written() {
        let disk = Abilities { read_only: true, zero: false, discard: false, ..DISK };
        assert_eq!(disk.parse(header(VIRTIO_BLK_T_OUT, 0), &[], 512, 0), Err(Refusal::Invalid));
        assert_eq!(disk.parse(header(VIRTIO_BLK_T_IN, 0), &[], 0, 512), Ok(Operation::Read(0)));
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(disk.parse(header(kind, 0), &segment(0, 1, 0), 16, 0), Err(Refusal::Unsupported));
        }
    }

    #[test]
    fn a_range_is_one_segment_of_bounded_length_within_the_disk() {
        let range = Range { offset: 512, len: 1024 };
        let parse = |kind, segment: &[u8]| DISK.parse(header(kind, 0), segment, segment.len(), 0);
        assert_eq!(parse(VIRTIO_BLK_T_DISCARD, &segment(1, 2, 0)), Ok(Operation::Discard(range)));
        for unmap in [false, true] {
            let expected = Ok(Operation::WriteZeroes { range, unmap });
            assert_eq!(parse(VIRTIO_BLK_T_WRITE_ZEROES, &segment(1, 2, unmap.into())), expected);
        }
        assert_eq!(parse(VIRTIO_BLK_T_DISCARD, &segment(1, 2, 1)), Err(Refusal::Unsupported));
        assert_eq!(parse(VIRTIO_BLK_T_WRITE_ZEROES, &segment(1, 2, 2)), Err(Refusal::Unsupported));
        for (sector, count) in [(0, 0), (63, 2), (64, 1), (u64::MAX, 1), (0, u32::MAX), (0, MAX_RANGE + 1)] {
            assert_eq!(parse(VIRTIO_BLK_T_DISCARD, &segment(sector, count, 0)), Err(Refusal::Invalid), "{sector}");
        }
        assert_eq!(parse(VIRTIO_BLK_T_DISCARD, &[0; 8]), Err(Refusal::Invalid));
        let two = DISK.parse(header(VIRTIO_BLK_T_DISCARD, 0), &segment(1, 2, 0), 32, 0);
        assert_eq!(two, Err(Refusal::Invalid));
    }

    #[test]
    fn a_request_that_was_not_offered_is_unsupported() {
        let disk = Abilities { zero: false, discard: false, ..DISK };
        for kind in [2, 3, 5, 7, VIRTIO_BLK_T_SECURE_ERASE, VIRTIO_BLK_T_ZONE_REPORT, u32::MAX] {
            assert_eq!(DISK.parse(header(kind, 0), &segment(0, 1, 0), 16, 512), Err(Refusal::Unsupported), "{kind}");
        }
        assert_eq!(disk.parse(header(VIRTIO_BLK_T_DISCARD, 0), &segment(0, 1, 0), 16, 0), Err(Refusal::Unsupported));
    }

    #[test]
    fn an_image_that_keeps_its_space_is_zeroed_and_never_discarded() {
        let disk = Abilities { discard: false, ..DISK };
        let parse = |kind, flags| disk.parse(header(kind, 0), &segment(1, 2, flags), 16, 0);
        let range = Range { offset: 512, len: 1024 };
        for flags in [0, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP] {
            assert_eq!(parse(VIRTIO_BLK_T_WRITE_ZEROES, flags), Ok(Operation::WriteZeroes { range, unmap: false }));
        }
        assert_eq!(parse(VIRTIO_BLK_T_DISCARD, 0), Err(Refusal::Unsupported));
    }
}
