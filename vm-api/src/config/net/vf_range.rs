//! The VFs that settings are for: one of them, a range, or all.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::value::{Value, digits};
use crate::schema::{Component, Components, Definition, Schema};

/// The highest index of a VF.
const MOST_INDEX: u16 = 32_511;

/// VFs of a PF. In JSON a VF is a number, and more of them are a string such as `"0-63"` or `"*"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Json", into = "Json")]
pub enum VfRange {
    /// The VF with this index.
    One(u16),
    /// From the first to the last index, which is higher.
    Range(u16, u16),
    /// All VFs.
    All,
}

impl VfRange {
    /// These VFs and those up to `last`.
    pub fn with(self, last: u16) -> Self {
        match self {
            Self::One(first) | Self::Range(first, _) if first < last => Self::Range(first, last),
            range => range,
        }
    }

    /// The index, unless this is for more than one VF by its form.
    pub const fn one(self) -> Option<u16> {
        match self {
            Self::One(index) => Some(index),
            Self::Range(..) | Self::All => None,
        }
    }

    /// True if the VF with this index is one of them.
    pub const fn covers(self, index: u16) -> bool {
        match self {
            Self::One(one) => one == index,
            Self::Range(first, last) => first <= index && index <= last,
            Self::All => true,
        }
    }

    /// The indices of the PF `pf`, which has `total` VFs.
    ///
    /// # Errors
    ///
    /// Fails with the indices that are out of range, if there are any, in one line.
    pub fn among(self, pf: &str, total: u16) -> Result<RangeInclusive<u16>, String> {
        let Some(most) = total.checked_sub(1) else {
            return Err(format!("{pf} reserves no VFs; add sriov_vfs= to its --net"));
        };
        let (first, last) = match self {
            Self::One(index) => (index, index),
            Self::Range(first, last) => (first, last),
            Self::All => (0, most),
        };
        if last <= most {
            return Ok(first..=last);
        }
        let reserved = format!("{pf} reserves {total} VFs (sriov_vfs={total}); index must be 0 to {most}");
        match Self::Range(first.max(total), last) {
            _ if self.one().is_some() => Err(reserved),
            Self::Range(beyond, last) if beyond == last => Err(format!("VF {last} is out of range: {reserved}")),
            beyond => Err(format!("VFs {beyond} are out of range: {reserved}")),
        }
    }
}

impl Default for VfRange {
    fn default() -> Self {
        Self::One(0)
    }
}

impl From<u16> for VfRange {
    fn from(index: u16) -> Self {
        Self::One(index)
    }
}

impl PartialEq<u16> for VfRange {
    fn eq(&self, index: &u16) -> bool {
        self.one() == Some(*index)
    }
}

impl fmt::Display for VfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(index) => write!(f, "{index}"),
            Self::Range(first, last) => write!(f, "{first}-{last}"),
            Self::All => f.write_str("*"),
        }
    }
}

impl Value for VfRange {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "give the index of a VF, an ascending range such as 0-63, or * for all VFs".to_string();
        let index = |text: &str| digits(text).and_then(|digits| digits.parse().ok()).ok_or_else(wrong);
        match text.split_once('-') {
            _ if text == "*" => Ok(Self::All),
            None => index(text).map(Self::One),
            Some((first, last)) => match (index(first)?, index(last)?) {
                (first, last) if first < last => Ok(Self::Range(first, last)),
                _ => Err(wrong()),
            },
        }
    }

    fn print(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl FromStr for VfRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Value::parse(text)
    }
}

impl Component for VfRange {
    const NAME: &'static str = "VfRange";

    fn define(components: &mut Components) -> Definition {
        let about = "The index of a VF, or as a string several: a range such as \"0-63\", or \"*\" for all VFs.";
        let mut index = u16::describe(components);
        index["maximum"] = MOST_INDEX.into();
        let more = json!({"type": "string", "pattern": "^([0-9]+-[0-9]+|\\*)$"});
        Definition::other(Self::NAME, json!({"description": about, "oneOf": [more, index]}))
    }
}

impl Schema for VfRange {
    fn describe(components: &mut Components) -> serde_json::Value {
        components.reference::<Self>()
    }
}

/// VFs in JSON.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "the index of a VF, or a string such as \"0-63\" or \"*\"")]
enum Json {
    One(u16),
    More(String),
}

impl TryFrom<Json> for VfRange {
    type Error = String;

    fn try_from(json: Json) -> Result<Self, String> {
        match json {
            Json::One(index) => Ok(Self::One(index)),
            Json::More(text) => match text.parse()? {
                Self::One(index) => Err(format!("give a single index as a number: {index}, not \"{index}\"")),
                more => Ok(more),
            },
        }
    }
}

impl From<VfRange> for Json {
    fn from(range: VfRange) -> Self {
        match range {
            VfRange::One(index) => Self::One(index),
            more => Self::More(more.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_the_same_on_the_command_line_and_in_json() {
        for (text, json, range) in [
            ("7", json!(7), VfRange::One(7)),
            ("0-63", json!("0-63"), VfRange::Range(0, 63)),
            ("*", json!("*"), VfRange::All),
        ] {
            assert_eq!((VfRange::parse(text), range.print().as_deref()), (Ok(range), Some(text)));
            assert_eq!(serde_json::to_value(range).unwrap(), json);
            assert_eq!(serde_json::from_value::<VfRange>(json).unwrap(), range);
        }
        for wrong in ["", "-", "3-", "-3", "3-3", "4-3", "70000", "0-70000", "+1", "1-2-3", "**", "x"] {
            assert!(VfRange::parse(wrong).is_err(), "{wrong}");
            assert!(serde_json::from_value::<VfRange>(json!(wrong)).is_err(), "{wrong}");
        }
        for (wrong, said) in [
            (json!("7"), "give a single index as a number: 7, not \"7\""),
            (json!(70_000), "the index of a VF, or a string such as \"0-63\" or \"*\""),
            (json!([1]), "the index of a VF, or a string such as \"0-63\" or \"*\""),
        ] {
            assert_eq!(serde_json::from_value::<VfRange>(wrong).unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn indices_are_bounded_by_what_the_pf_reserves() {
        let among = |text: &str, total| text.parse::<VfRange>().unwrap().among("pf0", total);
        assert_eq!((among("7", 8), among("0-7", 8), among("*", 8)), (Ok(7..=7), Ok(0..=7), Ok(0..=7)));
        let reserved = "pf0 reserves 8 VFs (sriov_vfs=8); index must be 0 to 7";
        for (text, said) in [
            ("8", ""),
            ("0-8", "VF 8 is out of range: "),
            ("0-63", "VFs 8-63 are out of range: "),
            ("20-63", "VFs 20-63 are out of range: "),
        ] {
            assert_eq!(among(text, 8), Err(format!("{said}{reserved}")));
        }
        assert_eq!(among("*", 0), Err("pf0 reserves no VFs; add sriov_vfs= to its --net".to_string()));
        assert!(VfRange::Range(2, 4).covers(3) && !VfRange::Range(2, 4).covers(5) && VfRange::All.covers(9));
    }
}
