//! The cost that a port has caused to others, which outlives its driver's resets.

pub(super) mod debt;
pub(super) mod waits;

use parking_lot::Mutex;

use self::debt::Debt;
use self::waits::Waits;

/// The account of a port.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// The cost of its receive rings that senders are not charged for.
    pub debt: Debt,
    /// The time that senders have waited for its buffers.
    pub waits: Mutex<Waits>,
}
