//! What happens again and again, and is logged seldom.

use std::sync::atomic::{AtomicU64, Ordering};

/// One more, and whether to log it: the log grows with the logarithm of the number.
pub(super) fn counted(counter: &AtomicU64) -> bool {
    (counter.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two()
}
