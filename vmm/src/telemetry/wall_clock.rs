//! Date and time of events, in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The present time, in the format of RFC 3339.
pub(super) fn now() -> String {
    rfc3339(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// The time `since` 1970, with microseconds.
fn rfc3339(since: Duration) -> String {
    const DAY: u64 = 24 * 60 * 60;
    let (days, second) = (since.as_secs() / DAY, since.as_secs() % DAY);
    let [year, month, day] = date(days);
    let (hour, minute, second, micros) = (second / 3600, second / 60 % 60, second % 60, since.subsec_micros());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Year, month and day of the Gregorian calendar, `days` after 1 January 1970.
fn date(days: u64) -> [u64; 3] {
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    // 400 years have 146,097 days, wherever they begin.
    let (mut year, mut rest) = (1970 + days / 146_097 * 400, days % 146_097);
    while rest >= 365 + u64::from(is_leap(year)) {
        rest -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in months {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    [year, month, rest + 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_rfc_3339_has_them() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000007Z"),
            (951_782_399, "2000-02-28T23:59:59.000007Z"),
            (951_782_400, "2000-02-29T00:00:00.000007Z"),
            (951_868_800, "2000-03-01T00:00:00.000007Z"),
            (1_705_314_645, "2024-01-15T10:30:45.000007Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000007Z"),
            (32_503_680_000, "3000-01-01T00:00:00.000007Z"),
        ] {
            assert_eq!(rfc3339(Duration::new(seconds, 7_999)), expected);
        }
    }
}
