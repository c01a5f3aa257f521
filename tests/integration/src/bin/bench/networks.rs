//! Container networks without VFs: veth pairs whose frames the guest's kernel forwards to the PF, through a bridge,
//! by routing and NAT, or through an overlay.

use integration::{HostTap, Pf, Subnet};

use crate::container::Container;
use crate::figures::Bench;
use crate::on_host;

/// The network of the PF.
const PF_SUBNET: Subnet = Subnet(255);
/// The gateways of the container behind NAT and of the container on the overlay.
const GATEWAYS: [&str; 2] = ["10.78.0.1/24", "10.79.1.1/24"];
/// The command that creates an end of the overlay, without its addresses.
const OVERLAY: &str = "/usr/sbin/ip link add vxlan0 mtu 1450 type vxlan id 42 dstport 4789";

/// Measures each network in turn.
pub(crate) fn measure(bench: &mut Bench<'_>, pf: &Pf) {
    let port = bench.guest.ok(&format!("ls {}", pf.file("virtio*/net")));
    HostTap::existing("pf0").join(PF_SUBNET);
    bench.guest.ok("for module in /containers/*; do insmod $module || exit 1; done");
    bench.guest.join(&port, PF_SUBNET);
    bench.guest.ok("echo 1 > /proc/sys/net/ipv4/ip_forward");

    let container = attach(bench, "nat", PF_SUBNET.host(), "10.78.0.2/24");
    route(bench, &container, "nat", GATEWAYS[0]);
    // The usual setup of container networks.
    bench.guest.ok(&format!(
        "/usr/sbin/nft 'add table ip nat; add chain ip nat post {{ type nat hook postrouting priority 100; }}; \
         add rule ip nat post ip saddr 10.78.0.0/24 oifname {port} masquerade'"
    ));
    bench.measure("veth, routes and NAT", &container);
    bench.guest.ok("/usr/sbin/nft 'delete table ip nat'");

    let (host, guest) = (PF_SUBNET.host(), PF_SUBNET.guest());
    on_host(&format!(
        "for module in $CH_LAB/containers/*; do insmod $module || exit 1; done; \
         {OVERLAY} local {host} remote {guest} && ip addr add 10.79.0.1/24 dev vxlan0 && \
         ip link set vxlan0 up && ip route add 10.79.1.0/24 via 10.79.0.2"
    ));
    bench.guest.ok(&format!(
        "{OVERLAY} local {guest} remote {host} && ip addr add 10.79.0.2/24 dev vxlan0 && ip link set vxlan0 up"
    ));
    let container = attach(bench, "overlay", "10.79.0.1", "10.79.1.2/24");
    route(bench, &container, "overlay", GATEWAYS[1]);
    bench.guest.ok(&container.inside("ip link set eth0 mtu 1450"));
    bench.measure("veth, routes and VXLAN", &container);

    let container = attach(bench, "bridge", PF_SUBNET.host(), "10.77.255.3/24");
    bench.guest.ok(&format!(
        "ip addr flush dev {port} && brctl addbr br0 && brctl addif br0 {port} && brctl addif br0 bridge && \
         ip link set bridge up && ip link set br0 up"
    ));
    bench.measure("veth and a bridge", &container);
}

/// Creates a container with one end of a veth pair. The other end is called `name`.
fn attach(bench: &mut Bench<'_>, name: &'static str, host: impl ToString, address: &str) -> Container {
    let container = Container::new(bench.guest, name, host);
    bench.guest.ok(&format!("/usr/sbin/ip link add {name} type veth peer name inner"));
    container.give(bench.guest, "inner", address);
    container
}

/// Routes between the container and all that the guest reaches.
fn route(bench: &mut Bench<'_>, container: &Container, name: &str, gateway: &str) {
    bench.guest.ok(&format!("ip addr add {gateway} dev {name} && ip link set {name} up"));
    let (gateway, _) = gateway.split_once('/').unwrap();
    bench.guest.ok(&container.inside(&format!("ip route add default via {gateway}")));
}
