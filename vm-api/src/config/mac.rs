//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use crate::schema::{Components, Schema};

/// An Ethernet address, written `52:54:00:12:34:56` on the command line and in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// True if the group bit is set: such an address does not identify a single NIC (`IEEE 802-2014 §8.2.2`).
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 0x01 != 0
    }

    /// True if all bits are 0, which is not a NIC's address either.
    pub fn is_zero(self) -> bool {
        self.0 == [0; 6]
    }

    /// These bytes as a locally administered unicast address: bit 0 of the first byte cleared and bit 1 set.
    pub const fn local(mut bytes: [u8; 6]) -> Self {
        bytes[0] = bytes[0] & !0x01 | 0x02;
        Self(bytes)
    }

    /// The address of VF `index`, counted from 0, of a PF with this address.
    ///
    /// Bytes 4 and 5 are the index, bytes 1 to 3 the PF's last three. Byte 0 is the exclusive-or of the PF's first
    /// three, made a locally administered unicast address; bit 2 is inverted if it would equal the PF's byte 0. So VF 3
    /// of `52:54:00:00:00:01` is `06:00:00:01:00:03`. The addresses of all VFs of a PF differ, none is the PF's, and
    /// the VFs of PFs with the same vendor prefix differ too.
    #[must_use]
    pub const fn vf(self, index: u16) -> Self {
        let pf = self.0;
        let [high, low] = index.to_be_bytes();
        let mut mac = Self::local([pf[0] ^ pf[1] ^ pf[2], pf[3], pf[4], pf[5], high, low]);
        if mac.0[0] == pf[0] {
            mac.0[0] ^= 0x04;
        }
        mac
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The MAC address setting of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MacChoice {
    /// This address.
    Given(MacAddress),
    /// On a switch, the derived address, which the VF's driver may change.
    Any,
}

impl MacChoice {
    /// The address, if one is given.
    pub const fn given(self) -> Option<MacAddress> {
        match self {
            Self::Given(mac) => Some(mac),
            Self::Any => None,
        }
    }
}

impl From<MacAddress> for MacChoice {
    fn from(mac: MacAddress) -> Self {
        Self::Given(mac)
    }
}

impl fmt::Display for MacChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given(mac) => mac.fmt(f),
            Self::Any => f.write_str("any"),
        }
    }
}

impl FromStr for MacChoice {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        if text.eq_ignore_ascii_case("any") { Ok(Self::Any) } else { text.parse().map(Self::Given) }
    }
}

impl Serialize for MacChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| D::Error::custom(format_args!("{text:?}: {error}")))
    }
}

/// The text is not an Ethernet address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a MAC address; write it as 52:54:00:12:34:56")]
pub struct ParseMacError;

impl FromStr for MacAddress {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(ParseMacError)?;
            // from_str_radix alone would take a sign.
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(ParseMacError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ParseMacError)?;
        }
        if parts.next().is_some() { Err(ParseMacError) } else { Ok(Self(bytes)) }
    }
}

impl Serialize for MacAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| D::Error::custom(format_args!("{text:?}: {error}")))
    }
}

impl Schema for MacAddress {
    fn describe(_: &mut Components) -> Value {
        json!({"type": "string", "pattern": "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$"})
    }
}

impl Schema for MacChoice {
    fn describe(_: &mut Components) -> Value {
        json!({"type": "string", "pattern": "^([0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}|[Aa][Nn][Yy])$"})
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const PF: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 1]);

    #[test]
    fn an_address_reads_back_what_it_prints() {
        assert_eq!(PF.to_string(), "52:54:00:00:00:01");
        assert_eq!("52:54:00:00:00:01".parse(), Ok(PF));
        assert_eq!(serde_json::to_string(&PF).unwrap(), "\"52:54:00:00:00:01\"");
        assert_eq!(serde_json::from_str::<MacAddress>("\"52:54:00:00:00:01\"").unwrap(), PF);
    }

    #[test]
    fn a_choice_is_an_address_or_any() {
        for (text, choice) in [("52:54:00:00:00:01", MacChoice::Given(PF)), ("any", MacChoice::Any)] {
            assert_eq!((text.parse(), choice.to_string().as_str()), (Ok(choice), text));
            let json = format!("\"{text}\"");
            assert_eq!(serde_json::to_string(&choice).unwrap(), json);
            assert_eq!(serde_json::from_str::<MacChoice>(&json).unwrap(), choice);
        }
        assert_eq!("Any".parse(), Ok(MacChoice::Any));
        assert!("none".parse::<MacChoice>().is_err() && serde_json::from_str::<MacChoice>("\"\"").is_err());
    }

    #[test]
    fn a_malformed_address_is_refused() {
        for text in
            ["", "52:54:00:00:00", "52:54:00:00:00:01:02", "52:54:00:00:00:1", "52:54:00:00:00:+1", "52-54-00-00-00-01"]
        {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_vf_address_tells_pf_and_index() {
        assert_eq!(PF.vf(0).to_string(), "06:00:00:01:00:00");
        assert_eq!(PF.vf(300).to_string(), "06:00:00:01:01:2c");
    }

    #[test]
    fn vf_mac_addresses_differ_from_each_other_and_from_the_pf() {
        // The second PF has the address that one of its VFs would have if byte 0 were not changed.
        for pf in [PF, MacAddress([0x02, 0, 0x01, 0, 0x01, 0]), MacAddress([0x02, 0, 0, 0, 0, 0])] {
            let all: HashSet<_> = (0..=u16::MAX).map(|index| pf.vf(index)).chain([pf]).collect();
            assert_eq!(all.len(), 65_537, "{pf}");
            assert!(all.iter().all(|mac| !mac.is_multicast() && (mac.0[0] & 2 != 0)), "{pf}");
        }
    }

    #[test]
    fn the_vfs_of_neighbouring_pfs_differ() {
        let next = MacAddress([0x52, 0x54, 0, 0, 0, 2]);
        let all: HashSet<_> = (0..512).flat_map(|index| [PF.vf(index), next.vf(index)]).collect();
        assert_eq!(all.len(), 1024);
    }
}
