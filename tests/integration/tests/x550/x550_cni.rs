//! CNI plugins in a guest whose VFs are those of an X550: a VF moves into a network namespace by `cnitool` and the
//! plugin host-device, with what a client has set for it by the library of SR-IOV plugins.

#![expect(clippy::panic, reason = "a test fails by panicking, also in its helpers")]

use std::time::Duration;

use integration::{Kernel, X550, cni_programs};
use rstest::rstest;
use serde_json::{Value, json};

/// Time that the programs of a step may take. Go's start slowly under emulation.
const LIMIT: Duration = Duration::from_secs(60);
/// Address that the client gives to VF 1.
const GIVEN: &str = "52:54:00:00:07:01";

/// The configuration of a network of one VF.
fn network(vf: usize) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": format!("net{vf}"), "plugins": [{
            "type": "host-device", "pciBusID": address(vf),
            "ipam": {"type": "static", "addresses": [{"address": format!("10.88.0.{}/24", vf + 1)}]}
        }]
    })
}

fn address(vf: usize) -> String {
    format!("0000:01:00.{vf}")
}

/// A guest's programs, networks and pods.
struct Node(X550);

impl Node {
    /// A guest with VFs, and a network and a namespace for each.
    fn boot(kernel: Kernel, vfs: usize) -> Node {
        let disk = format!("path={},readonly=on,pci_device_id=9", cni_programs().display());
        let mut node = Node(X550::boot_with(kernel, vfs, |spec| spec.disk(&disk)));
        node.0.enable(vfs);
        let guest = &mut node.0.guest;
        guest.load("virtio_blk");
        guest.ok_within(
            "mkdir -p /tmp/cni /tmp/conf /var/lib && ln -s /run /var/run && tar -xf /dev/vda -C /tmp/cni",
            LIMIT,
        );
        for vf in 0..vfs {
            guest.ok(&format!("echo '{}' > /tmp/conf/{vf}.conflist", network(vf)));
            guest.ok(&format!("/usr/bin/ip netns add pod{vf}"));
        }
        node
    }

    /// Runs a command of `cnitool` for the pod of a VF. Returns its status and what it says.
    fn cni(&mut self, command: &str, vf: usize) -> (i32, String) {
        let line =
            format!("CNI_PATH=/tmp/cni NETCONFPATH=/tmp/conf /tmp/cni/cnitool {command} net{vf} /run/netns/pod{vf}");
        let said = self.0.guest.run_within(&line, LIMIT);
        (said.status, said.text)
    }

    /// Sets keys of a VF by the client, which must succeed. Returns what is set then.
    fn set(&mut self, vf: usize, keys: &str) -> Value {
        let text = self.0.guest.ok_within(&format!("/tmp/cni/vf {} {keys}", address(vf)), LIMIT);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The error of the client, which must fail.
    fn refused(&mut self, vf: usize, keys: &str) -> String {
        let said = self.0.guest.run_within(&format!("/tmp/cni/vf {} {keys}", address(vf)), LIMIT);
        assert_ne!(said.status, 0, "{keys}: {}", said.text);
        said.text
    }

    /// Adds a pod, checks it, and waits until it reaches `address`. Then the pod is removed, and its VF is back.
    fn live(&mut self, vf: usize, address: &str) {
        let (status, result) = self.cni("add", vf);
        assert_eq!(status, 0, "{result}");
        assert!(result.contains(&format!("10.88.0.{}/24", vf + 1)), "{result}");
        assert_eq!(self.cni("check", vf), (0, String::new()));
        let ping = format!("/usr/bin/ip netns exec pod{vf} ping -c 1 -W 1 {address}");
        self.0.guest.wait_for(&ping);
        assert_eq!(self.cni("del", vf).0, 0);
        self.0.guest.wait_for(&format!("ls /sys/bus/pci/devices/{}/net/*/address", self::address(vf)));
    }
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::Generic6_1)]
#[case::linux_6_12(Kernel::Generic)]
#[ignore = "a longer test: a third kernel, which is fetched for it"]
#[case::linux_backports(Kernel::GenericBackports)]
fn vfs_of_an_x550_serve_pods_with_each_key(#[case] kernel: Kernel) {
    let mut node = Node::boot(kernel, 3);
    let uplink = X550::UPLINK.to_string();
    node.live(0, &uplink);

    let set = node.set(1, "spoofchk=off max_tx_rate=500");
    let wanted = json!({"spoofchk": false, "max_tx_rate": 500});
    for (key, value) in wanted.as_object().into_iter().flatten() {
        assert_eq!(&set[key], value, "{key}: {set}");
    }
    node.live(1, &uplink);
    let set = node.set(1, "spoofchk=on max_tx_rate=0");
    assert_eq!((&set["spoofchk"], &set["max_tx_rate"]), (&json!(true), &json!(0)));

    let set = node.set(2, "vlan=7:5");
    assert_eq!((&set["vlan"], &set["qos"]), (&json!(7), &json!(5)));
    // ixgbe accepts "enable", and says in its log that it does not support it.
    for (state, number) in [("disable", 2), ("auto", 0)] {
        // That of Linux 6.1 does not show it.
        let shown = if kernel == Kernel::Generic6_1 { 0 } else { number };
        assert_eq!(node.set(2, &format!("link_state={state}"))["link_state"], shown, "{state}");
    }
    node.set(2, "vlan=0");
    node.live(2, &uplink);

    // The driver of the VF takes these over when it starts again, which it does at most every 10 s.
    let set = node.set(1, &format!("mac={GIVEN}"));
    assert_eq!(set["mac"], GIVEN);
    assert_eq!(node.set(1, "trust=on")["trust"], true);

    // As on hardware, ixgbe has no VLAN protocol but 802.1q, and no rate that is guaranteed.
    assert!(node.refused(0, "vlan=7:0:802.1ad").contains("protocol not supported"));
    assert!(node.refused(0, "min_tx_rate=100").contains("invalid argument"));
    node.0.guest.assert_x550_has_no_complaint();
    assert_eq!(node.0.guest.power_off().code, Some(0));
}
