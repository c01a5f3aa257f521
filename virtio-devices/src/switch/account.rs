//! The cost that a port has caused to others, which outlives its driver's resets.

use parking_lot::Mutex;

use super::debt::Debt;
use super::waits::Waits;

/// The account of a port.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// The cost of its receive rings that senders are not charged for.
    pub debt: Debt,
    /// The time that senders have waited for its buffers.
    pub waits: Mutex<Waits>,
}
