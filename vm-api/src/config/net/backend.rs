//! The backend of a network function: taps, vhost-user, vDPA.

use std::net::IpAddr;
use std::path::PathBuf;

use option_derive::{Options, Schema};

use crate::config::mac::MacAddress;
use crate::config::net::vhost::{Vhost, VhostMode};

/// Backend of a NIC, PF or VF: keys of `--net` and `--net-vf`.
#[derive(Debug, Clone, PartialEq, Eq, Options, Schema)]
#[options(part)]
pub struct BackendConfig {
    /// Tap interface on the host, at most 15 characters. If it does not exist, it is created, and removed when the
    /// VM ends.
    #[option("tap=<interface>", bare)]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = INTERFACE)]
    pub tap: Option<String>,
    /// IP address of the tap on the host; needs mask. Kept without effect if the tap is not opened here: with fd,
    /// vhost_user and vdpa.
    #[option("ip=<address>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip: Option<IpAddr>,
    /// Network mask of ip.
    #[option("mask=<mask>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<IpAddr>,
    /// MAC address of the tap on the host. Kept without effect with vhost_user.
    #[option("host_mac=<address>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_mac: Option<MacAddress>,
    /// File descriptors of open taps, one per queue pair and each above 2, instead of tap.
    #[option("fd=[<fd>,...]")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(
        about = "Descriptor numbers. The values are ignored: the descriptors of a NIC or PF are those passed with \
                      vm.add-net. Those of VFs cannot be passed over the API."
    )]
    pub fds: Vec<i32>,
    /// Let the host's kernel carry the tap's packets (vhost-net). auto: if the kernel supports it and no rate limit is
    /// given. By default off.
    #[option("vhost=on|off|auto")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vhost: Option<Vhost>,
    /// Let another process carry the packets (vhost-user), instead of a tap; needs socket.
    #[option("vhost_user=on|off")]
    #[schema(about = "Let another process carry the packets (vhost-user), instead of a tap; needs vhost_socket.")]
    pub vhost_user: bool,
    /// Unix socket of the vhost-user backend.
    #[option("socket=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(limits = SOCKET)]
    pub vhost_socket: Option<PathBuf>,
    /// This program's role on the socket. client: the backend listens; server: this program listens.
    #[option("vhost_mode=client|server", default = VhostMode::Client)]
    pub vhost_mode: VhostMode,
    /// vDPA device of the host, such as /dev/vhost-vdpa-0, instead of a tap. Without mac, the NIC has the device's
    /// MAC address.
    #[option("vdpa=<path>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdpa: Option<PathBuf>,
}

impl BackendConfig {
    /// Use of vhost-net for the tap's packets.
    pub fn vhost(&self) -> Vhost {
        self.vhost.unwrap_or_default()
    }

    /// True if a tap or another backend is given: with a switch, that is the uplink.
    pub fn is_given(&self) -> bool {
        let Self { tap, fds, vhost_user, vhost_socket, vdpa, .. } = self;
        tap.is_some() || !fds.is_empty() || *vhost_user || vhost_socket.is_some() || vdpa.is_some()
    }
}
