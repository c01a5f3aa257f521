//! Output that waits for a reader.

use std::collections::VecDeque;

/// Bytes of buffered output; the same as in Cloud Hypervisor.
pub(crate) const CAPACITY: usize = 1 << 20;

/// The most recent unread output, at most [`CAPACITY`] bytes.
#[derive(Debug, Default)]
pub(crate) struct Backlog(VecDeque<u8>);

impl Backlog {
    /// True if it is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends `bytes`. If there is no room for all, the oldest output is dropped.
    pub(crate) fn keep(&mut self, bytes: &[u8]) {
        let bytes = bytes.get(bytes.len().saturating_sub(CAPACITY)..).unwrap_or(bytes);
        let excess = (self.0.len() + bytes.len()).saturating_sub(CAPACITY);
        self.0.drain(..excess);
        self.0.extend(bytes);
    }

    /// All output, the oldest first.
    pub(crate) fn all(&self) -> Vec<u8> {
        self.0.iter().copied().collect()
    }

    /// The oldest output, as much as is contiguous in memory.
    pub(crate) fn oldest(&self) -> &[u8] {
        self.0.as_slices().0
    }

    /// Removes the oldest `count` bytes, which were read. Frees the memory once empty.
    pub(crate) fn taken(&mut self, count: usize) {
        self.0.drain(..count.min(self.0.len()));
        if self.0.is_empty() {
            self.0 = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(backlog: &mut Backlog) -> Vec<u8> {
        let mut bytes = Vec::new();
        while !backlog.is_empty() {
            let part = backlog.oldest().to_vec();
            backlog.taken(part.len());
            bytes.extend(part);
        }
        bytes
    }

    #[test]
    fn the_most_recent_output_is_kept_in_its_order() {
        let mut backlog = Backlog::default();
        let output: Vec<u8> = (0..3 * CAPACITY + 7).map(|n| (n % 251) as u8).collect();
        for part in output.chunks(4099) {
            backlog.keep(part);
            assert!(backlog.0.len() <= CAPACITY);
        }
        assert!(all(&mut backlog) == output[output.len() - CAPACITY..]);
        backlog.keep(&output);
        assert!(all(&mut backlog) == output[output.len() - CAPACITY..]);
        assert_eq!(backlog.0.capacity(), 0);
    }

    #[test]
    fn taken_output_is_not_given_again() {
        let mut backlog = Backlog::default();
        backlog.keep(b"hello world");
        backlog.taken(6);
        backlog.keep(b"!");
        assert_eq!(all(&mut backlog), b"world!");
    }
}
