//! Rate limits of devices: six keys of the command line, and one object of JSON.

use serde::{Deserialize, Serialize};
use std::time::Duration;
use virtio_devices::{RateLimit, RateLimits};

use crate::config_error::{ConfigError, Problem};
use crate::config_nic::Subject;
use crate::config_options::Pair;
use crate::config_value::{Key, Part, Value, digits, read};

/// Limits of a device's bandwidth and operations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterConfig {
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<TokenBucketConfig>,
    /// Operations: packets of a NIC, requests of a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<TokenBucketConfig>,
}

/// A limit that refills.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenBucketConfig {
    /// What is let through before the limit acts, in bytes or operations. 0 for no limit, and `refill_time` is 0 then, too.
    pub size: u64,
    /// What is let through once, in addition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_time_burst: Option<u64>,
    /// Milliseconds until `size` is available again.
    pub refill_time: u64,
}

/// The keys of one limit.
struct Names {
    size: &'static str,
    one_time_burst: &'static str,
    refill_time: &'static str,
}

const BANDWIDTH: Names = Names { size: "bw_size", one_time_burst: "bw_one_time_burst", refill_time: "bw_refill_time" };
const OPS: Names = Names { size: "ops_size", one_time_burst: "ops_one_time_burst", refill_time: "ops_refill_time" };

/// What the keys of one limit say.
#[derive(Default)]
struct Given {
    size: Option<u64>,
    one_time_burst: Option<u64>,
    refill_time: Option<u64>,
}

impl RateLimiterConfig {
    /// The limits.
    ///
    /// # Errors
    ///
    /// A limit without a size or a time.
    pub(crate) fn plan(&self, subject: &Subject) -> Result<RateLimits, ConfigError> {
        let limit = |bucket: &Option<TokenBucketConfig>, names| match bucket {
            Some(bucket) => bucket.plan(names, subject),
            None => Ok(None),
        };
        Ok(RateLimits { bandwidth: limit(&self.bandwidth, &BANDWIDTH)?, ops: limit(&self.ops, &OPS)? })
    }
}

impl TokenBucketConfig {
    fn plan(&self, names: &Names, subject: &Subject) -> Result<Option<RateLimit>, ConfigError> {
        let Self { size, one_time_burst, refill_time } = *self;
        let fail = |key: &str, what: String| Err(ConfigError::new(subject.key(key, 0), Problem::Value(what)));
        match (size, refill_time) {
            (0, 0) => Ok(None),
            (0, _) => {
                let remedy = format!("give 1 or more, or 0 for {} too", names.refill_time);
                fail(names.size, format!("lets nothing through; {remedy}"))
            }
            (_, 0) => {
                let remedy = format!("give 1 or more, or 0 for {} too", names.size);
                fail(names.refill_time, format!("is no time to refill in; {remedy}"))
            }
            _ => Ok(Some(RateLimit {
                size,
                one_time_burst: one_time_burst.unwrap_or_default(),
                refill: Duration::from_millis(refill_time),
            })),
        }
    }

    /// The values of the keys that make this.
    fn print(bucket: &Option<Self>, names: &Names) -> Vec<(&'static str, String)> {
        let Some(Self { size, one_time_burst, refill_time }) = bucket else { return Vec::new() };
        let values = [
            (names.size, Some(*size)),
            (names.one_time_burst, *one_time_burst),
            (names.refill_time, Some(*refill_time)),
        ];
        values.into_iter().filter_map(|(key, value)| Some((key, value?.to_string()))).collect()
    }
}

impl Names {
    /// What the keys are for. `unit` is what is limited.
    fn keys(&self, unit: &str) -> [Key; 3] {
        let key = |name, syntax, about: String| Key { name, syntax, default: None, about };
        let (size, time) = (self.size, self.refill_time);
        [
            key(size, "<number>", format!("Limit of {unit}: so many in {time}. Without it there is none.")),
            key(
                self.one_time_burst,
                "<number>",
                format!("{}{} that may pass once, in addition to {size}.", unit[..1].to_uppercase(), &unit[1..]),
            ),
            key(time, "<ms>", format!("Milliseconds in which {size} is let through.")),
        ]
    }

    fn field<'g>(&self, key: &str, given: &'g mut Given) -> Option<&'g mut Option<u64>> {
        match key {
            key if key == self.size => Some(&mut given.size),
            key if key == self.one_time_burst => Some(&mut given.one_time_burst),
            key if key == self.refill_time => Some(&mut given.refill_time),
            _ => None,
        }
    }

    fn bucket(&self, given: &Given, option: &str) -> Result<Option<TokenBucketConfig>, ConfigError> {
        let missing = |given: &str, value: u64, missing: &str| {
            let what = format!("says nothing without {missing}=; give it, or leave {given} out");
            Err(ConfigError::new(format!("{option} {given}={value}"), Problem::Syntax(what)))
        };
        match (given.size, given.refill_time, given.one_time_burst) {
            (None, None, None) => Ok(None),
            (Some(size), Some(refill_time), one_time_burst) => {
                Ok(Some(TokenBucketConfig { size, one_time_burst, refill_time }))
            }
            (None, Some(time), _) => missing(self.refill_time, time, self.size),
            (Some(size), None, _) => missing(self.size, size, self.refill_time),
            (None, None, Some(burst)) => missing(self.one_time_burst, burst, self.size),
        }
    }
}

impl Part for RateLimiterConfig {
    fn keys() -> Vec<Key> {
        [BANDWIDTH.keys("bytes"), OPS.keys("operations")].into_iter().flatten().collect()
    }

    fn take(pairs: Vec<Pair>, option: &str) -> Result<(Option<Self>, Vec<Pair>), ConfigError> {
        let (mut bandwidth, mut ops) = (Given::default(), Given::default());
        let mut others = Vec::new();
        for pair in pairs {
            let field = BANDWIDTH.field(&pair.key, &mut bandwidth).or_else(|| OPS.field(&pair.key, &mut ops));
            match (field, &pair.value) {
                (Some(field), Some(value)) => {
                    let wrong =
                        |what| ConfigError::new(format!("{option} {}={value}", pair.key), Problem::Syntax(what));
                    *field = read::<Number>(value).map_err(wrong)?.map(|Number(number)| number);
                }
                _ => others.push(pair),
            }
        }
        let (bandwidth, ops) = (BANDWIDTH.bucket(&bandwidth, option)?, OPS.bucket(&ops, option)?);
        let config = (bandwidth.is_some() || ops.is_some()).then_some(Self { bandwidth, ops });
        Ok((config, others))
    }

    fn print(&self) -> Vec<(&'static str, String)> {
        let Self { bandwidth, ops } = self;
        let mut pairs = TokenBucketConfig::print(bandwidth, &BANDWIDTH);
        pairs.extend(TokenBucketConfig::print(ops, &OPS));
        pairs
    }
}

/// A number without a unit.
struct Number(u64);

impl Value for Number {
    fn parse(text: &str) -> Result<Self, String> {
        let number = digits(text).and_then(|digits| digits.parse().ok());
        number.map(Self).ok_or_else(|| format!("give a whole number from 0 to {}", u64::MAX))
    }

    fn print(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;

    fn limits(disk: &str) -> Result<RateLimits, String> {
        let config: DiskConfig = disk.parse().map_err(|error: ConfigError| error.to_string())?;
        let subject = Subject::device("--disk", None, 0, 1);
        let plan = config.rate_limiter_config.map(|config| config.plan(&subject)).transpose();
        plan.map(Option::unwrap_or_default).map_err(|error| error.to_string())
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
    fn nothing_and_zero_are_no_limit() {
        for disk in ["path=/a", "path=/a,bw_size=0,bw_refill_time=0,ops_size=0,ops_one_time_burst=0,ops_refill_time=0"]
        {
            assert_eq!(limits(disk), Ok(RateLimits::default()), "{disk}");
        }
        assert_eq!("path=/a,bw_size=,ops_refill_time=".parse::<DiskConfig>().unwrap().rate_limiter_config, None);
    }

    #[test]
    fn a_limit_that_says_half_is_refused_with_what_is_missing() {
        for (disk, expected) in [
            (
                "bw_size=1000",
                "--disk bw_size=1000: says nothing without bw_refill_time=; give it, or leave bw_size out",
            ),
            (
                "ops_refill_time=10,ops_one_time_burst=1",
                "--disk ops_refill_time=10: says nothing without ops_size=; give it, or leave ops_refill_time out",
            ),
            (
                "bw_one_time_burst=1",
                "--disk bw_one_time_burst=1: says nothing without bw_size=; give it, or leave bw_one_time_burst out",
            ),
            (
                "bw_size=0,bw_refill_time=100",
                "--disk bw_size=0: lets nothing through; give 1 or more, or 0 for bw_refill_time too",
            ),
            (
                "ops_size=10,ops_refill_time=0",
                "--disk ops_refill_time=0: is no time to refill in; give 1 or more, or 0 for ops_size too",
            ),
            ("ops_size=1k", "--disk ops_size=1k: give a whole number from 0 to 18446744073709551615"),
            ("bw_size", "--disk bw_size: a key without a value; write key=value"),
        ] {
            assert_eq!(limits(disk), Err(expected.to_string()));
        }
    }

    #[test]
    fn keys_and_json_say_the_same_and_read_back() {
        let text = "path=/a,bw_size=10,bw_one_time_burst=5,bw_refill_time=20,ops_size=1,ops_refill_time=2";
        let config: DiskConfig = text.parse().unwrap();
        let json = serde_json::json!({
            "bandwidth": {"size": 10, "one_time_burst": 5, "refill_time": 20}, "ops": {"size": 1, "refill_time": 2},
        });
        assert_eq!(serde_json::to_value(&config).unwrap()["rate_limiter_config"], json);
        assert_eq!(config.to_string().parse::<DiskConfig>().unwrap(), config);
        let names: Vec<_> = RateLimiterConfig::keys().into_iter().map(|key| key.name).collect();
        assert_eq!(names[..3], ["bw_size", "bw_one_time_burst", "bw_refill_time"]);
        assert_eq!(names[3..], ["ops_size", "ops_one_time_burst", "ops_refill_time"]);
    }
}
