//! An emulated X550 in a guest, which Linux drives with ixgbe and ixgbevf and configures with Debian's tools.

use std::net::Ipv4Addr;
use std::process::Command;

use serde_json::Value;

use crate::guest::sriov::{Pf, Vf};
use crate::guest::tenant::Tenant;
use crate::guest::{Guest, GuestSpec};
use crate::host::tap::HostTap;
use crate::lab::Kernel;
use crate::vmm::api::Api;

/// Programs of a guest [`GuestSpec::with_nic_tools`], which busybox would hide.
pub const IP: &str = "/usr/bin/ip";
/// Configures queueing disciplines and filters.
pub const TC: &str = "/usr/bin/tc";
/// Configures the embedded switch of a NIC.
pub const BRIDGE: &str = "/usr/bin/bridge";
/// Reads and configures a NIC.
pub const ETHTOOL: &str = "/usr/bin/ethtool";

/// The PF's netdev: the guest has no other NIC, and does not rename interfaces.
const INTERFACE: &str = "eth0";
/// The drivers, in load order.
const DRIVERS: [&str; 2] = ["ixgbe", "ixgbevf"];
/// Beginnings of the kernel's warnings about what the test asked for, which the drivers print on hardware as well.
const EXPECTED: [&str; 12] = [
    // A PF reset by its administrator, and its VFs' drivers.
    "ixgbevf.*: NIC Link is Down",
    "ixgbe.*: Reload the VF driver to make this change effective",
    "ixgbe.*: Setting .* on VF",
    "ixgbe.*: The VF MAC address has been set",
    "ixgbe.*: Bring the PF device up before attempting to use the VF device",
    "ixgbe.*: The VF VLAN has been set",
    "ixgbe.*: Enabling SR-IOV VFs using the module parameter",
    // What a VF's driver asked for and did not get.
    "ixgbe.*: VF .* attempted to (override|set|enter)",
    "ixgbe.*: VF .* requested MACVLAN filter but is administratively denied",
    "ixgbe.*: .* Spoofed packets? detected",
    "ixgbe.*: NDO set VF [0-9]* link state",
    // A VF that is set up after its trust or link has changed: the PF's driver refuses all that the VF's driver asks
    // for until that has started again, which it does once it has noticed.
    "ixgbevf.*: Failed to set MTU at [0-9]*$",
];

/// A guest with an X550 `pf0`, whose uplink is the tap `up0`.
pub struct X550 {
    /// The guest, with the drivers loaded.
    pub guest: Guest,
    /// The PF.
    pub pf: Pf,
    /// The API of its VMM.
    pub api: Api,
    /// The uplink's tap, with the address [`X550::UPLINK`].
    pub uplink: HostTap,
}

impl X550 {
    /// The address of the host.
    pub const UPLINK: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 200);
    /// The address of the PF.
    pub const PF: &str = "10.88.0.100";
    /// The MAC address of the PF.
    pub const MAC: &str = "52:54:00:00:00:01";

    /// The value of `--net` for an X550 with `vfs` VFs over `tap`.
    pub fn option(tap: &str, vfs: usize) -> String {
        X550::option_of("x550", tap, vfs)
    }

    fn option_of(model: &str, tap: &str, vfs: usize) -> String {
        format!("id=pf0,model={model},tap={tap},mac={},sriov_vfs={vfs}", X550::MAC)
    }

    /// A guest with the tools for an X550, without the NIC.
    pub fn spec(kernel: Kernel) -> GuestSpec {
        GuestSpec::new(kernel).with_nic_tools().memory("size=512M")
    }

    /// Boots a guest whose X550 has up to `vfs` VFs, and brings the PF up. Its link is up.
    pub fn boot(kernel: Kernel, vfs: usize) -> X550 {
        X550::boot_with(kernel, vfs, |spec| spec)
    }

    /// As [`X550::boot`], with the changes of `more`.
    pub fn boot_with(kernel: Kernel, vfs: usize, more: impl FnOnce(GuestSpec) -> GuestSpec) -> X550 {
        X550::prepare(more(X550::spec(kernel).net(&X550::option("up0", vfs))), |_| ())
    }

    /// As [`X550::boot`], for an X540, the model before.
    pub fn boot_x540(kernel: Kernel, vfs: usize) -> X550 {
        X550::prepare(X550::spec(kernel).net(&X550::option_of("x540", "up0", vfs)), |_| ())
    }

    /// As [`X550::boot`], in a guest with DPDK and a virtual IOMMU. The PF is behind it as well, if `pf_too`.
    pub fn boot_with_dpdk(kernel: Kernel, vfs: usize, pf_too: bool) -> X550 {
        let pf = if pf_too { ",iommu=on" } else { "" };
        let spec = X550::spec(kernel).with_dpdk().net(&format!("{}{pf}", X550::option("up0", vfs)));
        // Drivers of functions behind an IOMMU wait for its own.
        X550::prepare(spec.arguments(&["--platform", "iommu=on"]), Guest::load_vfio)
    }

    /// Boots the guest of `spec`, calls `first`, and brings the PF up.
    fn prepare(spec: GuestSpec, first: impl FnOnce(&mut Guest)) -> X550 {
        let api = Api::new("x550");
        let guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
        let uplink = HostTap::existing("up0");
        uplink.join_at(X550::UPLINK);
        let mut nic = X550 { guest, pf: Pf::at("0000:00:01.0"), api, uplink };
        first(&mut nic.guest);
        nic.guest.load_x550();
        nic.guest.join_x550();
        nic
    }

    /// The PF's netdev.
    pub fn interface(&self) -> &'static str {
        INTERFACE
    }

    /// Takes the uplink's tap down, or brings it up.
    pub fn set_uplink(&self, up: bool) {
        X550::host_ip(&format!("link set {} {}", self.uplink.name(), if up { "up" } else { "down" }));
    }

    /// Runs `ip` on the host, with arguments without blanks.
    pub fn host_ip(arguments: &str) {
        let done = Command::new("/usr/sbin/ip").args(arguments.split(' ')).status();
        assert!(done.is_ok_and(|status| status.success()), "ip {arguments}");
    }

    /// Enables `count` VFs with their drivers.
    pub fn enable(&mut self, count: usize) -> Vec<Vf> {
        self.pf.set_num_vfs(&mut self.guest, count);
        let vfs = self.pf.vfs(&mut self.guest);
        assert!(vfs.len() == count && vfs.iter().all(|vf| vf.interface.is_some()), "{vfs:?}");
        vfs
    }

    /// Enables `count` VFs, and gives each to a tenant, whose link then comes up.
    pub fn tenants(&mut self, count: usize) -> Vec<Tenant> {
        let vfs = self.enable(count);
        let tenants: Vec<_> = vfs.iter().map(|vf| Tenant::with(&mut self.guest, vf)).collect();
        tenants.iter().for_each(|tenant| tenant.await_carrier(&mut self.guest, true));
        tenants
    }

    /// Configures VFs as the guest's administrator: `ip link set PF <change>`.
    pub fn set(&mut self, change: &str) {
        self.guest.ok(&format!("{IP} link set {INTERFACE} {change}"));
    }

    /// Runs a command after which the driver of VF `index` starts again, and waits until it has.
    pub fn restart_of(&mut self, index: usize, command: &str) {
        let starts = format!("dmesg | grep -c 'VF Reset msg received from vf {index}$'");
        let before = self.guest.run(&starts).text;
        self.guest.ok(command);
        self.guest.wait_for(&format!("[ $({starts}) -gt {} ]", before.trim_end()));
    }

    /// The entry of VF `index` in what `ip -s link show PF` says.
    pub fn vf(&mut self, index: usize) -> Value {
        let text = self.guest.ok(&format!("{IP} -j -s link show {INTERFACE}"));
        let shown: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let vfs = shown[0]["vfinfo_list"].as_array().unwrap_or_else(|| panic!("no VFs: {text}"));
        vfs.iter().find(|vf| vf["vf"] == index).unwrap_or_else(|| panic!("no VF {index}: {text}")).clone()
    }

    /// A counter of `ethtool -S` for the PF.
    pub fn statistic(&mut self, name: &str) -> u64 {
        let text = self.guest.ok(&format!("{ETHTOOL} -S {INTERFACE}"));
        let found = text.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(": "));
        found.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name}: {text}"))
    }

    /// True if the PF reaches `address`.
    pub fn reaches(&mut self, address: &str) -> bool {
        self.guest.run(&format!("ping -c 3 -i 0.3 -W 2 -I {INTERFACE} {address}")).status == 0
    }

    /// Reachability between the PF, tenants and the host: a row for each, of `+` and `-`, and `.` for itself. The host
    /// comes last.
    pub fn reachability(&mut self, tenants: &[Tenant]) -> Vec<String> {
        // Addresses that were learned before do not count, and may have changed.
        X550::host_ip(&format!("neigh flush dev {}", self.uplink.name()));
        let flush = format!("{IP} neigh flush all");
        self.guest.run(&flush);
        for tenant in tenants {
            self.guest.run(&tenant.command(&flush));
        }
        let hosts = std::iter::once(X550::PF.to_owned()).chain(tenants.iter().map(Tenant::address));
        let all: Vec<String> = hosts.chain([X550::UPLINK.to_string()]).collect();
        let mut row = |from: usize| -> String {
            let mut cell = |to: usize| match from {
                _ if from == to => '.',
                0 if self.reaches(&all[to]) => '+',
                _ if from > tenants.len() && self.uplink.reaches(&all[to]) => '+',
                1.. if tenants.get(from - 1).is_some_and(|tenant| tenant.reaches(&mut self.guest, &all[to])) => '+',
                _ => '-',
            };
            (0..all.len()).map(&mut cell).collect()
        };
        // The host first: it caches the addresses of others once they have sent ARP requests.
        let last = row(all.len() - 1);
        (0..all.len() - 1).map(&mut row).chain([last]).collect()
    }

    /// The [`X550::reachability`] of `tenants` tenants if all reach each other.
    pub fn everyone(tenants: usize) -> Vec<String> {
        let ports = tenants + 2;
        (0..ports).map(|own| "+".repeat(own) + "." + &"+".repeat(ports - own - 1)).collect()
    }
}

impl Tenant {
    /// Waits until the VF's link is up, or down. ixgbevf starts again at most every 10 s.
    pub fn await_carrier(&self, guest: &mut Guest, up: bool) {
        // The files of sysfs are those of the guest's first namespace.
        let carrier = self.command(&format!("{IP} link show vf | grep -c LOWER_UP"));
        guest.wait_for(&format!("[ \"$({carrier})\" = {} ]", u8::from(up)));
    }

    /// A counter of the VF's netdev: `rx` or `tx`, and its name in JSON of `ip`.
    pub fn count(&self, guest: &mut Guest, direction: &str, name: &str) -> u64 {
        let text = guest.ok(&self.command(&format!("{IP} -j -s link show vf")));
        let shown: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        shown[0]["stats64"][direction][name].as_u64().unwrap_or_else(|| panic!("no {direction} {name}: {text}"))
    }

    /// The MAC address of the VF.
    pub fn mac(&self, guest: &mut Guest) -> String {
        let shown = guest.ok(&self.command(&format!("{IP} -br link show vf")));
        shown.split_whitespace().nth(2).unwrap_or_else(|| panic!("no address: {shown}")).to_owned()
    }
}

impl Guest {
    /// Loads the drivers of an X550 and its VFs.
    pub fn load_x550(&mut self) {
        DRIVERS.iter().for_each(|driver| self.load(driver));
        self.wait_for(&format!("[ -e /sys/class/net/{INTERFACE} ]"));
    }

    /// Brings the PF up with its address, and waits for the link.
    pub fn join_x550(&mut self) {
        self.ok(&format!("ip addr add {}/24 dev {INTERFACE}; ip link set {INTERFACE} up", X550::PF));
        self.await_carrier(INTERFACE, true);
    }

    /// Asserts that the kernel has no complaint about the machine, and that the drivers have printed no warning and no
    /// error but those that they print on hardware.
    pub fn assert_x550_has_no_complaint(&mut self) {
        self.assert_kernel_has_no_complaint();
        let expected = EXPECTED.join("|");
        let found = self.run(&format!("dmesg -r | grep -E '^<[0-4]>.*ixgbe' | grep -vE '{expected}'"));
        assert_eq!(found.text, "", "the drivers have complaints");
    }
}
