//! Size and blocks of a disk.

/// The unit of addresses and lengths in bytes, independent of the block size.
pub(crate) const SECTOR: u64 = 512;
/// The largest block in bytes.
pub(crate) const MAX_BLOCK: u32 = 64 << 10;

/// Size and blocks of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Size in sectors of 512 bytes.
    pub sectors: u64,
    /// The block size in bytes, a power of two from 512 to 65,536. Transfers need not be multiples of it.
    pub block_size: u32,
    /// The size of physical blocks, in blocks, as a power of two, at most 7.
    pub physical_exponent: u8,
}
