//! MAC addresses that several devices share.

use std::collections::HashMap;

use crate::config::device::DevicePlan;
use vm_api::config::mac::MacAddress;

/// An address of two devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedMac {
    /// The address.
    pub mac: MacAddress,
    /// The ids of the devices, in the order of the configuration.
    pub devices: [String; 2],
}

impl SharedMac {
    /// The addresses that devices share with others before them, one for each device.
    pub(crate) fn all(devices: &[DevicePlan]) -> Vec<Self> {
        let (mut users, mut shared) = (HashMap::<_, &str>::new(), Vec::new());
        for device in devices {
            let id = device.id.as_str();
            if let Some((mac, user)) = device.macs().find_map(|mac| Some((mac, *users.get(&mac)?))) {
                shared.push(Self { mac, devices: [user, id].map(str::to_string) });
            }
            device.macs().for_each(|mac| _ = users.entry(mac).or_insert(id));
        }
        shared
    }

    /// The line for a log.
    pub(crate) fn warning(&self) -> String {
        let Self { mac, devices: [one, other] } = self;
        format!(
            "{one} and {other} both have the MAC address {mac}; on one network, packets for it reach either of them"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{VmConfig, VmPlan};

    #[test]
    fn two_devices_with_one_address_are_named_once() {
        let shared = |nets: &[&str]| {
            let net = nets.iter().map(|net| net.parse().unwrap()).collect();
            SharedMac::all(&VmPlan::of(&VmConfig { net, ..VmConfig::default() }).unwrap().devices)
        };
        let (one, derived) = ("52:54:00:00:00:01", "06:00:00:01:00:03");
        assert_eq!(shared(&["id=a", &format!("id=b,mac={one}"), &format!("id=c,mac={derived}")]), []);
        let expected = |mac: &str, other: &str| SharedMac {
            mac: mac.parse().unwrap(),
            devices: ["a".to_string(), other.to_string()],
        };
        let [a, b, c] = ["a", "b", "c"].map(|id| format!("id={id},mac={one},sriov_vfs=4"));
        assert_eq!(shared(&[&a, &b, &c]), [expected(one, "b"), expected(one, "c")], "one line for each of both");
        let found = shared(&[&a, &format!("id=d,mac={derived}")]);
        assert_eq!(found, [expected(derived, "d")], "one that follows from a PF's");
        assert_eq!(
            found[0].warning(),
            format!("a and d both have the MAC address {derived}; on one network, packets for it reach either of them")
        );
    }
}
