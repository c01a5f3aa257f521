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

/// Vectors of an access, a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub(crate) struct Sent {
    /// Vectors to send now, because of their queues.
    pub(crate) now: u64,
    /// Vectors to send now because of other causes. They are not moderated, and report nothing of queues.
    pub(crate) other: u64,
    /// Vectors to send when their intervals end.
    pub(crate) later: u64,
}

impl Sent {
    /// Vectors to send now.
    pub(crate) const fn now(now: u64) -> Self {
        Self { now, other: 0, later: 0 }
    }
}

impl Vectors {
    /// Sets causes. Returns those that were clear.
    pub(crate) fn set(&mut self, causes: u64) -> u64 {
        let new = causes & !self.cause;
        self.cause |= causes;
        new
    }

    /// Sets causes. Returns the vectors to send: those enabled whose cause was clear.
    pub(crate) fn raise(&mut self, causes: u64, masks: bool) -> u64 {
        let new = self.set(causes);
        self.send(new, masks)
    }

    /// Enables vectors. Returns those to send: their cause is set. The interval of `running` ones has not ended.
    pub(crate) fn enable(&mut self, vectors: u64, masks: bool, running: u64) -> Sent {
        self.enabled |= vectors;
        Sent { later: vectors & self.cause & running, ..Sent::now(self.send(vectors & !running, masks)) }
    }

    /// Disables vectors.
    pub(crate) fn disable(&mut self, vectors: u64) {
        self.enabled &= !vectors;
    }

    /// Sends those of the candidates that are enabled and whose cause is set. Returns them.
    pub(crate) fn send(&mut self, candidates: u64, masks: bool) -> u64 {
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
        assert_eq!(
            (vectors.raise(1, false), vectors.enable(2, false, 0).now, vectors.enable(1, false, 0).now),
            (0, 0, 1)
        );
        assert_eq!(vectors.enable(1, false, 0), Sent::default(), "sent once");
        vectors.disable(1);
        assert_eq!(vectors.raise(1, false), 0);
    }

    #[test]
    fn a_vector_with_auto_mask_is_sent_once_per_enable() {
        let mut vectors = Vectors { enabled: 1, auto_clear: 1, auto_mask: 1, ..Vectors::default() };
        assert_eq!((vectors.raise(1, true), vectors.raise(1, true), vectors.enabled), (1, 0, 0));
        assert_eq!(vectors.enable(1, true, 0), Sent::now(1), "a cause waited");
        assert_eq!(vectors.enable(1, true, 0), Sent::default());
        assert_eq!((vectors.raise(1, false), vectors.enabled), (1, 1), "not enabled for the function");
    }

    #[test]
    fn an_enable_within_the_interval_waits_if_there_is_a_cause() {
        let mut vectors = Vectors { cause: 0b011, auto_clear: !0, ..Vectors::default() };
        assert_eq!(vectors.enable(0b111, false, 0b110), Sent { now: 0b001, other: 0, later: 0b010 });
        assert_eq!((vectors.cause, vectors.enabled, vectors.send(0b010, false)), (0b010, 0b111, 0b010));
    }
}
