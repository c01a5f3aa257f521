//! A port's debt: the time that senders' workers have spent on its receive rings, which its own turns pay for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The debt beyond which a port gets no frames before it has paid, in bytes that are copied in the same time.
const LIMIT: usize = 64 << 10;

/// A port's debt, in bytes that are copied in the same time.
#[derive(Debug, Default)]
pub(crate) struct Debt {
    owed: AtomicUsize,
    /// The debt has exceeded the limit, and is not paid.
    is_due: AtomicBool,
}

impl Debt {
    /// Adds `price` to the debt. Returns true if it has now exceeded the limit: the caller makes the port's worker
    /// collect it.
    pub(crate) fn add(&self, price: usize) -> bool {
        // One batch adds less than 2^20, and none adds anything while the debt is due.
        let owed = self.owed.fetch_add(price, Ordering::Relaxed).saturating_add(price);
        owed > LIMIT && !self.is_due.swap(true, Ordering::AcqRel)
    }

    /// True if the port gets no frames before it has paid.
    pub(crate) fn is_due(&self) -> bool {
        self.is_due.load(Ordering::Acquire)
    }

    /// Pays at most `most`. Returns the amount paid.
    pub(crate) fn pay(&self, most: usize) -> usize {
        let owed = self.owed.load(Ordering::Relaxed);
        let paid = owed.min(most);
        if paid != 0 {
            self.owed.fetch_sub(paid, Ordering::Relaxed);
        }
        if paid == owed && self.is_due() {
            self.is_due.store(false, Ordering::Release);
        }
        paid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debt_is_collected_once_and_ends_when_it_is_paid() {
        let debt = Debt::default();
        assert!(!debt.add(LIMIT) && !debt.is_due());
        assert!(debt.add(1) && debt.is_due() && !debt.add(9));
        assert_eq!((debt.pay(LIMIT), debt.is_due()), (LIMIT, true));
        assert_eq!((debt.pay(LIMIT), debt.is_due()), (10, false));
        assert_eq!(debt.pay(LIMIT), 0);
        assert!(debt.add(LIMIT + 1));
    }
}
