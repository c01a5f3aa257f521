//! Two containers of one guest, each with a VF, by the connection of the VFs: the switch of their PF, or of an emulated
//! X550, or taps in a bridge of the host.

use std::env;

use integration::{Backend, Backends, Guest, GuestSpec, Kernel, Pf, Subnet, vf_mac};

use crate::container::Container;
use crate::figures::{Bench, Settings};
use crate::{IDLE, on_host};

const PF: &str = "id=pf0,switch=veb,mac=52:54:00:00:00:01,sriov_vfs=2";
/// The same of an X550.
const X550: &str = "id=pf0,model=x550,mac=52:54:00:00:00:01,sriov_vfs=2";
/// The largest MTU of an X550 and an igb whose frames most networks carry.
const JUMBO: u16 = 9000;
/// The network of both.
const SUBNET: Subnet = Subnet(0);
/// File in which the server reports that it is ready.
const SERVER: &str = "/tmp/server";

/// Connection between the VFs.
#[derive(Clone, Copy)]
pub(crate) enum By {
    /// The switch of their PF, without an uplink.
    Switch,
    /// The switch of an emulated X550 without an uplink, with this MTU; with QEMU, that of an igb.
    X550(u16),
    /// The host's bridge, between taps of this kind.
    Bridge(Backend),
}

impl By {
    /// The connection with the name `name` in `cargo xtask bench`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "switch" => Some(Self::Switch),
            "x550" => Some(Self::X550(1500)),
            "x550-jumbo" => Some(Self::X550(JUMBO)),
            "bridge" => Some(Self::Bridge(Backend::Tap)),
            "bridge-vhost" => Some(Self::Bridge(Backend::VhostNet)),
            _ => None,
        }
    }

    fn spec(self) -> GuestSpec {
        match self {
            Self::Switch => (0..2).fold(GuestSpec::new(Kernel::V6_12).net(PF), |spec, index| {
                spec.net_vf(&format!("pf=pf0,index={index},mac={}", vf_mac(index)))
            }),
            // The program that stands for QEMU makes an igb of a PF with a switch.
            Self::X550(_) if env::var_os("CH_QEMU").is_some() => Self::Switch.spec().with_modules(),
            Self::X550(_) => GuestSpec::new(Kernel::V6_12).with_modules().net(X550),
            Self::Bridge(backend) => Backends::start(&[backend; 2]).spec(Kernel::V6_12),
        }
    }

    /// Sets up the host once the taps exist.
    fn connect(self) {
        if let Self::Bridge(_) = self {
            on_host(
                "for module in $CH_LAB/containers/*; do insmod $module || exit 1; done; \
                 /usr/sbin/ip link add bench0 type bridge && ip link set bench0 up && \
                 for tap in pf0v0 pf0v1; do echo 1 > /proc/sys/net/ipv6/conf/$tap/disable_ipv6; \
                 /usr/sbin/ip link set $tap master bench0 && ip link set $tap up || exit 1; done",
            );
        }
    }
}

/// Measures traffic from one container's VF to the other's.
pub(crate) fn measure(what: &str, by: By, settings: Settings<'_>) {
    let mut guest = Guest::boot(by.spec().kernel_argument("tsc=reliable"));
    let mtu = if let By::X550(mtu) = by { Some(mtu) } else { None };
    if mtu.is_some() && env::var_os("CH_QEMU").is_none() {
        guest.load_x550();
    }
    let pf = Pf::find(&mut guest);
    // An igb PF answers its VFs only while it is up.
    let port = netdev(&mut guest, &pf.file(""));
    if let Some(mtu) = mtu {
        guest.ok(&format!("ip link set {port} mtu {mtu}"));
    }
    guest.ok(&format!("ip link set {port} up"));
    pf.set_num_vfs(&mut guest, 2);
    by.connect();
    guest.wait_for(IDLE);
    let interfaces = [0, 1].map(|index| netdev(&mut guest, &pf.file(&format!("virtfn{index}"))));
    if let Some(mtu) = mtu {
        interfaces.iter().for_each(|vf| drop(guest.ok(&format!("ip link set {vf} mtu {mtu}"))));
    }
    let server = Container::new(&mut guest, "server", "");
    server.give(&mut guest, &interfaces[0], &format!("{}/24", SUBNET.host()));
    let client = Container::new(&mut guest, "client", SUBNET.host());
    client.give(&mut guest, &interfaces[1], &format!("{}/24", SUBNET.guest()));
    guest.ok(&format!("{} > {SERVER} 2>&1 &", server.inside("exec netbench server 0.0.0.0")));
    guest.wait_for(&format!("grep ready {SERVER}"));
    guest.wait_for(&client.inside(&format!("ping -c 1 -W 1 {}", SUBNET.host())));
    Bench { guest: &mut guest, settings }.measure(what, &client);
    guest.power_off();
}

/// The netdev of the function with this folder in sysfs, whatever its driver is.
fn netdev(guest: &mut Guest, folder: &str) -> String {
    let list = format!("for net in {folder}/net/* {folder}/virtio*/net/*; do [ -e $net ] && echo ${{net##*/}}; done");
    guest.run(&list).text.trim().to_owned()
}
