//! The rules for rate limits.

use std::collections::HashMap;
use std::time::Duration;

use virtio_devices::{RateLimit, RateLimits};
use vm_api::config::disk::RateLimitGroupConfig;
use vm_api::config::error::{ConfigError, Problem};
use vm_api::config::id::check_id;
use vm_api::config::rate::{BANDWIDTH, Names, OPS, RateLimiterConfig, TokenBucketConfig};

use crate::config::subject::Subject;

/// The most bytes, operations and milliseconds: clients read and write them as signed numbers of 64 bits.
const MOST: u64 = i64::MAX as u64;

/// Checks the limits of a device and plans them.
///
/// # Errors
///
/// Fails if a limit has no size or no time.
pub(crate) fn plan(limits: &RateLimiterConfig, subject: &Subject) -> Result<RateLimits, ConfigError> {
    for (bucket, names) in [(&limits.bandwidth, &BANDWIDTH), (&limits.ops, &OPS)] {
        bucket.iter().try_for_each(|bucket| check(bucket, names, subject))?;
    }
    Ok(limits_of(limits))
}

/// The limits of a configuration that has been checked.
pub(crate) fn limits_of(limits: &RateLimiterConfig) -> RateLimits {
    let limit = |bucket: &TokenBucketConfig| {
        let TokenBucketConfig { size, one_time_burst, refill_time } = *bucket;
        (size != 0 && refill_time != 0).then(|| RateLimit {
            size,
            one_time_burst: one_time_burst.unwrap_or_default(),
            refill: Duration::from_millis(refill_time),
        })
    };
    let RateLimiterConfig { bandwidth, ops } = limits;
    RateLimits { bandwidth: bandwidth.as_ref().and_then(limit), ops: ops.as_ref().and_then(limit) }
}

/// Checks the limits that disks share and plans them, by the ids of their groups.
///
/// # Errors
///
/// Fails if a group has no name or no limit, or another one's name.
pub(crate) fn plan_groups(groups: &[RateLimitGroupConfig]) -> Result<HashMap<String, RateLimits>, ConfigError> {
    let mut planned = HashMap::new();
    for RateLimitGroupConfig { id, rate_limiter_config } in groups {
        let subject = Subject::device("--rate-limit-group", Some(id), 0, 1);
        let fail = |problem| ConfigError::new(subject.bare(), problem);
        check_id(id).map_err(fail)?;
        let limits = rate_limiter_config.as_ref().map(|limits| plan(limits, &subject)).transpose()?.unwrap_or_default();
        if limits == RateLimits::default() {
            let what = "limits nothing; add bw_size and bw_refill_time, or ops_size and ops_refill_time".to_string();
            return Err(fail(Problem::Missing(what)));
        }
        if planned.insert(id.clone(), limits).is_some() {
            return Err(fail(Problem::InUse {
                what: "this id".to_string(),
                user: "another group".to_string(),
                remedy: "give each group its own".to_string(),
            }));
        }
    }
    Ok(planned)
}

fn check(bucket: &TokenBucketConfig, names: &Names, subject: &Subject) -> Result<(), ConfigError> {
    let fail = |key: &str, what: String| Err(ConfigError::new(subject.key(key, 0), Problem::Value(what)));
    let numbers = [
        (names.size, Some(bucket.size)),
        (names.one_time_burst, bucket.one_time_burst),
        (names.refill_time, Some(bucket.refill_time)),
    ];
    for (key, number) in numbers {
        if let Some(number) = number.filter(|number| *number > MOST) {
            let what = format!("more than a limit can have, {MOST}; give less, or leave the limit out");
            return Err(ConfigError::new(subject.key(key, number), Problem::Limit(what)));
        }
    }
    match (bucket.size, bucket.refill_time) {
        (0, 1..) => fail(names.size, format!("nothing could pass; give 1 or more, or 0 for {} too", names.refill_time)),
        (1.., 0) => fail(names.refill_time, format!("needs a time; give 1 or more, or 0 for {} too", names.size)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_api::config::disk::DiskConfig;

    fn limits(disk: &str) -> Result<RateLimits, String> {
        let config: DiskConfig = disk.parse().map_err(|error: ConfigError| error.to_string())?;
        let subject = Subject::device("--disk", None, 0, 1);
        let planned = config.rate_limiter_config.map(|limits| plan(&limits, &subject)).transpose();
        planned.map(Option::unwrap_or_default).map_err(|error| error.to_string())
    }

    #[test]
    fn each_limit_has_a_size_a_time_and_may_have_a_burst() {
        let ms = Duration::from_millis;
        let ops = RateLimit { size: 1000, one_time_burst: 0, refill: ms(100) };
        assert_eq!(
            limits("path=/a,ops_size=1000,ops_refill_time=100"),
            Ok(RateLimits { bandwidth: None, ops: Some(ops) })
        );
        let bandwidth = RateLimit { size: 1 << 20, one_time_burst: 7, refill: ms(1) };
        assert_eq!(
            limits("bw_refill_time=1,bw_one_time_burst=7,bw_size=1048576,ops_size=1000,path=/a,ops_refill_time=100"),
            Ok(RateLimits { bandwidth: Some(bandwidth), ops: Some(ops) })
        );
    }

    #[test]
    fn a_number_that_clients_cannot_read_back_is_refused() {
        assert_eq!(
            limits("path=/a,ops_size=0,ops_refill_time=0,ops_one_time_burst=9223372036854775808"),
            Err(
                "--disk ops_one_time_burst=9223372036854775808: more than a limit can have, 9223372036854775807; give \
                 less, or leave the limit out"
                    .to_string()
            )
        );
        assert!(limits("path=/a,ops_size=9223372036854775807,ops_refill_time=9223372036854775807").is_ok());
    }

    #[test]
    fn nothing_and_zero_are_no_limit() {
        for disk in ["path=/a", "path=/a,bw_size=0,bw_refill_time=0,ops_size=0,ops_one_time_burst=0,ops_refill_time=0"]
        {
            assert_eq!(limits(disk), Ok(RateLimits::default()), "{disk}");
        }
        assert_eq!("path=/a,bw_size=,ops_refill_time=".parse::<DiskConfig>().unwrap().rate_limiter_config, None);
    }

    #[test]
    fn half_a_limit_is_refused_with_the_part_that_is_missing() {
        for (disk, expected) in [
            ("bw_size=1000", "--disk bw_size=1000: needs bw_refill_time= too; give it, or leave bw_size out"),
            (
                "ops_refill_time=10,ops_one_time_burst=1",
                "--disk ops_refill_time=10: needs ops_size= too; give it, or leave ops_refill_time out",
            ),
            (
                "bw_one_time_burst=1",
                "--disk bw_one_time_burst=1: needs bw_size= too; give it, or leave bw_one_time_burst out",
            ),
            (
                "bw_size=0,bw_refill_time=100",
                "--disk bw_size=0: nothing could pass; give 1 or more, or 0 for bw_refill_time too",
            ),
            (
                "ops_size=10,ops_refill_time=0",
                "--disk ops_refill_time=0: needs a time; give 1 or more, or 0 for ops_size too",
            ),
            ("ops_size=1k", "--disk ops_size=1k: give a whole number from 0 to 18446744073709551615"),
            ("bw_size", "--disk bw_size: the key has no value; write bw_size=<number>"),
        ] {
            assert_eq!(limits(disk), Err(expected.to_string()));
        }
    }
}
