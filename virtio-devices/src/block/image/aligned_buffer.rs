//! Memory for transfers that bypass the page cache.

use crate::block::geometry::MAX_BLOCK;

/// Memory aligned to any block size.
pub(crate) struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl AlignedBuffer {
    /// `len` zero bytes.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + MAX_BLOCK as usize];
        let start = bytes.as_ptr().align_offset(MAX_BLOCK as usize).min(MAX_BLOCK as usize);
        Self { bytes, start }
    }

    /// The bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> &mut [u8] {
        let end = (self.start + len).min(self.bytes.len());
        &mut self.bytes[self.start..end]
    }
}
