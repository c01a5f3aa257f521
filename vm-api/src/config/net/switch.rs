//! The embedded switch of a PF: the values of `switch` and `mirror`.

use option_derive::Schema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::value::{Value, digits};
use crate::schema::{Component, Components, Definition, Schema};

/// The last index of a VF on a switch.
const MOST_INDEX: u16 = 4094;

/// Forwarding rule of a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "lowercase")]
pub enum SwitchMode {
    /// By the switch itself.
    Veb,
    /// Through the switch behind the uplink, which reflects frames for other functions.
    Vepa,
}

impl Value for SwitchMode {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "veb" => Ok(Self::Veb),
            "vepa" => Ok(Self::Vepa),
            _ => Err("give veb or vepa".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Veb => "veb".to_string(),
            Self::Vepa => "vepa".to_string(),
        })
    }
}

/// The port of a switch that gets copies of the frames that another sends. In JSON a VF is a number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Json", into = "Json")]
pub enum Mirror {
    /// None.
    #[default]
    Off,
    /// The PF.
    Pf,
    /// The VF with this index.
    Vf(u16),
}

impl Mirror {
    /// True if there is no mirror.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }
}

impl Value for Mirror {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "give off, pf, or the index of a VF".to_string();
        match text.to_ascii_lowercase().as_str() {
            "off" => Ok(Self::Off),
            "pf" => Ok(Self::Pf),
            text => digits(text).and_then(|digits| digits.parse().ok()).map(Self::Vf).ok_or_else(wrong),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Off => "off".to_string(),
            Self::Pf => "pf".to_string(),
            Self::Vf(index) => index.to_string(),
        })
    }
}

impl std::str::FromStr for Mirror {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Value::parse(text)
    }
}

impl Component for Mirror {
    const NAME: &'static str = "Mirror";

    fn define(components: &mut Components) -> Definition {
        let about = "Function of a switch that gets copies of the packets that another sends. A VF is its index.";
        let mut index = u16::describe(components);
        index["maximum"] = MOST_INDEX.into();
        let values = json!([{"type": "string", "enum": ["off", "pf"]}, index]);
        Definition::other(Self::NAME, json!({"description": about, "oneOf": values}))
    }
}

impl Schema for Mirror {
    fn describe(components: &mut Components) -> serde_json::Value {
        components.reference::<Self>()
    }
}

/// A mirror in JSON.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "\"off\", \"pf\", or the index of a VF")]
enum Json {
    Vf(u16),
    Word(Word),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Off,
    Pf,
}

impl From<Json> for Mirror {
    fn from(json: Json) -> Self {
        match json {
            Json::Vf(index) => Self::Vf(index),
            Json::Word(Word::Off) => Self::Off,
            Json::Word(Word::Pf) => Self::Pf,
        }
    }
}

impl From<Mirror> for Json {
    fn from(mirror: Mirror) -> Self {
        match mirror {
            Mirror::Vf(index) => Self::Vf(index),
            Mirror::Off => Self::Word(Word::Off),
            Mirror::Pf => Self::Word(Word::Pf),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_the_same_on_the_command_line_and_in_json() {
        for (text, mode) in [("veb", SwitchMode::Veb), ("vepa", SwitchMode::Vepa)] {
            assert_eq!((SwitchMode::parse(text), mode.print().as_deref()), (Ok(mode), Some(text)));
            assert_eq!(serde_json::to_value(mode).unwrap(), text);
        }
        for (text, json, mirror) in
            [("off", json!("off"), Mirror::Off), ("pf", json!("pf"), Mirror::Pf), ("7", json!(7), Mirror::Vf(7))]
        {
            assert_eq!((Mirror::parse(text), mirror.print().as_deref()), (Ok(mirror), Some(text)));
            assert_eq!(serde_json::to_value(mirror).unwrap(), json);
            assert_eq!(serde_json::from_value::<Mirror>(json).unwrap(), mirror);
        }
        assert!(SwitchMode::parse("on").is_err());
        for wrong in ["uplink", "-1", "70000", "+1", "1.5"] {
            assert!(Mirror::parse(wrong).is_err(), "{wrong}");
        }
        for wrong in [json!("7"), json!(-1), json!(70000), json!("uplink"), json!(true)] {
            assert!(serde_json::from_value::<Mirror>(wrong).is_err());
        }
    }
}
