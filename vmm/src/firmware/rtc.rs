//! The real-time clock of a PC (an MC146818), by which firmware tells the time.
//!
//! It shows the host's time in UTC and has no alarm, no interrupt and no memory. It cannot be set: what a guest writes
//! to it would be lost when the machine is powered off.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::exits::PortHandler;

/// The ports: index and data.
pub(super) const PORTS: Range<u16> = 0x70..0x72;

/// Registers, by index.
mod register {
    pub(super) const SECONDS: u8 = 0x00;
    pub(super) const MINUTES: u8 = 0x02;
    pub(super) const HOURS: u8 = 0x04;
    pub(super) const DAY_OF_WEEK: u8 = 0x06;
    pub(super) const DAY: u8 = 0x07;
    pub(super) const MONTH: u8 = 0x08;
    pub(super) const YEAR: u8 = 0x09;
    pub(super) const A: u8 = 0x0a;
    pub(super) const B: u8 = 0x0b;
    pub(super) const D: u8 = 0x0d;
    pub(super) const CENTURY: u8 = 0x32;
}

/// Register A: a time base of 32,768 Hz and a rate of 1,024 Hz, and no update in progress.
const A: u8 = 0x26;
/// Register B: hours from 0 to 23, in BCD.
const B: u8 = 0x02;
/// Register D: the battery is good.
const D: u8 = 0x80;
/// The bits of the index; the uppermost of the port masks NMIs, which has no effect here.
const INDEX: u8 = 0x7f;

/// The clock.
#[derive(Debug, Default)]
pub(super) struct Rtc {
    index: AtomicU8,
}

impl Rtc {
    /// The selected register.
    pub(super) fn index(&self) -> u8 {
        self.index.load(Ordering::Relaxed)
    }
}

impl PortHandler for Rtc {
    fn read(&self, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let (1, [byte]) = (offset, data) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            *byte = value(self.index.load(Ordering::Relaxed), now.as_secs());
        }
    }

    fn write(&self, offset: u16, data: &[u8]) {
        if let (0, [byte, ..]) = (offset, data) {
            self.index.store(byte & INDEX, Ordering::Relaxed);
        }
    }
}

/// The register `index` at `time` seconds after 1970 began.
fn value(index: u8, time: u64) -> u8 {
    let (days, seconds) = (time / 86_400, time % 86_400);
    let date = Date::of(days);
    match index {
        register::SECONDS => bcd(seconds % 60),
        register::MINUTES => bcd(seconds / 60 % 60),
        register::HOURS => bcd(seconds / 3600),
        // 1970 began on a Thursday, and Sunday is 1.
        register::DAY_OF_WEEK => bcd((days + 4) % 7 + 1),
        register::DAY => bcd(date.day),
        register::MONTH => bcd(date.month),
        register::YEAR => bcd(date.year % 100),
        register::CENTURY => bcd(date.year / 100 % 100),
        register::A => A,
        register::B => B,
        register::D => D,
        _ => 0,
    }
}

/// Two decimal digits.
const fn bcd(number: u64) -> u8 {
    (((number / 10 % 10) << 4) | (number % 10)) as u8
}

/// A day of the Gregorian calendar.
#[derive(Debug, PartialEq, Eq)]
struct Date {
    year: u64,
    month: u64,
    day: u64,
}

impl Date {
    /// The day that begins `days` days after 1970 began.
    ///
    /// Years are counted from March, so that a leap day is the last of its year.
    fn of(days: u64) -> Self {
        // From 1 March 0000, in eras of 400 years, which all have the same number of days.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        // Leap days so far in the era: one in 4 years, not in the last of 100 but in that of 400.
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        // Five months have 153 days, from March and from August on.
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
        Self { year: 400 * era + year + next, month, day }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_registers_hold_the_time_in_bcd() {
        let time = 1_709_210_096; // 2024-02-29 12:34:56, a Thursday.
        let registers = [0x32, 0x09, 0x08, 0x07, 0x06, 0x04, 0x02, 0x00];
        assert_eq!(registers.map(|index| value(index, time)), [0x20, 0x24, 0x02, 0x29, 0x05, 0x12, 0x34, 0x56]);
        assert_eq!([0x0a, 0x0b, 0x0c, 0x0d].map(|index| value(index, time)), [0x26, 0x02, 0x00, 0x80]);
        assert_eq!(value(0x32, 946_684_799), 0x19);
    }

    #[test]
    fn each_day_follows_the_one_before() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..200_000 {
            assert_eq!(Date::of(days), Date { year, month, day });
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let february = if leap { 29 } else { 28 };
            day += 1;
            if day > [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month as usize - 1] {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (month, year) = (1, year + 1);
            }
        }
    }

    #[test]
    fn it_shows_the_hosts_time() {
        let rtc = Rtc::default();
        let read = |index: u8| {
            rtc.write(0, &[index | 0x80]);
            let mut data = [0];
            rtc.read(1, &mut data);
            data[0]
        };
        let year = Date::of(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 86_400).year;
        assert!(read(0x32) == bcd(year / 100) && [bcd(year % 100), bcd((year + 1) % 100)].contains(&read(0x09)));
        // Set, and unchanged.
        rtc.write(1, &[0x99]);
        assert_ne!(read(0x32), 0x99);
    }

    proptest! {
        #[test]
        fn no_access_panics(
            steps in prop::collection::vec((0..2u16, prop::collection::vec(any::<u8>(), 1..5)), 0..64)
        ) {
            let rtc = Rtc::default();
            for (offset, mut data) in steps {
                rtc.write(offset, &data);
                rtc.read(offset, &mut data);
            }
        }

        #[test]
        fn every_register_has_a_value_at_any_time(index: u8, time: u64) {
            let value = value(index, time);
            prop_assert!(index > 9 || index % 2 == 1 || (value & 0xf) < 10);
        }
    }
}
