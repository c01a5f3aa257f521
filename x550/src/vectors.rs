//! Causes and masks of the MSI-X vectors of a function, a bit for each.

/// The state of up to 64 vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Vectors {
    /// Causes that were not sent, or were sent and not cleared.
    pub(crate) cause: u64,
    /// Vectors that may be sent.
    pub(crate) enabled: u64,
    /// Vectors whose cause is cleared when they are sent.
    pub(crate) auto_clear: u64,
    /// Vectors that are disabled when they are sent, if the function enables that.
    pub(crate) auto_mask: u64,
}

impl Vectors {
    /// Sets causes. Returns the vectors to send: those enabled whose cause was clear.
    pub(crate) fn raise(&mut self, causes: u64, masks: bool) -> u64 {
        let new = causes & !self.cause;
        self.cause |= causes;
        self.send(new, masks)
    }

    /// Enables vectors. Returns those to send: their cause is set.
    pub(crate) fn enable(&mut self, vectors: u64, masks: bool) -> u64 {
        self.enabled |= vectors;
        self.send(vectors, masks)
    }

    /// Disables vectors.
    pub(crate) fn disable(&mut self, vectors: u64) {
        self.enabled &= !vectors;
    }

    fn send(&mut self, candidates: u64, masks: bool) -> u64 {
        let sent = candidates & self.cause & self.enabled;
        self.cause &= !(sent & self.auto_clear);
        if masks {
            self.enabled &= !(sent & self.auto_mask);
        }
        sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_sent_once_until_it_is_cleared() {
        let mut vectors = Vectors { enabled: 0b11, ..Vectors::default() };
        assert_eq!((vectors.raise(0b01, false), vectors.raise(0b01, false)), (0b01, 0));
        assert_eq!(vectors.raise(0b11, false), 0b10);
        vectors.cause = 0;
        assert_eq!(vectors.raise(0b01, false), 0b01);
    }

    #[test]
    fn a_cause_with_auto_clear_is_sent_each_time() {
        let mut vectors = Vectors { enabled: 1, auto_clear: 1, ..Vectors::default() };
        assert_eq!((vectors.raise(1, false), vectors.raise(1, false), vectors.cause), (1, 1, 0));
    }

    #[test]
    fn a_masked_cause_waits_for_its_vector() {
        let mut vectors = Vectors { auto_clear: 1, ..Vectors::default() };
        assert_eq!((vectors.raise(1, false), vectors.enable(2, false), vectors.enable(1, false)), (0, 0, 1));
        assert_eq!(vectors.enable(1, false), 0, "sent once");
        vectors.disable(1);
        assert_eq!(vectors.raise(1, false), 0);
    }

    #[test]
    fn a_vector_with_auto_mask_is_sent_once_per_enable() {
        let mut vectors = Vectors { enabled: 1, auto_clear: 1, auto_mask: 1, ..Vectors::default() };
        assert_eq!((vectors.raise(1, true), vectors.raise(1, true), vectors.enabled), (1, 0, 0));
        assert_eq!(vectors.enable(1, true), 1, "a cause waited");
        assert_eq!(vectors.enable(1, true), 0);
        assert_eq!((vectors.raise(1, false), vectors.enabled), (1, 1), "not enabled for the function");
    }
}
