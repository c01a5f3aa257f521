//! Rights of the guest over the VFs of a PF, and the settings that it has made with them.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::grammar::list;
use crate::config::mac::MacAddress;
use crate::config::net::policy::{LinkPolicy, MAX_QOS, MAX_VLAN, VlanProto};
use crate::config::value::{Value, digits};
use crate::schema::{Component, Components, Definition, Schema};

/// All VLANs that a port can have.
const VLANS: RangeInclusive<u16> = 1..=MAX_VLAN;
/// The most elements of the list, so that a reply has room for it.
const MOST: usize = 32;
/// Reason for the refusal of an element.
const WRONG: &str = "give a list of vlan, vlan:<id>, vlan:<id>-<id>, mac, max_tx_rate, max_tx_rate:<Mbit/s>, link and \
                     spoofchk, such as [vlan:100-199,mac]";

/// Settings of its VFs that the guest may change, with their limits, such as `[vlan:100-199,mac]`. In JSON each element
/// is a string.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct GuestControl {
    /// VLANs that it may choose from; none if it may not set a VLAN.
    pub vlans: Vec<RangeInclusive<u16>>,
    /// True if it may set MAC addresses.
    pub mac: bool,
    /// Largest transmit limit that it may set, in Mbit/s, [`u32::MAX`] for any; `None` if it may not set one.
    pub max_tx_rate: Option<u32>,
    /// True if it may set links.
    pub link: bool,
    /// True if it may turn the spoof check on, or off if the host has not turned it on.
    pub spoofchk: bool,
}

impl GuestControl {
    /// The elements of the list.
    pub fn elements(&self) -> Vec<String> {
        let Self { vlans, mac, max_tx_rate, link, spoofchk } = self;
        let vlans = vlans.iter().map(|range| match (*range.start(), *range.end()) {
            _ if *range == VLANS => "vlan".to_string(),
            (first, last) if first == last => format!("vlan:{first}"),
            (first, last) => format!("vlan:{first}-{last}"),
        });
        let rate = max_tx_rate.map(|limit| match limit {
            u32::MAX => "max_tx_rate".to_string(),
            limit => format!("max_tx_rate:{limit}"),
        });
        let word = |is_in: &bool, word: &str| is_in.then(|| word.to_string());
        let rest = [word(mac, "mac"), rate, word(link, "link"), word(spoofchk, "spoofchk")];
        vlans.chain(rest.into_iter().flatten()).collect()
    }

    /// The VLANs that it may choose from, as in messages: `100-199, 300`.
    pub fn vlans_text(&self) -> String {
        let text = |range: &RangeInclusive<u16>| match (range.start(), range.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        };
        self.vlans.iter().map(text).collect::<Vec<_>>().join(", ")
    }

    fn of(elements: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, String> {
        let mut new = Self::default();
        let mut count = 0;
        for element in elements {
            count += 1;
            if count > MOST {
                return Err(format!("the list is longer than {MOST} elements; give ranges of VLANs"));
            }
            new.add(element.as_ref())?;
        }
        if count == 0 {
            return Err(format!("the list is empty; leave it out, or {WRONG}"));
        }
        Ok(new)
    }

    fn add(&mut self, element: &str) -> Result<(), String> {
        let twice = |is_known: bool, key: &str| {
            if is_known { Err(format!("{key} is given twice; give it once")) } else { Ok(()) }
        };
        let (key, limit) = match element.split_once(':') {
            Some((key, limit)) => (key, Some(limit)),
            None => (element, None),
        };
        match (key, limit) {
            ("vlan", limit) => {
                let range = limit.map_or(Ok(VLANS), vlans)?;
                twice(self.vlans.contains(&range), element)?;
                self.vlans.push(range);
            }
            ("mac", None) => {
                twice(self.mac, key)?;
                self.mac = true;
            }
            ("max_tx_rate", limit) => {
                twice(self.max_tx_rate.is_some(), key)?;
                self.max_tx_rate = Some(limit.map_or(Ok(u32::MAX), rate)?);
            }
            ("link", None) => {
                twice(self.link, key)?;
                self.link = true;
            }
            ("spoofchk", None) => {
                twice(self.spoofchk, key)?;
                self.spoofchk = true;
            }
            _ => return Err(WRONG.to_string()),
        }
        Ok(())
    }
}

/// The VLANs of the limit `text`: one, or an ascending range.
fn vlans(text: &str) -> Result<RangeInclusive<u16>, String> {
    let number = |text: &str| digits(text).and_then(|digits| digits.parse::<u16>().ok());
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (number(first), number(last)) {
        (Some(first), Some(last)) if !VLANS.contains(&first) || !VLANS.contains(&last) => {
            Err(format!("vlan:{text} is no VLAN; give {} to {}", VLANS.start(), VLANS.end()))
        }
        (Some(first), Some(last)) if first < last || first == last && !text.contains('-') => Ok(first..=last),
        (Some(_), Some(_)) => Err("a range must be ascending, such as vlan:100-199".to_string()),
        _ => Err(WRONG.to_string()),
    }
}

/// The limit `text` of transmit limits.
fn rate(text: &str) -> Result<u32, String> {
    match digits(text).and_then(|digits| digits.parse().ok()) {
        Some(0) => Err("max_tx_rate:0 is no limit; give 1 or more Mbit/s, or max_tx_rate alone".to_string()),
        Some(limit) => Ok(limit),
        None => Err(WRONG.to_string()),
    }
}

impl Value for GuestControl {
    fn parse(raw: &str) -> Result<Self, String> {
        Self::of(list(raw)?)
    }

    fn print(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl FromStr for GuestControl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Value::parse(text)
    }
}

impl fmt::Display for GuestControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.elements().join(","))
    }
}

impl TryFrom<Vec<String>> for GuestControl {
    type Error = String;

    fn try_from(elements: Vec<String>) -> Result<Self, String> {
        Self::of(elements)
    }
}

impl From<GuestControl> for Vec<String> {
    fn from(control: GuestControl) -> Self {
        control.elements()
    }
}

impl Component for GuestControl {
    const NAME: &'static str = "GuestControl";

    fn define(_: &mut Components) -> Definition {
        let pattern = "^(vlan(:[0-9]+(-[0-9]+)?)?|mac|max_tx_rate(:[0-9]+)?|link|spoofchk)$";
        let about = "Settings of its VFs that the guest may change, with their limits, such as \"vlan:100-199\".";
        let items = json!({"type": "string", "pattern": pattern});
        let schema = json!({"type": "array", "description": about, "minItems": 1, "maxItems": MOST, "items": items});
        Definition::other(Self::NAME, schema)
    }
}

impl Schema for GuestControl {
    fn describe(components: &mut Components) -> serde_json::Value {
        components.reference::<Self>()
    }
}

/// Settings that the guest has made for one VF, which end before the host's do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestSettings {
    /// Port VLAN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Priority in the tag of `vlan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan_qos: Option<u8>,
    /// Tag protocol of `vlan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan_proto: Option<VlanProto>,
    /// MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// Transmit limit in Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// State of the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkPolicy>,
    /// Drop packets from other MAC addresses than the VF's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoofchk: Option<bool>,
}

impl GuestSettings {
    /// True if a guest can have made these settings: each value is in its range.
    pub fn are_possible(&self) -> bool {
        self.vlan.is_none_or(|vlan| VLANS.contains(&vlan))
            && self.vlan_qos.is_none_or(|qos| qos <= MAX_QOS)
            && self.mac.is_none_or(|mac| !mac.is_multicast() && !mac.is_zero())
    }

    /// The keys that are set.
    pub fn keys(&self) -> Vec<&'static str> {
        let Self { vlan, vlan_qos, vlan_proto, mac, max_tx_rate, link, spoofchk } = self;
        let keys = [
            ("vlan", vlan.is_some()),
            ("vlan_qos", vlan_qos.is_some()),
            ("vlan_proto", vlan_proto.is_some()),
            ("mac", mac.is_some()),
            ("max_tx_rate", max_tx_rate.is_some()),
            ("link", link.is_some()),
            ("spoofchk", spoofchk.is_some()),
        ];
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key).collect()
    }

    /// True if no key is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Ends the setting `key`, with those that go only with it. Returns false if it is not set.
    pub fn end(&mut self, key: &str) -> bool {
        let before = self.clone();
        match key {
            "vlan" => (self.vlan, self.vlan_qos, self.vlan_proto) = (None, None, None),
            "vlan_qos" => self.vlan_qos = None,
            "vlan_proto" => self.vlan_proto = None,
            "mac" => self.mac = None,
            "max_tx_rate" => self.max_tx_rate = None,
            "link" => self.link = None,
            "spoofchk" => self.spoofchk = None,
            _ => {}
        }
        *self != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_the_same_on_the_command_line_and_in_json() {
        let text = "[vlan:100-199,vlan:300,mac,max_tx_rate:1000,link,spoofchk]";
        let all = GuestControl {
            vlans: vec![100..=199, 300..=300],
            mac: true,
            max_tx_rate: Some(1000),
            link: true,
            spoofchk: true,
        };
        assert_eq!((GuestControl::parse(text), all.print().as_deref()), (Ok(all.clone()), Some(text)));
        let json = json!(["vlan:100-199", "vlan:300", "mac", "max_tx_rate:1000", "link", "spoofchk"]);
        assert_eq!(serde_json::to_value(&all).unwrap(), json);
        assert_eq!(serde_json::from_value::<GuestControl>(json).unwrap(), all);
        let any = GuestControl::parse("[max_tx_rate,vlan]").unwrap();
        assert_eq!((any.vlans.clone(), any.max_tx_rate), (vec![1..=4094], Some(u32::MAX)));
        assert_eq!((any.to_string().as_str(), all.vlans_text().as_str()), ("[vlan,max_tx_rate]", "100-199, 300"));
    }

    #[test]
    fn a_wrong_element_is_refused_with_what_to_do() {
        for (text, expected) in [
            ("[]", "the list is empty; leave it out, or give a list"),
            ("[trust]", "give a list of vlan, vlan:<id>"),
            ("[mac:1]", "give a list of vlan"),
            ("[vlan:x]", "give a list of vlan"),
            ("[vlan:0]", "vlan:0 is no VLAN; give 1 to 4094"),
            ("[vlan:9-4095]", "vlan:9-4095 is no VLAN"),
            ("[vlan:9-8]", "a range must be ascending"),
            ("[vlan:9-9]", "a range must be ascending"),
            ("[mac,mac]", "mac is given twice; give it once"),
            ("[vlan:5,vlan:5]", "vlan:5 is given twice"),
            ("[max_tx_rate:5,max_tx_rate]", "max_tx_rate is given twice"),
            ("[max_tx_rate:0]", "max_tx_rate:0 is no limit"),
            ("[max_tx_rate:-1]", "give a list of vlan"),
        ] {
            let refused = GuestControl::parse(text).unwrap_err();
            assert!(refused.starts_with(expected), "{text}: {refused}");
        }
        let long: Vec<_> = (1..=33).map(|id| format!("vlan:{id}")).collect();
        assert!(GuestControl::try_from(long[..32].to_vec()).is_ok() && GuestControl::try_from(long).is_err());
        for wrong in ["[]", "[1]", "\"mac\"", "{}", "[\"trust\"]"] {
            assert!(serde_json::from_str::<GuestControl>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_setting_ends_with_those_that_go_only_with_it() {
        let mut set =
            GuestSettings { vlan: Some(5), vlan_qos: Some(1), link: Some(LinkPolicy::Up), ..Default::default() };
        assert_eq!(set.keys(), ["vlan", "vlan_qos", "link"]);
        assert!(set.end("vlan") && !set.end("vlan") && !set.end("trust"));
        assert!(set.keys() == ["link"] && set.end("link") && set.is_empty());
    }
}
