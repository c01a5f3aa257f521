//! What a port has cost others, which outlives its driver's resets.

use parking_lot::Mutex;

use super::debt::Debt;
use super::waits::Waits;

/// The account of a port.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// What its receive rings have cost beyond what senders are charged for.
    pub debt: Debt,
    /// How long senders have waited for its buffers.
    pub waits: Mutex<Waits>,
}
