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

fn ip(arguments: &[&str]) {
    let status = Command::new(IP).args(arguments).status().unwrap_or_else(|error| panic!("{IP}: {error}"));
    assert!(status.success(), "ip {}: {status}", arguments.join(" "));
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
