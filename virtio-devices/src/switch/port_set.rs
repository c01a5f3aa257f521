//! A set of ports.

use super::table::PortIndex;

/// A set of ports. It takes no memory before the first is added.
#[derive(Debug, Default)]
pub(crate) struct PortSet {
    /// A bit for each port.
    words: Vec<u64>,
    len: usize,
}

/// The word of a port, and its bit.
fn place(port: PortIndex) -> (usize, u64) {
    (usize::from(port / 64), 1 << (port % 64))
}

impl PortSet {
    /// Adds a port.
    pub(crate) fn add(&mut self, port: PortIndex) {
        let (word, bit) = place(port);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        if let Some(word) = self.words.get_mut(word).filter(|word| **word & bit == 0) {
            *word |= bit;
            self.len += 1;
        }
    }

    /// True if a port is in it.
    pub(crate) fn has(&self, port: PortIndex) -> bool {
        let (word, bit) = place(port);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// The number of ports.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// True if there is none.
    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all, and keeps the memory.
    pub(crate) fn clear(&mut self) {
        if self.len != 0 {
            self.words.fill(0);
            self.len = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_added_until_it_is_cleared() {
        let mut set = PortSet::default();
        for port in [0, 63, 64, 4095, 64] {
            set.add(port);
        }
        let all = |set: &PortSet| (0..=PortIndex::MAX).filter(|port| set.has(*port)).collect::<Vec<_>>();
        assert_eq!((all(&set), set.len(), set.is_empty()), (vec![0, 63, 64, 4095], 4, false));
        set.clear();
        assert_eq!((all(&set), set.len(), set.is_empty()), (vec![], 0, true));
    }
}
