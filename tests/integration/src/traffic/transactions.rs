//! Many short transactions, one after the other: the number per second, and the duration of slow ones.

use std::time::{Duration, Instant};

/// Transactions that are not counted: after these, addresses are resolved and caches are warm.
const WARM_UP: usize = 100;

/// Repeats `transact` for `limit`. Returns the output of the measuring programs: the number of transactions per second,
/// and the 99th percentile of their duration in us.
pub fn transactions(limit: Duration, mut transact: impl FnMut()) -> String {
    (0..WARM_UP).for_each(|_| transact());
    let mut times = Vec::new();
    let started = Instant::now();
    let mut last = Duration::ZERO;
    while last < limit {
        transact();
        let now = started.elapsed();
        times.push(now - last);
        last = now;
    }
    times.sort_unstable();
    let slow = times[times.len() * 99 / 100];
    format!("{:.1} {:.1}", times.len() as f64 / last.as_secs_f64(), slow.as_secs_f64() * 1e6)
}
