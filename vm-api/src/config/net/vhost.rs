//! Carrier of a NIC's packets: the values of `vhost` and `vhost_mode`.

use std::fmt;

use option_derive::Schema;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;

use crate::config::value::Value;
use crate::schema::{Component, Components, Definition, Schema};

/// Use of vhost-net for a tap's packets. In JSON `true`, `false` or `"auto"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Vhost {
    /// This process carries them.
    #[default]
    Off,
    /// The kernel carries them; without /dev/vhost-net the NIC is refused.
    On,
    /// The kernel carries them if it can, otherwise this process.
    Auto,
}

impl Vhost {
    /// True if this process carries the packets.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }

    /// As on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        }
    }
}

impl Value for Vhost {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            text => bool::parse(text).map(Self::from).map_err(|_| "give on, off or auto".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(self.name().to_string())
    }
}

impl From<bool> for Vhost {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

impl Serialize for Vhost {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::On => serializer.serialize_bool(true),
            Self::Auto => serializer.serialize_str(self.name()),
        }
    }
}

impl<'de> Deserialize<'de> for Vhost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BoolOrAuto)
    }
}

impl Component for Vhost {
    const NAME: &'static str = "Vhost";

    fn define(_: &mut Components) -> Definition {
        let about =
            "Use of vhost-net for a tap's packets; auto uses it if the host has it. A VF does not inherit its PF's.";
        let words = json!([{"type": "boolean"}, {"type": "string", "enum": ["auto"]}]);
        Definition::other(Self::NAME, json!({"description": about, "default": false, "oneOf": words}))
    }
}

impl Schema for Vhost {
    fn describe(components: &mut Components) -> serde_json::Value {
        components.reference::<Self>()
    }
}

struct BoolOrAuto;

impl Visitor<'_> for BoolOrAuto {
    type Value = Vhost;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true, false or \"auto\"")
    }

    fn visit_bool<E: de::Error>(self, on: bool) -> Result<Vhost, E> {
        Ok(on.into())
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vhost, E> {
        match text {
            "auto" => Ok(Vhost::Auto),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}

/// Side that listens on a vhost-user socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum VhostMode {
    /// The backend listens and this program connects.
    Client,
    /// This program listens and the backend connects.
    Server,
}

impl Value for VhostMode {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "client" => Ok(Self::Client),
            "server" => Ok(Self::Server),
            _ => Err("give client or server".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Client => "client".to_string(),
            Self::Server => "server".to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vhost_is_a_truth_value_or_auto() {
        for (json, text, vhost) in
            [("true", "on", Vhost::On), ("false", "off", Vhost::Off), ("\"auto\"", "auto", Vhost::Auto)]
        {
            assert_eq!(serde_json::from_str::<Vhost>(json).unwrap(), vhost);
            assert_eq!(serde_json::to_string(&vhost).unwrap(), json);
            assert_eq!((Vhost::parse(text), vhost.print()), (Ok(vhost), Some(text.to_string())));
        }
        let refused = |json| serde_json::from_str::<Vhost>(json).unwrap_err().to_string();
        for json in ["\"on\"", "1", "\"\""] {
            assert!(refused(json).contains("expected true, false or \"auto\""), "{}", refused(json));
        }
        assert_eq!(Vhost::parse("maybe"), Err("give on, off or auto".to_string()));
    }
}
