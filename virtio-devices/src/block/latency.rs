//! Latencies of a disk's reads and writes, from taking them off the queue to completion.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::device::counters::CounterText;

/// The latencies of one disk since it was plugged in.
#[derive(Debug, Default)]
pub struct BlockLatencies {
    pub(super) read: Latency,
    pub(super) write: Latency,
}

/// The latency of one kind of request.
#[derive(Debug)]
pub(super) struct Latency {
    /// In nanoseconds, as all values here.
    min: AtomicU64,
    max: AtomicU64,
    sum: AtomicU64,
    count: AtomicU64,
}

impl Default for Latency {
    fn default() -> Self {
        let [max, sum, count] = [const { AtomicU64::new(0) }; 3];
        Self { min: AtomicU64::new(u64::MAX), max, sum, count }
    }
}

impl Latency {
    /// Counts a request that took `took`.
    pub(super) fn note(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.min.fetch_min(nanos, Ordering::Relaxed);
        self.max.fetch_max(nanos, Ordering::Relaxed);
        self.sum.fetch_add(nanos, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Release);
    }

    /// Least, most and mean in microseconds; `None` before the first request.
    fn micros(&self) -> Option<[u64; 3]> {
        let count = self.count.load(Ordering::Acquire);
        let [min, max, sum] = [&self.min, &self.max, &self.sum].map(|nanos| nanos.load(Ordering::Relaxed));
        Some([min, max, sum.checked_div(count)?].map(|nanos| nanos / 1000))
    }
}

impl BlockLatencies {
    /// Descriptions of its values: those of reads, then those of writes; each least, most and mean.
    pub const TEXTS: &'static [CounterText; 6] = &[
        text("read_latency_min", "Shortest time of a read, from taking it off the queue to its end."),
        text("read_latency_max", "Longest time of a read, from taking it off the queue to its end."),
        text("read_latency_avg", "Mean time of all reads, from taking them off the queue to their end."),
        text("write_latency_min", "Shortest time of a write, from taking it off the queue to its end."),
        text("write_latency_max", "Longest time of a write, from taking it off the queue to its end."),
        text("write_latency_avg", "Mean time of all writes, from taking them off the queue to their end."),
    ];

    /// The names and values in microseconds. Kinds of request that the driver never made are left out.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let (read, write) = Self::TEXTS.split_at(3);
        let named = |texts: &'static [CounterText], latency: &Latency| {
            latency.micros().map(|values| texts.iter().map(|text| text.name).zip(values))
        };
        [named(read, &self.read), named(write, &self.write)].into_iter().flatten().flatten()
    }
}

const fn text(name: &'static str, text: &'static str) -> CounterText {
    CounterText { name, unit: "microseconds", is_loss: false, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_is_known_once_there_was_a_request() {
        let latencies = BlockLatencies::default();
        assert_eq!(latencies.iter().count(), 0);
        for micros in [5, 2, 11] {
            latencies.write.note(Duration::from_micros(micros));
        }
        let expected = [("write_latency_min", 2), ("write_latency_max", 11), ("write_latency_avg", 6)];
        assert_eq!(latencies.iter().collect::<Vec<_>>(), expected);
        latencies.read.note(Duration::MAX);
        assert_eq!(latencies.iter().next(), Some(("read_latency_min", u64::MAX / 1000)));
    }
}
