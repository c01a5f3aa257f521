//! The ACPI power management timer (`ACPI 6.5 §4.8.3.3`), by which firmware waits.
//!
//! Firmware for Cloud Hypervisor has the port built in. Linux finds it by the FADT, and calibrates the time stamp
//! counter by it where it does not use KVM's clock.

use std::ops::Range;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::arch::x86_64::layout::PM_TIMER_PORT;
use crate::exits::PortHandler;

/// The ports.
pub(super) const PORTS: Range<u16> = PM_TIMER_PORT..PM_TIMER_PORT + 4;
/// Frequency in Hz.
const FREQUENCY: u128 = 3_579_545;

/// A counter of 32 bits that starts at 0 when the machine is powered on.
pub(super) struct PmTimer {
    /// A moment, and how long it had run then.
    start: Mutex<(Instant, Duration)>,
}

impl PmTimer {
    pub(super) fn new() -> Self {
        Self { start: Mutex::new((Instant::now(), Duration::ZERO)) }
    }

    /// Time for which it has run.
    pub(super) fn elapsed(&self) -> Duration {
        let (start, before) = *self.start.lock();
        before.saturating_add(start.elapsed())
    }

    /// From now on it has run for `elapsed`.
    pub(super) fn set(&self, elapsed: Duration) {
        *self.start.lock() = (Instant::now(), elapsed);
    }
}

/// The counter after `elapsed`; it wraps.
fn ticks(elapsed: Duration) -> u32 {
    (elapsed.as_nanos() * FREQUENCY / 1_000_000_000) as u32
}

impl PortHandler for PmTimer {
    fn read(&self, offset: u16, data: &mut [u8]) {
        let bytes = ticks(self.elapsed()).to_le_bytes();
        for (byte, value) in data.iter_mut().zip(bytes.iter().skip(offset.into()).chain(std::iter::repeat(&0xff))) {
            *byte = *value;
        }
    }

    /// It is read-only.
    fn write(&self, _offset: u16, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_at_its_frequency_and_wraps() {
        assert_eq!(ticks(Duration::ZERO), 0);
        assert_eq!(ticks(Duration::from_secs(1)), 3_579_545);
        assert_eq!(ticks(Duration::from_micros(1)), 3);
        assert_eq!(ticks(Duration::from_secs(1200)), (1200 * 3_579_545u64 % (1 << 32)) as u32);
        assert!(ticks(Duration::MAX) > 0);
    }

    #[test]
    fn one_access_reads_one_moment_and_it_never_goes_back() {
        let timer = PmTimer::new();
        let read = || {
            let mut data = [0; 4];
            timer.read(0, &mut data);
            u32::from_le_bytes(data)
        };
        let values: Vec<_> = (0..1000).map(|_| read()).collect();
        assert!(values.is_sorted());
        let mut beyond = [0; 8];
        timer.read(3, &mut beyond);
        assert_eq!(beyond[1..], [0xff; 7]);
    }
}
