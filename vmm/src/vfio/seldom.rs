//! Rate limit for log messages about events that a guest can repeat.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts an event, and returns true if it should be logged: the log grows with the logarithm of the number.
pub(super) fn counted(counter: &AtomicU64) -> bool {
    (counter.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two()
}
