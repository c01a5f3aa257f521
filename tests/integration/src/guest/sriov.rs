//! A PF and its VFs in the guest's sysfs.

use std::time::Duration;

use crate::guest::console::Output;
use crate::guest::{Guest, GuestSpec};
use crate::host::tap::{Counters, HostTap, NEIGHBOUR_DELAY, Subnet};
use crate::lab::Kernel;

/// Time that the guest may take to add or remove VFs with their drivers. 64 VFs take some 20 s under emulation.
const NUMVFS_LIMIT: Duration = Duration::from_secs(120);

/// A PF.
#[derive(Clone, Debug)]
pub struct Pf {
    /// PCI address, such as `0000:00:01.0`.
    pub address: String,
}

/// A VF that the guest sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vf {
    /// Index, from 0.
    pub index: usize,
    /// PCI address, such as `0000:01:00.0`.
    pub address: String,
    /// Netdev, if it has one.
    pub interface: Option<String>,
    /// The MAC address of its netdev, or an empty string.
    pub mac: String,
}

/// The expected address of VF `index` of the first PF that reserves VF buses.
pub fn predicted_vf_address(index: usize) -> String {
    let (bus, devfn) = (1 + index / 256, index % 256);
    format!("0000:{bus:02x}:{:02x}.{}", devfn / 8, devfn % 8)
}

/// A guest whose PF `pf0` reserves `vfs` VFs. VF i has the MAC address `vf_mac(i)`.
pub fn spec_with_vfs(kernel: Kernel, vfs: usize) -> GuestSpec {
    let spec = GuestSpec::new(kernel).net(&format!("id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs={vfs}"));
    (0..vfs).fold(spec, |spec, index| spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index))))
}

/// Boots the guest of [`spec_with_vfs`], which has one PF.
pub fn boot_with_vfs(kernel: Kernel, vfs: usize) -> (Guest, Pf) {
    let mut guest = Guest::boot(spec_with_vfs(kernel, vfs));
    let pf = Pf::find(&mut guest);
    (guest, pf)
}

/// The MAC address of VF `index` in the guest of [`spec_with_vfs`].
pub fn vf_mac(index: usize) -> String {
    format!("52:54:00:00:01:{index:02x}")
}

/// The taps of the VFs in the guest of [`spec_with_vfs`], by index.
pub fn vf_taps(vfs: usize) -> Vec<HostTap> {
    (0..vfs).map(|index| HostTap::existing(&format!("pf0v{index}"))).collect()
}

impl Pf {
    /// The PF at `address`, for guests with several PFs.
    pub fn at(address: &str) -> Pf {
        Pf { address: address.into() }
    }

    /// Finds the guest's only PF.
    pub fn find(guest: &mut Guest) -> Pf {
        let found = guest.ok("cd /sys/bus/pci/devices && ls -d */sriov_totalvfs");
        assert_eq!(found.lines().count(), 1, "the guest has one PF: {found}");
        Pf { address: found.trim_end_matches("/sriov_totalvfs").to_owned() }
    }

    /// The path of the file `name` of this PF in sysfs.
    pub fn file(&self, name: &str) -> String {
        format!("/sys/bus/pci/devices/{}/{name}", self.address)
    }

    /// The contents of the file `name` of this PF in sysfs.
    pub fn read(&self, guest: &mut Guest, name: &str) -> String {
        guest.ok(&format!("cat {}", self.file(name)))
    }

    /// Device and function numbers in one byte.
    pub fn devfn(&self) -> usize {
        let (slot, function) = self.address["0000:00:".len()..].split_once('.').unwrap();
        usize::from_str_radix(slot, 16).unwrap() * 8 + function.parse::<usize>().unwrap()
    }

    /// Writes `sriov_numvfs`.
    pub fn write_num_vfs(&self, guest: &mut Guest, count: usize) -> Output {
        guest.run_within(&format!("echo {count} > {}", self.file("sriov_numvfs")), NUMVFS_LIMIT)
    }

    /// Enables `count` VFs, or disables all with 0. This must succeed.
    pub fn set_num_vfs(&self, guest: &mut Guest, count: usize) {
        let Output { status, text } = self.write_num_vfs(guest, count);
        assert_eq!(status, 0, "writing {count} to sriov_numvfs: {text}\n{}", guest.run("dmesg | tail -n 20").text);
    }

    /// Enables `count` VFs without binding drivers. Drivers can be bound by hand afterwards.
    pub fn set_num_vfs_without_drivers(&self, guest: &mut Guest, count: usize) {
        let autoprobe = self.file("sriov_drivers_autoprobe");
        guest.ok(&format!("echo 0 > {autoprobe}"));
        self.set_num_vfs(guest, count);
        // While autoprobe is 0, Linux refuses to bind a driver even by hand.
        guest.ok(&format!("echo 1 > {autoprobe}"));
    }

    /// The VFs that the guest sees, by index.
    pub fn vfs(&self, guest: &mut Guest) -> Vec<Vf> {
        // One shell process for all VFs: 300 are listed in seconds even under emulation.
        let script = format!(
            "cd {} && for link in virtfn*; do [ -e $link ] || continue; target=$(readlink $link); \
             net=; mac=; for path in $link/virtio*/net/* $link/net/*; do \
             [ -e $path ] && net=${{path##*/}} && read -r mac < $path/address; done; \
             echo ${{link#virtfn}} ${{target##*/}} $net $mac; done",
            self.file("")
        );
        let listing = guest.ok_within(&script, NUMVFS_LIMIT);
        let mut vfs: Vec<Vf> = listing.lines().map(Vf::parse).collect();
        vfs.sort_by_key(|vf| vf.index);
        vfs
    }
}

impl Vf {
    fn parse(line: &str) -> Vf {
        let mut words = line.split_whitespace();
        let index =
            words.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no index of a VF in {line:?}"));
        Vf {
            index,
            address: words.next().unwrap_or_else(|| panic!("no address in {line:?}")).to_owned(),
            interface: words.next().map(str::to_owned),
            mac: words.next().unwrap_or_default().to_owned(),
        }
    }

    /// Name of its netdev. Panics if it has none.
    pub fn interface(&self) -> &str {
        self.interface.as_deref().unwrap_or_else(|| panic!("VF {} at {} has no netdev", self.index, self.address))
    }

    /// Pings the host through this VF, and asserts that the frames passed through `taps[own]` and no other of `taps`.
    pub fn ping_through(&self, guest: &mut Guest, taps: &[HostTap], own: usize, subnet: Subnet) {
        taps[own].join(subnet);
        ping_through_only(guest, self.interface(), taps, own, subnet);
    }
}

impl Guest {
    /// Binds `virtio-pci` to the function at `address`.
    pub fn bind(&mut self, address: &str) {
        self.bind_to("virtio-pci", address);
    }

    /// Binds the driver `driver` to the function at `address`.
    pub fn bind_to(&mut self, driver: &str, address: &str) {
        self.ok_within(&format!("echo {address} > /sys/bus/pci/drivers/{driver}/bind"), NUMVFS_LIMIT);
    }

    /// Unbinds the function at `address` from its driver.
    pub fn unbind(&mut self, address: &str) {
        self.ok_within(&format!("echo {address} > /sys/bus/pci/devices/{address}/driver/unbind"), NUMVFS_LIMIT);
    }

    /// Gives `interface` its address in `subnet` and brings it up.
    pub fn join(&mut self, interface: &str, subnet: Subnet) {
        self.ok(&format!("ip addr flush dev {interface} && ip addr add {}/24 dev {interface}", subnet.guest()));
        self.ok(&format!("echo {NEIGHBOUR_DELAY} > /proc/sys/net/ipv4/neigh/{interface}/delay_first_probe_time"));
        self.ok(&format!("ip link set {interface} up"));
    }

    /// Pings the host's address in `subnet` through `interface`, which must succeed, and returns the output of
    /// `ping`.
    pub fn ping(&mut self, interface: &str, subnet: Subnet) -> String {
        self.ok(&format!("ping -c 2 -i 0.2 -W 5 -I {interface} {}", subnet.host()))
    }
}

fn ping_through_only(guest: &mut Guest, interface: &str, taps: &[HostTap], own: usize, subnet: Subnet) {
    /// The host may still probe an address from before the guest's restart.
    const ATTEMPTS: usize = 3;
    guest.join(interface, subnet);
    let mut others = Vec::new();
    for _ in 0..ATTEMPTS {
        let before: Vec<Counters> = taps.iter().map(HostTap::counters).collect();
        guest.ping(interface, subnet);
        others.clear();
        for (position, (tap, before)) in taps.iter().zip(before).enumerate() {
            let after = tap.counters();
            if position == own {
                // Two echo messages, each way.
                assert!(after.from_guest >= before.from_guest + 2, "{interface} sends through {}", tap.name());
                assert!(after.to_guest >= before.to_guest + 2, "{interface} receives through {}", tap.name());
            } else if after != before {
                others.push((tap.name().to_string(), before, after));
            }
        }
        if others.is_empty() {
            return;
        }
    }
    panic!("frames of {interface} passed other taps: {others:?}");
}
