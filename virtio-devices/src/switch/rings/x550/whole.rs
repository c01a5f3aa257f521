//! A frame in a private buffer.

use std::ops::{Deref, DerefMut};

/// A frame. Its buffer is used again without being cleared: that would cost as much as another copy of each frame.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    /// The frame, and remains of longer ones behind it.
    buffer: Vec<u8>,
    len: usize,
}

impl Whole {
    /// Empties the frame.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends `more` bytes of any value, for the caller to write.
    pub(super) fn extend(&mut self, more: usize) -> &mut [u8] {
        let from = self.len;
        self.len += more;
        if self.buffer.len() < self.len {
            self.buffer.resize(self.len, 0);
        }
        self.buffer.get_mut(from..self.len).unwrap_or_default()
    }

    /// Appends `bytes`.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.extend(bytes.len()).copy_from_slice(bytes);
    }

    /// Shortens the frame to `len` bytes, if it is longer.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for Whole {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(..self.len).unwrap_or_default()
    }
}

impl DerefMut for Whole {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.get_mut(..self.len).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_frame_has_no_byte_of_the_one_before() {
        let mut whole = Whole::default();
        whole.append(&[1; 9]);
        whole.clear();
        assert!(whole.is_empty());
        whole.append(&[2, 3]);
        whole.extend(2).fill(0);
        assert_eq!(*whole, [2, 3, 0, 0]);
        whole.truncate(3);
        whole.truncate(5);
        assert_eq!(*whole, [2, 3, 0]);
    }
}
