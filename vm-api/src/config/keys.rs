//! Keys of an option: their description, and checks that the user gave each once, with a value, and no other.

use crate::config::error::{ConfigError, Problem};
use crate::config::grammar::{Pair, unquote};
use crate::similar::similar;

/// Key of an option, for its help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// The key's name: `num_queues`.
    pub name: &'static str,
    /// Form of the value: `<number>`.
    pub syntax: &'static str,
    /// The value that applies if the key is omitted, if there is one.
    pub default: Option<String>,
    /// Purpose, in one paragraph.
    pub about: String,
    /// True if a text without a key is most likely its value, such as `512M` in `--memory 512M`.
    pub is_bare: bool,
}

/// Checks that each key is given once.
///
/// # Errors
///
/// Fails with the second of two pairs with one key.
pub(crate) fn check_once(pairs: &[Pair], option: &str) -> Result<(), ConfigError> {
    for (at, Pair { key, value }) in pairs.iter().enumerate() {
        if pairs[..at].iter().any(|before| before.key == *key) {
            let value = value.as_ref().map(|value| format!("={value}")).unwrap_or_default();
            let what = "the key is given twice; give it once".to_string();
            return Err(ConfigError::new(format!("{option} {key}{value}"), Problem::Syntax(what)));
        }
    }
    Ok(())
}

/// Keys that name a function, or are a part of its policy.
const NEVER_EMPTY: [&str; 17] = [
    "id",
    "index",
    "isolated",
    "link",
    "max_tx_rate",
    "min_tx_rate",
    "mirror",
    "pf",
    "spoofchk",
    "sriov_vfs",
    "storm",
    "trunk",
    "trust",
    "vlan",
    "vlan_proto",
    "vlan_qos",
    "weight",
];

/// Checks that a key that names a function, or is a part of its policy, is not empty, and no key of a VF.
///
/// # Errors
///
/// Fails if it is. Other keys may be: Cloud Hypervisor takes an empty value as none, as in `--net tap=,mac=,ip=,mask=`.
/// Here a shell variable that is not set would take a VF out of its VLAN, or give it another tap.
pub(crate) fn check_given(option: &str, key: &str, value: &str) -> Result<(), String> {
    match (option == "--net-vf" || NEVER_EMPTY.contains(&key)) && unquote(value).is_ok_and(|text| text.is_empty()) {
        true => Err("the value is empty; give one, or leave the key out".to_string()),
        false => Ok(()),
    }
}

/// The problem of `text`, which has no `=`.
pub(crate) fn without_value(keys: &[Key], text: &str) -> Problem {
    if let Some(key) = keys.iter().find(|key| key.name == text) {
        return Problem::Syntax(format!("the key has no value; write {text}={}", key.syntax));
    }
    Problem::Syntax(match keys.iter().find(|key| key.is_bare) {
        Some(Key { name, .. }) => format!("a value without its key; write {name}={text}"),
        None => "a value without its key; write key=value".to_string(),
    })
}

/// The problem of the unknown key `name`.
pub(crate) fn unknown(option: &str, keys: &[Key], name: &str) -> Problem {
    let tip =
        similar(name, keys.iter().map(|key| key.name)).map(|key| format!("did you mean {key}? ")).unwrap_or_default();
    Problem::Syntax(format!("unknown key; {tip}--help lists those of {option}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::option::Fields as _;
    use crate::config::{CpusConfig, DiskConfig, MemoryConfig, NetConfig, NetVf, PolicyConfig, RestoreConfig};

    fn refused<T: std::str::FromStr<Err = ConfigError> + std::fmt::Debug>(text: &str) -> String {
        text.parse::<T>().unwrap_err().to_string()
    }

    #[test]
    fn a_key_given_twice_is_refused() {
        assert_eq!(refused::<NetConfig>("tap=a,tap=b"), "--net tap=b: the key is given twice; give it once");
        assert_eq!(
            refused::<NetConfig>("bw_size=1,vlan=5,bw_size=2"),
            "--net bw_size=2: the key is given twice; give it once"
        );
        assert_eq!(refused::<NetVf>("pf=a,index=1,pf=b"), "--net-vf pf=b: the key is given twice; give it once");
    }

    #[test]
    fn no_key_of_a_policy_may_be_empty() {
        for key in PolicyConfig::FIELDS {
            let check = |value| check_given("--net", key, value);
            assert!(check("").is_err() && check("\"\"").is_err(), "{key}");
            assert_eq!(check("\"\"\"\""), Ok(()), "a quote");
        }
        assert_eq!(check_given("--net", "tap", ""), Ok(()));
    }

    #[test]
    fn no_key_of_a_vf_may_be_empty() {
        for key in ["tap", "mac", "ip", "mask", "vhost_socket", "vdpa"] {
            let what = format!("--net-vf {key}=: the value is empty; give one, or leave the key out");
            assert_eq!(refused::<NetVf>(&format!("pf=a,index=0,{key}=")), what);
        }
        assert!("tap=,mac=,ip=,mask=".parse::<NetConfig>().is_ok());
    }

    #[test]
    fn a_value_without_its_key_is_named_with_it() {
        let without = "a value without its key; write";
        assert_eq!(refused::<MemoryConfig>("512M"), format!("--memory 512M: {without} size=512M"));
        assert_eq!(refused::<CpusConfig>("4"), format!("--cpus 4: {without} boot=4"));
        assert_eq!(refused::<DiskConfig>("a.raw"), format!("--disk a.raw: {without} path=a.raw"));
        assert_eq!(refused::<RestoreConfig>("/s"), format!("--restore /s: {without} source_url=/s"));
        assert_eq!(refused::<NetConfig>("vlan"), "--net vlan: the key has no value; write vlan=<id>");
    }

    #[test]
    fn a_misspelled_key_is_answered_with_the_right_one() {
        let tip = |key: &str| {
            let said = refused::<NetConfig>(&format!("{key}=8"));
            assert!(said.starts_with(&format!("--net {key}=8: unknown key; ")), "{said}");
            said.split_once("did you mean ").map(|(_, tip)| tip.split('?').next().unwrap_or_default().to_string())
        };
        for (wrong, right) in
            [("sriov_vf", "sriov_vfs"), ("taap", "tap"), ("valn", "vlan"), ("num-queues", "num_queues")]
        {
            assert_eq!(tip(wrong).as_deref(), Some(right));
        }
        for wrong in ["x", "colour", &"long".repeat(10)] {
            assert_eq!(tip(wrong), None);
        }
    }

    #[test]
    fn a_number_is_refused_with_its_own_bounds() {
        assert_eq!(
            refused::<NetConfig>("sriov_vfs=eight"),
            "--net sriov_vfs=eight: give a whole number from 0 to 32512"
        );
        assert_eq!(
            refused::<NetConfig>("max_tx_rate=10G"),
            "--net max_tx_rate=10G: give a whole number of Mbit/s from 0 to 4294967295"
        );
        assert_eq!(refused::<NetConfig>("vlan=x"), "--net vlan=x: give a whole number from 0 to 4094");
        assert_eq!(refused::<NetConfig>("weight=x"), "--net weight=x: give a whole number from 1 to 100");
    }
}
