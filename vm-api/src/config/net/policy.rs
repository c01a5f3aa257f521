//! The policy of a network function: packets that it may send and receive.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use option_derive::{Options, Schema};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;

use crate::config::grammar::list;
use crate::config::net::switch::Mirror;
use crate::config::option::Fields as _;
use crate::config::value::{Form, Value, digits};
use crate::schema::{Component, Components, Definition, Schema};

/// Highest VLAN (`IEEE 802.1Q-2018 §9.6`; 4095 is reserved).
pub const MAX_VLAN: u16 = 4094;
/// Highest priority of a VLAN's tag.
pub const MAX_QOS: u8 = 7;

/// Policy of a NIC, PF or VF: keys of `--net`, `--net-vf` and `vm.set-vf`.
#[derive(Debug, Clone, PartialEq, Eq, Options, Schema)]
#[options(part, changes)]
pub struct PolicyConfig {
    /// Port VLAN, 1 to 4094, transparent to the guest: packets leave tagged, and only packets with that tag arrive,
    /// untagged. With 802.1q, packets that the guest tags are dropped. 0 disables it.
    #[option("vlan=<id>", change("id", "VLAN of all its packets, 0 for none"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 4094)]
    pub vlan: Option<u16>,
    /// Priority in the tag of vlan, 0 to 7. By default 0.
    #[option("vlan_qos=<priority>", change("priority", "Priority of the VLAN's tag, 0 to 7"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 7)]
    pub vlan_qos: Option<u8>,
    /// Tag protocol of vlan, or of trunk. By default 802.1q.
    #[option("vlan_proto=802.1q|802.1ad", change("Tag protocol of its VLANs"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan_proto: Option<VlanProto>,
    /// VLANs that the guest may use with its own tags, instead of vlan; 0 is untagged packets. By default all.
    #[option(
        "trunk=[<id>,<id>-<id>,...]",
        change("list", "VLANs that the guest may use, such as [10,100-199]; [] for all")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trunk: Option<Vlans>,
    /// Drop packets that the guest sends with a source MAC address other than its own. By default off, but on for VFs
    /// on a switch.
    #[option("spoofchk=on|off", change("Drop packets from MAC addresses other than its own"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spoofchk: Option<bool>,
    /// Let the guest change a given MAC address, send from further ones and to bridges (01:80:c2:00:00:00 to :0f), and
    /// receive packets for others. By default on, but off with spoofchk=on and for VFs on a switch.
    #[option("trust=on|off", change("Let the guest change addresses and receive everything"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// Transmit limit of the guest, in Mbit/s; excess packets wait in its queues. 0 is none.
    #[option("max_tx_rate=<Mbit/s>", change("Mbit/s", "Transmit limit in Mbit/s, 0 for none"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// On a switch, guaranteed bandwidth from the guest to the uplink, in Mbit/s of its uplink_rate. By default 0.
    #[option("min_tx_rate=<Mbit/s>", change("Mbit/s", "Guaranteed uplink bandwidth in Mbit/s, 0 for none"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// Limit of broadcast and multicast packets that the guest sends per second; more are dropped. 0 is none.
    #[option(
        "storm=<number>",
        change("number", "Limit of broadcast and multicast packets that it sends per second, 0 for none")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storm: Option<u32>,
    /// Link when the VM starts. auto: up, unless the backend is lost, or its tap or the switch's uplink is down; up:
    /// also while these are down. By default auto.
    #[option("link=auto|up|down", change("State of its link"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(about = "State of the link.")]
    pub link: Option<LinkPolicy>,
    /// On a switch: reach only the uplink and the PF. By default off.
    #[option("isolated=on|off", change("Let it reach only the uplink and the PF of its switch"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolated: Option<bool>,
    /// On a switch, function that gets a copy of the packets that the guest sends. By default off.
    #[option("mirror=off|pf|<VF>", change("off|pf|VF", "Function that gets a copy of its sent packets on its switch"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Mirror>,
    /// On a switch, weight of the function's share of the workers' time and of the uplink's rate under contention, 1 to
    /// 100. By default 10.
    #[option(
        "weight=<number>",
        change("1-100", "Weight of its share of its switch's time and uplink under contention")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub weight: Option<u8>,
}

impl PolicyConfig {
    /// The value of the key `key` as on the command line, if it is given.
    pub fn value_of(&self, key: &str) -> Option<String> {
        self.pairs_of(key).into_iter().next().map(|(_, value)| value)
    }

    /// The keys that are given, with their values as on the command line.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, String)> {
        Self::FIELDS.iter().flat_map(|field| self.pairs_of(field))
    }
}

/// The kind of a VLAN's tags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum VlanProto {
    /// Type 0x8100, a customer's.
    #[default]
    #[serde(rename = "802.1q")]
    Customer,
    /// Type 0x88a8, a provider's.
    #[serde(rename = "802.1ad")]
    Service,
}

impl Value for VlanProto {
    const FORM: Form = Form::Words(&[("802.1q", "Customer tags"), ("802.1ad", "Provider tags")]);

    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "802.1q" => Ok(Self::Customer),
            "802.1ad" => Ok(Self::Service),
            _ => Err("give 802.1q or 802.1ad".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Customer => "802.1q".to_string(),
            Self::Service => "802.1ad".to_string(),
        })
    }
}

/// The link of a network function as set by the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
#[serde(rename_all = "lowercase")]
pub enum LinkPolicy {
    /// Up, unless its backend is lost, or its tap or the uplink of its switch is down.
    #[default]
    Auto,
    /// Up, unless its backend is lost; independent of its tap and of the uplink of its switch.
    Up,
    /// Down.
    Down,
}

impl Value for LinkPolicy {
    const FORM: Form = Form::Words(&[
        ("auto", "Up, unless its backend is lost"),
        ("up", "The link is up"),
        ("down", "The link is down"),
    ]);

    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "up" => Ok(Self::Up),
            "down" => Ok(Self::Down),
            _ => Err("give auto, up or down".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Auto => "auto".to_string(),
            Self::Up => "up".to_string(),
            Self::Down => "down".to_string(),
        })
    }
}

/// The most elements of a list of VLANs: more than there are VLANs.
const MOST: usize = 4096;

/// VLAN IDs: numbers and ascending ranges, such as `[10,20,100-199]`. In JSON a range is a string. An empty list is all
/// of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vlans(pub Vec<RangeInclusive<u16>>);

impl Vlans {
    fn element(text: &str) -> Result<RangeInclusive<u16>, String> {
        let number = |text: &str| digits(text).and_then(|digits| digits.parse::<u16>().ok());
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first < last || first == last && !text.contains('-') => Ok(first..=last),
            (Some(_), Some(_)) => Err("a range must be ascending, such as 100-199".to_string()),
            _ => Err("give a list of VLAN IDs and ranges, such as [10,20,100-199]".to_string()),
        }
    }

    /// Adds an element, unless there are too many.
    fn add(&mut self, range: RangeInclusive<u16>) -> Result<(), String> {
        if self.0.len() == MOST {
            return Err(format!("the list is longer than {MOST} elements"));
        }
        self.0.push(range);
        Ok(())
    }
}

fn text(range: &RangeInclusive<u16>) -> String {
    match (range.start(), range.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    }
}

impl Value for Vlans {
    fn parse(raw: &str) -> Result<Self, String> {
        let mut vlans = Self::default();
        for element in list(raw)? {
            vlans.add(Self::element(&element)?)?;
        }
        Ok(vlans)
    }

    fn print(&self) -> Option<String> {
        (!self.0.is_empty()).then(|| self.to_string())
    }
}

impl FromStr for Vlans {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Value::parse(text)
    }
}

impl fmt::Display for Vlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.0.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

impl Component for Vlans {
    const NAME: &'static str = "Vlans";

    fn define(_: &mut Components) -> Definition {
        let range = json!({"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"});
        let values = json!([{"type": "integer", "minimum": 0, "maximum": 4094}, range]);
        let about = "VLAN IDs, and ranges of them as strings such as \"100-199\". All of them if left out.";
        let (kind, items) = ("array", json!({"oneOf": values}));
        Definition::other(Self::NAME, json!({"type": kind, "description": about, "maxItems": MOST, "items": items}))
    }
}

impl Schema for Vlans {
    fn describe(components: &mut Components) -> serde_json::Value {
        components.reference::<Self>()
    }
}

impl Serialize for Vlans {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut elements = serializer.serialize_seq(Some(self.0.len()))?;
        for range in &self.0 {
            match (range.start(), range.end()) {
                (first, last) if first == last => elements.serialize_element(first)?,
                _ => elements.serialize_element(&text(range))?,
            }
        }
        elements.end()
    }
}

/// An element in JSON.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a VLAN ID, or a range such as \"100-199\"")]
enum Element {
    Id(u16),
    Range(String),
}

impl<'de> Deserialize<'de> for Vlans {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Elements)
    }
}

struct Elements;

impl<'de> Visitor<'de> for Elements {
    type Value = Vlans;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of VLAN IDs and ranges such as \"100-199\"")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vlans, A::Error> {
        let mut vlans = Vlans::default();
        while let Some(element) = elements.next_element()? {
            let range = match element {
                Element::Id(id) => Ok(id..=id),
                Element::Range(text) => Vlans::element(&text),
            };
            range.and_then(|range| vlans.add(range)).map_err(A::Error::custom)?;
        }
        Ok(vlans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vlans_are_the_same_on_the_command_line_and_in_json() {
        let vlans = Vlans::parse("[10,20,100-199]").unwrap();
        assert_eq!(vlans.print().as_deref(), Some("[10,20,100-199]"));
        let json = serde_json::json!([10, 20, "100-199"]);
        assert_eq!(serde_json::to_value(&vlans).unwrap(), json);
        assert_eq!(serde_json::from_value::<Vlans>(json).unwrap(), vlans);
        assert_eq!((Vlans::parse("[]").unwrap(), Vlans::default().print()), (Vlans::default(), None));
        for wrong in ["[a]", "[1-]", "[3-2]", "[2-2]", "[-1]", "[70000]", "[1--2]"] {
            assert!(Vlans::parse(wrong).is_err(), "{wrong}");
        }
        for wrong in ["[-1]", "[70000]", "[\"x\"]", "[\"3-2\"]", "[[]]", "{}", "1", "[1.5]"] {
            assert!(serde_json::from_str::<Vlans>(wrong).is_err(), "{wrong}");
        }
        assert!(serde_json::from_value::<Vlans>(serde_json::json!(vec![1; 5000])).is_err());
    }

    #[test]
    fn words_are_the_same_on_the_command_line_and_in_json() {
        for (text, json, proto) in
            [("802.1Q", "802.1q", VlanProto::Customer), ("802.1ad", "802.1ad", VlanProto::Service)]
        {
            assert_eq!(VlanProto::parse(text), Ok(proto));
            assert_eq!((serde_json::to_value(proto).unwrap(), proto.print().as_deref()), (json.into(), Some(json)));
        }
        for (text, link) in [("auto", LinkPolicy::Auto), ("up", LinkPolicy::Up), ("down", LinkPolicy::Down)] {
            assert_eq!((LinkPolicy::parse(text), link.print().as_deref()), (Ok(link), Some(text)));
            assert_eq!(serde_json::to_value(link).unwrap(), text);
        }
        assert!(VlanProto::parse("q").is_err() && LinkPolicy::parse("on").is_err());
    }
}
