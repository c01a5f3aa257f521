//! A guest as a node of containers: programs from disks, and pods, which are network namespaces here, with interfaces
//! that CNI plugins give them.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::guest::console::Output;
use crate::guest::{Guest, GuestSpec};

/// Time that the programs of a step may take. Go's start slowly under emulation.
const LIMIT: Duration = Duration::from_secs(120);
/// The slot of the first disk with programs. Those below are for NICs.
const FIRST_SLOT: usize = 9;
/// The guest's folder of programs, and of the configurations of networks.
const PROGRAMS: &str = "/tmp/cni";
const NETWORKS: &str = "/tmp/conf";
/// The guest's folder in which a kubelet and device plugins find each other.
const KUBELET: &str = "/var/lib/kubelet/device-plugins";

impl GuestSpec {
    /// Adds a disk for each of these archives of programs, which [`Guest::unpack`] reads.
    pub fn with_archives(self, archives: &[&Path]) -> GuestSpec {
        archives.iter().zip(FIRST_SLOT..).fold(self, |spec, (archive, slot)| {
            spec.disk(&format!("path={},readonly=on,pci_device_id={slot}", archive.display()))
        })
    }
}

impl Guest {
    /// Unpacks the programs of all disks to `/tmp/cni`. The guest has the module of disks, and no other disks than
    /// those of [`GuestSpec::with_archives`].
    pub fn unpack(&mut self) {
        self.load("virtio_blk");
        self.ok(&format!("mkdir -p {PROGRAMS} {NETWORKS} /var/lib /run/netns && ln -s /run /var/run"));
        self.ok_within(&format!("for disk in /dev/vd?; do tar -xf $disk -C {PROGRAMS} || exit 1; done"), LIMIT);
    }

    /// Writes a file of one line, without single quotes in it.
    pub fn write(&mut self, path: &str, text: &str) {
        self.ok(&format!("mkdir -p $(dirname {path}) && echo '{text}' > {path}"));
    }

    /// Makes a namespace for a pod, and a network for it. The name of the network is in its configuration.
    pub fn add_pod(&mut self, name: &str, network: &Value) {
        self.write(&format!("{NETWORKS}/{name}.conf"), &network.to_string());
        self.ok(&format!("touch /run/netns/{name} && unshare --net=/run/netns/{name} true"));
    }

    /// Runs a command of `cnitool` for a pod in a network.
    pub fn cni(&mut self, command: &str, network: &str, pod: &str) -> Output {
        let tool = format!("CNI_PATH={PROGRAMS} NETCONFPATH={NETWORKS} {PROGRAMS}/cnitool");
        self.run_within(&format!("{tool} {command} {network} /run/netns/{pod}"), LIMIT)
    }

    /// As [`Guest::cni`], for a command that must succeed. Returns its output.
    pub fn cni_ok(&mut self, command: &str, network: &str, pod: &str) -> String {
        let Output { status, text } = self.cni(command, network, pod);
        assert_eq!(status, 0, "{command} of {pod} in {network}: {text}");
        text
    }

    /// Runs the SR-IOV device plugin with these pools, and a kubelet to which it offers `count` of them. Returns what
    /// the kubelet has seen of each: `resource`, `devices`, and `env` of a container that gets the first device.
    pub fn offered_by_device_plugin(&mut self, pools: &Value, count: usize) -> Vec<Value> {
        self.write("/etc/pcidp/config.json", &pools.to_string());
        // The plugin reads names of vendors from this file, and does not start without one.
        self.write("/usr/share/misc/pci.ids", "8086  Intel Corporation");
        self.ok(&format!("mkdir -p {KUBELET} && {PROGRAMS}/kubelet {count} > /tmp/resources 2> /tmp/kubelet.log &"));
        // A plugin that finds no kubelet ends.
        self.wait_for(&format!("[ -S {KUBELET}/kubelet.sock ]"));
        self.ok(&format!("{PROGRAMS}/sriovdp -logtostderr > /tmp/dp.log 2>&1 &"));
        let ready = format!("[ $(wc -l < /tmp/resources) = {count} ]");
        let waited =
            self.run_within(&format!("for i in $(seq 100); do {ready} && exit 0; sleep 1; done; exit 1"), LIMIT);
        if waited.status != 0 {
            panic!("{}", self.ok("cat /tmp/resources /tmp/kubelet.log /tmp/dp.log"));
        }
        let text = self.ok("cat /tmp/resources");
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
    }
}

/// The command line that runs a command in a pod of [`Guest::add_pod`].
pub fn in_pod(pod: &str, command: &str) -> String {
    format!("nsenter --net=/run/netns/{pod} {command}")
}

/// The command line that pings an address once from a pod.
pub fn ping_from(pod: &str, address: &str) -> String {
    in_pod(pod, &format!("ping -c 1 -W 1 {address}"))
}
