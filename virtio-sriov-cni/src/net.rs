//! Networks as text: an address with the length of its prefix.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An address with the length of its prefix, `192.0.2.1/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpNet {
    /// Address.
    pub address: IpAddr,
    /// Length of the prefix in bits.
    pub prefix: u8,
}

impl IpNet {
    /// True for the destination of a default route.
    pub fn is_default(self) -> bool {
        self.prefix == 0
    }

    /// The network: the address without the bits of the host.
    pub fn network(self) -> Self {
        let prefix = u32::from(self.prefix);
        let address = match self.address {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
                IpAddr::V4((u32::from(v4) & mask).into())
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
                IpAddr::V6((u128::from(v6) & mask).into())
            }
        };
        Self { address, ..self }
    }
}

/// Bytes of an address.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The address of 4 or 16 bytes.
pub fn from_octets(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    v4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}

impl FromStr for IpNet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (address, prefix) = text.split_once('/')?;
            let address: IpAddr = address.parse().ok()?;
            let prefix: u8 = prefix.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            (prefix <= most).then_some(Self { address, prefix })
        };
        parse().ok_or_else(|| format!("{text:?} is not an address with the length of its prefix"))
    }
}

impl fmt::Display for IpNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Serialize for IpNet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IpNet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_its_address_without_the_hosts_bits() {
        for (text, network) in [
            ("10.1.2.3/24", "10.1.2.0/24"),
            ("10.1.2.3/0", "0.0.0.0/0"),
            ("10.1.2.3/32", "10.1.2.3/32"),
            ("2001:db8::7/64", "2001:db8::/64"),
            ("::/0", "::/0"),
        ] {
            let net: IpNet = text.parse().unwrap();
            assert_eq!(net.to_string(), text);
            assert_eq!(net.network().to_string(), network);
            assert_eq!(from_octets(&octets(net.address)), Some(net.address));
        }
        for wrong in ["10.0.0.1", "10.0.0.1/33", "::1/129", "a/1", "10.0.0.1/-1", ""] {
            assert!(wrong.parse::<IpNet>().is_err(), "{wrong}");
        }
    }
}
