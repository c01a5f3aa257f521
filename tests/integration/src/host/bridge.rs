//! A bridge of the host: a network in which one tap can replace another from one moment to the next.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::host::tap::{HostTap, Subnet};
use crate::lab;

/// The lab's iproute2, which busybox's `ip` would hide.
const IP: &str = "/usr/sbin/ip";

/// A bridge, which is removed when this is dropped.
pub struct Bridge {
    name: String,
}

impl Bridge {
    /// A bridge between `ports`, with the host's address in `subnet`.
    pub fn new(name: &str, subnet: Subnet, ports: &[&str]) -> Bridge {
        load_driver();
        // Left by a test that was killed.
        if Path::new("/sys/class/net").join(name).exists() {
            ip(&["link", "del", name]);
        }
        ip(&["link", "add", name, "type", "bridge"]);
        let bridge = Bridge { name: name.to_owned() };
        for port in ports {
            let knob = format!("/proc/sys/net/ipv6/conf/{port}/disable_ipv6");
            if Path::new(&knob).exists() {
                fs::write(&knob, "1").expect("IPv6 can be switched off");
            }
            ip(&["link", "set", port, "master", name, "up"]);
        }
        HostTap::existing(name).join(subnet);
        bridge
    }

    /// Name of the bridge.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // Errors are ignored, to keep the message of a failing test.
        let _ = Command::new(IP).args(["link", "del", &self.name]).status();
    }
}

/// A bridge with VLANs, as `contrib/network/bridge-with-vlans` makes it. Its uplink is one end of a veth pair, whose
/// other end stands for the network. All of it is removed when this is dropped.
pub struct VlanBridge {
    name: String,
    taps: Vec<String>,
}

/// The bridge's end of the pair, and that of the network.
const UPLINK: [&str; 2] = ["vlanup", "vlannet"];

impl VlanBridge {
    /// Runs the script for a PF whose tap is `tap`, and a VF in each VLAN of `vlans`.
    pub fn make(name: &str, tap: &str, vlans: &[&str]) -> VlanBridge {
        load_driver();
        let vf_taps = (0..vlans.len()).map(|index| format!("{tap}v{index}"));
        let bridge = VlanBridge { name: name.to_owned(), taps: vf_taps.chain([tap.to_owned()]).collect() };
        // Left by a test that was killed.
        bridge.remove();
        ip(&["link", "add", UPLINK[0], "type", "veth", "peer", "name", UPLINK[1]]);
        ip(&["link", "set", UPLINK[1], "up"]);
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/network/bridge-with-vlans");
        // Busybox's shell prefers its own `ip`, whatever PATH is.
        let with_iproute2 = r#"ip() { /usr/sbin/ip "$@"; }; bridge() { /usr/sbin/bridge "$@"; }; . "$0""#;
        let mut command = Command::new("sh");
        command.args(["-c", with_iproute2, script, name, UPLINK[0], tap]).args(vlans);
        let output = command.output().unwrap_or_else(|error| panic!("{script}: {error}"));
        assert!(output.status.success(), "{script}: {output:?}");
        bridge
    }

    /// Makes one more tap, whose port carries these VLANs with their tags, as the guide does it.
    pub fn add_trunk_port(&self, tap: &str, vlans: &[&str]) {
        ip(&["tuntap", "add", tap, "mode", "tap", "vnet_hdr"]);
        ip(&["link", "set", tap, "master", &self.name, "up"]);
        for vlan in vlans {
            run("/usr/sbin/bridge", &["vlan", "add", "dev", tap, "vid", vlan]);
        }
    }

    /// Gives the network an address in a VLAN.
    pub fn join_vlan(&self, vlan: &str, address: &str) {
        let name = format!("{}.{vlan}", UPLINK[1]);
        ip(&["link", "add", "link", UPLINK[1], "name", &name, "type", "vlan", "id", vlan]);
        ip(&["addr", "add", &format!("{address}/24"), "dev", &name]);
        ip(&["link", "set", &name, "up"]);
    }

    /// Takes the network out of a VLAN.
    pub fn leave_vlan(&self, vlan: &str) {
        ip(&["link", "del", &format!("{}.{vlan}", UPLINK[1])]);
    }

    /// Removes what exists. Errors are ignored, to keep the message of a failing test.
    fn remove(&self) {
        let taps = self.taps.iter().map(String::as_str);
        for link in taps.chain(["tenant-b", UPLINK[0], &self.name]) {
            if Path::new("/sys/class/net").join(link).exists() {
                let _ = Command::new(IP).args(["link", "del", link]).status();
            }
        }
    }
}

impl Drop for VlanBridge {
    fn drop(&mut self) {
        self.remove();
    }
}

fn ip(arguments: &[&str]) {
    run(IP, arguments);
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(status.success(), "{program} {}: {status}", arguments.join(" "));
}

/// Loads the driver, if the kernel has none yet: the nested lab's is next to its kernel.
fn load_driver() {
    if Path::new("/sys/module/bridge").exists() {
        return;
    }
    for module in lab::container_modules() {
        // Loading a module twice fails.
        let _ = Command::new("insmod").arg(&module).status();
    }
}
