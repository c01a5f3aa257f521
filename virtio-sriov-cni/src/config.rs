//! The network configuration on standard input: the keys of CNI and those of sriov-cni.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::error::{Code, Error, Result};
use crate::log::Level;
use crate::parameters::is_name;
use crate::version::Version;

/// Keys of CNI and its conventions, and those of multus, which ask nothing of this plugin.
const OTHERS: [&str; 10] = [
    "args",
    "capabilities",
    "cni.dev/attachments",
    "cniVersions",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
    "pciBusID",
    "resourceName",
    "type",
];
/// Keys that this plugin reads.
const READ: [&str; 19] = [
    "cniVersion",
    "cni.dev/valid-attachments",
    "deviceID",
    "dns",
    "ipam",
    "link_state",
    "logFile",
    "logLevel",
    "mac",
    "max_tx_rate",
    "min_tx_rate",
    "name",
    "prevResult",
    "runtimeConfig",
    "spoofchk",
    "trust",
    "vlan",
    "vlanProto",
    "vlanQoS",
];

/// Capabilities that a runtime may pass and this plugin, or its IPAM plugin, reads.
const CAPABILITIES: [&str; 5] = ["deviceID", "infinibandGUID", "ipRanges", "ips", "mac"];

/// The part of the configuration that all commands except VERSION need.
#[derive(Debug, Clone)]
pub struct Config {
    /// Version of the result.
    pub version: Version,
    /// Network.
    pub name: String,
    /// Executable of the IPAM plugin, if there is one.
    pub ipam: Option<String>,
    /// DNS, if the IPAM plugin gives none.
    pub dns: Option<Value>,
    /// Result of the plugin before in the chain, or of ADD.
    pub previous: Option<Value>,
    /// Smallest level that is logged.
    pub level: Level,
    /// File of the log; standard error without one.
    pub log: Option<PathBuf>,
    /// All keys.
    pub keys: Keys,
}

/// A JSON object whose values are refused by name.
#[derive(Debug, Clone)]
pub struct Keys(Map<String, Value>);

impl Keys {
    /// The value of a key, unless it is null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// True if there is such a key, even with null.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// A text. An empty one is none.
    ///
    /// # Errors
    ///
    /// [`Code::Config`] for a value of another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
            Some(other) => Err(Error::new(Code::Config, format!("{key}={other}: give a text"))),
        }
    }

    /// A number from 0 to `most`.
    ///
    /// # Errors
    ///
    /// [`Code::Config`] for a value of another type or out of range.
    pub fn number(&self, key: &str, most: u32) -> Result<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= most);
        let refusal = || Error::new(Code::Config, format!("{key}={value}: give a number from 0 to {most}"));
        number.map(Some).ok_or_else(refusal)
    }

    /// The keys of an object; none for no such key.
    ///
    /// # Errors
    ///
    /// [`Code::Config`] for a value of another type.
    pub fn object(&self, key: &str) -> Result<Self> {
        match self.get(key) {
            None => Ok(Self(Map::new())),
            Some(Value::Object(map)) => Ok(Self(map.clone())),
            Some(other) => Err(Error::new(Code::Config, format!("{key}={other}: give an object"))),
        }
    }
}

impl Config {
    /// Reads the configuration.
    ///
    /// # Errors
    ///
    /// [`Code::Decode`] for text that is not a JSON object, [`Code::Version`], and [`Code::Config`].
    pub fn read(input: &[u8]) -> Result<Self> {
        let keys = keys(input)?;
        let version = Version::of_config(keys.text("cniVersion")?)?;
        let name = keys.text("name")?.ok_or_else(|| Error::new(Code::Config, "name: missing; name the network"))?;
        if !is_name(name) {
            let message = format!("name={name:?}: begin with a letter or digit; then also use _, . and -");
            return Err(Error::new(Code::Config, message));
        }
        let level = keys.text("logLevel")?.map(Level::parse).transpose()?.unwrap_or_default();
        let ipam = keys.object("ipam")?;
        let ipam = ipam.text("type").map_err(|error| Error { message: format!("ipam.{}", error.message), ..error })?;
        if let Some(ipam) = ipam.filter(|ipam| ipam.contains('/') || ipam.starts_with('.')) {
            return Err(Error::new(Code::Config, format!("ipam.type={ipam:?}: give the name of a plugin in CNI_PATH")));
        }
        Ok(Self {
            version,
            name: name.to_string(),
            ipam: ipam.map(String::from),
            dns: keys.get("dns").cloned(),
            previous: keys.get("prevResult").cloned(),
            level,
            log: keys.text("logFile")?.map(PathBuf::from),
            keys,
        })
    }

    /// Keys that this plugin does not know, for a warning.
    pub fn unknown(&self) -> Vec<String> {
        let is_known = |key: &str| READ.contains(&key) || OTHERS.contains(&key);
        let unknown = self.keys.0.keys().filter(|key| !is_known(key)).cloned();
        let runtime = self.keys.get("runtimeConfig").and_then(Value::as_object).into_iter().flat_map(Map::keys);
        let of_runtime = runtime.filter(|key| !CAPABILITIES.contains(&key.as_str()));
        unknown.chain(of_runtime.map(|key| format!("runtimeConfig.{key}"))).collect()
    }

    /// Attachments of this network that are valid, for GC: containers and interfaces.
    ///
    /// # Errors
    ///
    /// [`Code::Config`] if the runtime names none, not even an empty list, or names them in another form.
    pub fn valid_attachments(&self) -> Result<Vec<(String, String)>> {
        const KEY: &str = "cni.dev/valid-attachments";
        let refusal = |why: &str| Error::new(Code::Config, format!("{KEY}: {why}"));
        if !self.keys.has(KEY) {
            return Err(refusal("missing; list the attachments that are valid, [] for none"));
        }
        let list = match self.keys.get(KEY) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(_) => return Err(refusal("give a list")),
        };
        let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(String::from);
        let attachment = |entry| Some((text(entry, "containerID")?, text(entry, "ifname")?));
        let read: Option<Vec<_>> = list.iter().map(attachment).collect();
        read.ok_or_else(|| refusal("give containerID and ifname of each"))
    }
}

/// The keys of a JSON object.
///
/// # Errors
///
/// [`Code::Decode`].
pub fn keys(input: &[u8]) -> Result<Keys> {
    let decoded = serde_json::from_slice(input);
    decoded.map(Keys).map_err(|error| Error::new(Code::Decode, format!("configuration on standard input: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<Config> {
        Config::read(value.to_string().as_bytes())
    }

    fn with(key: &str, value: Value) -> Value {
        let mut config = json!({"cniVersion": "1.1.0", "name": "net", "type": "virtio-sriov-cni"});
        config[key] = value;
        config
    }

    #[test]
    fn input_that_is_no_json_object_cannot_be_decoded() {
        for wrong in ["", "{", "[]", "1"] {
            assert!(Config::read(wrong.as_bytes()).unwrap_err().is(Code::Decode), "{wrong}");
        }
    }

    #[test]
    fn each_wrong_key_of_cni_is_refused_by_name() {
        for (key, value) in [
            ("name", json!("")),
            ("name", json!("../etc")),
            ("name", json!(7)),
            ("ipam", json!("static")),
            ("ipam", json!({"type": "../../bin/sh"})),
            ("ipam", json!({"type": 1})),
            ("logLevel", json!("loud")),
            ("logFile", json!(1)),
        ] {
            let error = read(&with(key, value)).unwrap_err();
            assert!(error.is(Code::Config) && error.message.starts_with(key), "{error}");
        }
        assert!(read(&with("cniVersion", json!("0.2.0"))).unwrap_err().is(Code::Version));
    }

    #[test]
    fn a_key_that_the_plugin_does_not_know_is_reported() {
        let config = with("vlan_tunk", json!("1-5"));
        assert_eq!(read(&config).unwrap().unknown(), ["vlan_tunk"]);
        assert_eq!(read(&with("pciBusID", json!("0000:01:00.2"))).unwrap().unknown(), [""; 0]);
        let config = with("runtimeConfig", json!({"mac": "x", "ips": ["10.0.0.5/24"], "bandwidth": {"egressRate": 1}}));
        assert_eq!(read(&config).unwrap().unknown(), ["runtimeConfig.bandwidth"]);
    }

    #[test]
    fn gc_needs_a_list_which_may_be_empty_or_null() {
        const KEY: &str = "cni.dev/valid-attachments";
        let attachments = |value| read(&with(KEY, value)).unwrap().valid_attachments();
        assert_eq!(attachments(json!([])), Ok(vec![]));
        assert_eq!(attachments(Value::Null), Ok(vec![]));
        let one = json!([{"containerID": "a", "ifname": "net1"}]);
        assert_eq!(attachments(one), Ok(vec![("a".to_string(), "net1".to_string())]));
        assert!(attachments(json!([{"containerID": "a"}])).unwrap_err().is(Code::Config));
        assert!(attachments(json!("all")).unwrap_err().is(Code::Config));
        assert!(read(&with("type", json!("x"))).unwrap().valid_attachments().unwrap_err().message.starts_with(KEY));
    }
}
