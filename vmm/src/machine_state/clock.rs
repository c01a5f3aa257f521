//! The guest's clocks: KVM's clock and the time stamp counter.
//!
//! The state has their values at one moment. The clocks advance while the guest is saved, as if a laptop's lid was
//! closed: KVM's clock by the difference of the two hosts' real time, the counter by the same time at its frequency.

use serde::{Deserialize, Serialize};

/// Frequency difference that is not compensated, in parts per million: guest clock drivers correct that much.
const TOLERANCE_PPM: u64 = 250;

/// Guest clocks at the time of the save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClockState {
    /// KVM's clock, in nanoseconds since the guest started.
    pub kvmclock: u64,
    /// Real time of the host at the save, in nanoseconds since 1970 without leap seconds; `None` if unknown.
    pub realtime: Option<u64>,
    /// Time stamp counter of the first vCPU.
    pub tsc: u64,
    /// Frequency in kHz.
    pub tsc_khz: u32,
    /// ACPI timer, in nanoseconds since its start; 0 without firmware.
    pub pm_timer: u64,
}

/// Unsupported frequency of a time stamp counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoFrequency {
    /// Frequency of the guest, in kHz.
    pub guest: u32,
    /// Frequency of this host, in kHz.
    pub host: u32,
}

impl ClockState {
    /// Returns the frequency to set for the guest's counters, or `None` if the host's, `host` kHz, is close enough.
    /// `scales`: the host supports TSC scaling.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot offer the guest's frequency.
    pub fn frequency(&self, host: u32, scales: bool) -> Result<Option<u32>, NoFrequency> {
        let guest = self.tsc_khz;
        let difference = u64::from(guest.abs_diff(host)) * 1_000_000;
        match () {
            () if guest == host => Ok(None),
            // KVM accepts the difference without scaling as well.
            () if guest > 0 && difference <= u64::from(host) * TOLERANCE_PPM => Ok(None),
            () if guest > 0 && scales => Ok(Some(guest)),
            () => Err(NoFrequency { guest, host }),
        }
    }

    /// Returns the first vCPU's counter when KVM's clock is at `kvmclock` nanoseconds; never less than the saved one.
    pub fn tsc_at(&self, kvmclock: u64) -> u64 {
        let elapsed = u128::from(kvmclock.saturating_sub(self.kvmclock));
        let ticks = elapsed * u128::from(self.tsc_khz) / 1_000_000;
        // The counter has 64 bits and wraps.
        self.tsc.wrapping_add(ticks as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(tsc_khz: u32) -> ClockState {
        ClockState { kvmclock: 5_000_000_000, realtime: None, tsc: 100, tsc_khz, pm_timer: 0 }
    }

    #[test]
    fn a_frequency_is_kept_scaled_or_refused() {
        for (guest, host, scales, expected) in [
            (2_000_000, 2_000_000, false, Ok(None)),
            (2_000_500, 2_000_000, false, Ok(None)),
            (1_999_500, 2_000_000, true, Ok(None)),
            (2_000_501, 2_000_000, true, Ok(Some(2_000_501))),
            (2_000_501, 2_000_000, false, Err(NoFrequency { guest: 2_000_501, host: 2_000_000 })),
            (1_999_499, 2_000_000, false, Err(NoFrequency { guest: 1_999_499, host: 2_000_000 })),
            (3_000_000, 2_000_000, true, Ok(Some(3_000_000))),
            (0, 2_000_000, true, Err(NoFrequency { guest: 0, host: 2_000_000 })),
            (u32::MAX, 1, false, Err(NoFrequency { guest: u32::MAX, host: 1 })),
        ] {
            assert_eq!(clock(guest).frequency(host, scales), expected, "{guest} on {host}");
        }
    }

    #[test]
    fn the_counter_advances_by_the_time_that_the_clock_advanced() {
        let clock = clock(2_500_000);
        assert_eq!(clock.tsc_at(5_000_000_000), 100);
        assert_eq!(clock.tsc_at(5_000_000_004), 110);
        assert_eq!(clock.tsc_at(6_000_000_000), 2_500_000_100);
        // The target's real time may be earlier.
        assert_eq!(clock.tsc_at(4_000_000_000), 100);
        let _ = self::clock(u32::MAX).tsc_at(u64::MAX);
    }
}
