//! Rate limits of devices: six keys on the command line, one object in JSON.

use option_derive::Schema;
use serde::{Deserialize, Serialize};

use crate::config::error::{ConfigError, Problem};
use crate::config::grammar::Pair;
use crate::config::keys::Key;
use crate::config::option::Part;
use crate::config::value::{Value, digits, read};

/// Limits of a device's bandwidth and operations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterConfig {
    /// Limit of bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<TokenBucketConfig>,
    /// Limit of operations: packets of a NIC, requests of a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<TokenBucketConfig>,
}

/// A token bucket. With size and `refill_time` 0 there is no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(deny_unknown_fields)]
#[schema(name = "TokenBucket")]
pub struct TokenBucketConfig {
    /// Bytes or operations that may pass before the limit applies.
    pub size: u64,
    /// Additional bytes or operations that may pass once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_time_burst: Option<u64>,
    /// Milliseconds until `size` is available again.
    pub refill_time: u64,
}

/// The keys of one limit.
#[derive(Debug)]
pub struct Names {
    /// The key of the size.
    pub size: &'static str,
    /// The key of the burst.
    pub one_time_burst: &'static str,
    /// The key of the time.
    pub refill_time: &'static str,
}

/// The keys of the limit of bytes.
pub const BANDWIDTH: Names =
    Names { size: "bw_size", one_time_burst: "bw_one_time_burst", refill_time: "bw_refill_time" };
/// The keys of the limit of operations.
pub const OPS: Names = Names { size: "ops_size", one_time_burst: "ops_one_time_burst", refill_time: "ops_refill_time" };

/// The values of the keys of one limit.
#[derive(Default)]
struct Given {
    size: Option<u64>,
    one_time_burst: Option<u64>,
    refill_time: Option<u64>,
}

impl TokenBucketConfig {
    /// The values of the keys for this limit.
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
    /// Descriptions of the keys. `unit` is the limited quantity.
    fn keys(&self, unit: &str) -> [Key; 3] {
        let key = |name, syntax, about: String| Key { name, syntax, default: None, about, is_bare: false };
        let (size, time) = (self.size, self.refill_time);
        [
            key(size, "<number>", format!("Limits {unit} to this number per {time}. By default there is no limit.")),
            key(self.one_time_burst, "<number>", format!("One-time burst of additional {unit}.")),
            key(time, "<ms>", format!("Milliseconds in which {size} {unit} may pass.")),
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
            let what = format!("needs {missing}= too; give it, or leave {given} out");
            Err(ConfigError::new(format!("{option} {given}={value}"), Problem::Syntax(what)))
        };
        match (given.size, given.refill_time, given.one_time_burst) {
            (None, None, None) => Ok(None),
            // Both default to 0, which is no limit.
            (Some(0), None, one_time_burst) | (None, Some(0), one_time_burst) => {
                Ok(Some(TokenBucketConfig { size: 0, one_time_burst, refill_time: 0 }))
            }
            (None, None, Some(0)) => Ok(None),
            (Some(size), Some(refill_time), one_time_burst) => {
                Ok(Some(TokenBucketConfig { size, one_time_burst, refill_time }))
            }
            (None, Some(time), _) => missing(self.refill_time, time, self.size),
            (Some(size), None, _) => missing(self.size, size, self.refill_time),
            (None, None, Some(burst)) => missing(self.one_time_burst, burst, self.size),
        }
    }
}

impl Part for Option<RateLimiterConfig> {
    fn keys() -> Vec<Key> {
        [BANDWIDTH.keys("bytes"), OPS.keys("operations")].into_iter().flatten().collect()
    }

    fn take(pairs: Vec<Pair>, option: &str) -> Result<(Self, Vec<Pair>), ConfigError> {
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
        let config = (bandwidth.is_some() || ops.is_some()).then_some(RateLimiterConfig { bandwidth, ops });
        Ok((config, others))
    }

    fn print(&self) -> Vec<(&'static str, String)> {
        let Some(RateLimiterConfig { bandwidth, ops }) = self else { return Vec::new() };
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
    use crate::config::disk::DiskConfig;

    #[test]
    fn keys_and_json_say_the_same_and_read_back() {
        let text = "path=/a,bw_size=10,bw_one_time_burst=5,bw_refill_time=20,ops_size=1,ops_refill_time=2";
        let config: DiskConfig = text.parse().unwrap();
        let json = serde_json::json!({
            "bandwidth": {"size": 10, "one_time_burst": 5, "refill_time": 20}, "ops": {"size": 1, "refill_time": 2},
        });
        assert_eq!(serde_json::to_value(&config).unwrap()["rate_limiter_config"], json);
        assert_eq!(config.to_string().parse::<DiskConfig>().unwrap(), config);
        let names: Vec<_> = Option::<RateLimiterConfig>::keys().into_iter().map(|key| key.name).collect();
        assert_eq!(names[..3], ["bw_size", "bw_one_time_burst", "bw_refill_time"]);
        assert_eq!(names[3..], ["ops_size", "ops_one_time_burst", "ops_refill_time"]);
    }

    #[test]
    fn a_key_at_its_default_is_no_limit() {
        let limits = |text: &str| format!("path=/a,{text}").parse::<DiskConfig>().map(|disk| disk.rate_limiter_config);
        let none = TokenBucketConfig { size: 0, one_time_burst: None, refill_time: 0 };
        for text in ["bw_size=0", "bw_refill_time=0", "bw_size=0,bw_refill_time=0"] {
            let expected = RateLimiterConfig { bandwidth: Some(none.clone()), ops: None };
            assert_eq!(limits(text), Ok(Some(expected)), "{text}");
        }
        assert_eq!(limits("ops_one_time_burst=0"), Ok(None));
        assert!(limits("ops_size=1").is_err() && limits("ops_refill_time=1").is_err());
    }
}
