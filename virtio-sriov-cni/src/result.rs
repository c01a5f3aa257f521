//! Results of ADD, of this plugin and others, in the form of each version (`CNI 1.1.0, Section 5`).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::net::IpNet;
use crate::version::Version;

/// The interfaces, addresses and routes of an attachment. Keys that are not read are kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Attached {
    /// Interfaces. An IPAM plugin has none.
    #[serde(default, deserialize_with = "or_none")]
    pub interfaces: Vec<Interface>,
    /// Addresses.
    #[serde(default, deserialize_with = "or_none")]
    pub ips: Vec<Ip>,
    /// Routes.
    #[serde(default, deserialize_with = "or_none")]
    pub routes: Vec<Route>,
    /// DNS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<Value>,
}

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// Longest packet in bytes, from 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Namespace; none on the host.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// PCI address, from 1.1.0.
    #[serde(default, rename = "pciID", skip_serializing_if = "String::is_empty")]
    pub pci: String,
    /// Keys of other plugins.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// An address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ip {
    /// Address with the length of its prefix.
    pub address: IpNet,
    /// Gateway of the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Index of its interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// Keys of other plugins, and `version` before 1.0.0.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// Next hop; without one, the gateway of an address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// Longest packet in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Largest segment of TCP in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
    /// Metric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Routing table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// Scope: 0 global, 253 link, 254 host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
}

/// Go programs write `null` for an empty list.
fn or_none<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Attached {
    /// The result of this plugin: its interface and the IPAM plugin's answer after what a plugin before has made.
    #[must_use]
    pub fn after(previous: Option<Self>, interface: Interface, ipam: &Self) -> Self {
        let mut result = previous.unwrap_or_default();
        let index = result.interfaces.len();
        result.interfaces.push(interface);
        result.ips.extend(ipam.ips.iter().map(|ip| Ip { interface: Some(index), ..ip.clone() }));
        result.routes.extend(ipam.routes.iter().cloned());
        result.dns = ipam.dns.clone().filter(has_keys).or(result.dns);
        result
    }

    /// Next hop of a route: its own, or the gateway of the first address of its family.
    pub fn gateway(&self, route: &Route) -> Option<IpAddr> {
        let is_of_family = |gateway: &IpAddr| gateway.is_ipv4() == route.dst.address.is_ipv4();
        // A route on the link has none.
        let of_address = || self.ips.iter().filter_map(|ip| ip.gateway).find(is_of_family);
        route.gw.or_else(|| if route.scope.unwrap_or(0) == 0 { of_address() } else { None })
    }

    /// The result as JSON of a version.
    pub fn to_json(&self, version: Version) -> Value {
        let mut result = self.clone();
        for ip in &mut result.ips {
            ip.others.remove("version");
            if version < Version::V1_0_0 {
                let family = if ip.address.address.is_ipv4() { "4" } else { "6" };
                ip.others.insert("version".into(), family.into());
            }
        }
        if version < Version::V1_1_0 {
            for interface in &mut result.interfaces {
                (interface.mtu, interface.pci) = (None, String::new());
                interface.others.remove("socketPath");
            }
            for route in &mut result.routes {
                *route = Route { mtu: None, advmss: None, priority: None, table: None, scope: None, ..route.clone() };
            }
        }
        let mut json = json!(result);
        json["cniVersion"] = version.as_str().into();
        json
    }
}

fn has_keys(value: &Value) -> bool {
    value.as_object().is_some_and(|map| !map.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attached() -> Attached {
        let ipam: Attached = serde_json::from_value(json!({
            "cniVersion": "1.1.0",
            "ips": [{"address": "10.0.0.5/24", "gateway": "10.0.0.1"}, {"address": "2001:db8::5/64", "version": "6"}],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.0.0.9", "mtu": 1400, "table": 7}],
            "dns": {"nameservers": ["10.0.0.2"]}
        }))
        .unwrap();
        let interface = Interface {
            name: "net1".into(),
            mac: "52:54:00:00:01:aa".into(),
            mtu: Some(1500),
            sandbox: "/run/netns/a".into(),
            pci: "0000:01:00.3".into(),
            others: Map::new(),
        };
        Attached::after(None, interface, &ipam)
    }

    #[test]
    fn a_result_of_1_1_0_has_mtu_and_pci_address() {
        let expected = json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "net1", "mac": "52:54:00:00:01:aa", "mtu": 1500, "sandbox": "/run/netns/a",
                "pciID": "0000:01:00.3"}],
            "ips": [{"address": "10.0.0.5/24", "gateway": "10.0.0.1", "interface": 0},
                {"address": "2001:db8::5/64", "interface": 0}],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.0.0.9", "mtu": 1400, "table": 7}],
            "dns": {"nameservers": ["10.0.0.2"]}
        });
        assert_eq!(attached().to_json(Version::V1_1_0), expected);
    }

    #[test]
    fn results_of_older_versions_have_the_keys_of_these() {
        for (version, name) in [(Version::V0_3_1, "0.3.1"), (Version::V0_4_0, "0.4.0"), (Version::V1_0_0, "1.0.0")] {
            let json = attached().to_json(version);
            assert_eq!(json["cniVersion"], name);
            let interface = json!({"name": "net1", "mac": "52:54:00:00:01:aa", "sandbox": "/run/netns/a"});
            assert_eq!(json["interfaces"], json!([interface]));
            assert_eq!(json["routes"][1], json!({"dst": "10.9.0.0/16", "gw": "10.0.0.9"}));
            let family = |n: usize| json["ips"][n].get("version").cloned();
            let expected = if name == "1.0.0" { [None, None] } else { [Some("4".into()), Some("6".into())] };
            assert_eq!([family(0), family(1)], expected, "{name}");
        }
    }

    #[test]
    fn the_result_of_the_plugin_before_is_passed_on() {
        let previous = json!({
            "interfaces": [{"name": "cni0", "mac": "02:00:00:00:00:01", "vendor": {"a": 1}}],
            "ips": [{"address": "10.5.0.2/16", "interface": 0}], "routes": null, "dns": {"domain": "example.com"}
        });
        let ours = attached();
        let ipam = Attached { dns: Some(json!({})), ..ours.clone() };
        let previous = serde_json::from_value(previous).unwrap();
        let json = Attached::after(Some(previous), ours.interfaces[0].clone(), &ipam).to_json(Version::V1_1_0);
        let first = json!({"name": "cni0", "mac": "02:00:00:00:00:01", "vendor": {"a": 1}});
        assert_eq!(json["interfaces"][0], first);
        assert_eq!(json["interfaces"][1]["name"], "net1");
        let indices: Vec<_> = (0..3).map(|n| json["ips"][n]["interface"].clone()).collect();
        assert_eq!(indices, [json!(0), json!(1), json!(1)]);
        assert_eq!(json["dns"], json!({"domain": "example.com"}));
    }

    #[test]
    fn a_route_without_next_hop_takes_the_gateway_of_its_family() {
        let result = attached();
        let gateways: Vec<_> = result.routes.iter().map(|route| result.gateway(route)).collect();
        assert_eq!(gateways, ["10.0.0.1", "10.0.0.9"].map(|text| text.parse().ok()));
        let v6 = Route { dst: "::/0".parse().unwrap(), gw: None, ..result.routes[0].clone() };
        assert_eq!(result.gateway(&v6), None);
        let on_link = Route { scope: Some(253), ..result.routes[0].clone() };
        assert_eq!(result.gateway(&on_link), None);
    }
}
