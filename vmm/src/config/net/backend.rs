//! The plan for the backend of each NIC, PF and VF.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use virtio_devices::{NetSpec, PortSettings, RateLimits, TapSpec, VdpaSpec};

use crate::config::net::switch;
use vm_api::config::mac::MacChoice;
use vm_api::config::net::NetConfig;
use vm_api::config::net::backend::BackendConfig;
use vm_api::config::net::vhost::{Vhost, VhostMode};

/// Backend of a network function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendPlan {
    /// A tap interface of the host. No other function of the VM uses it.
    Tap {
        /// The tap. Without a name it is any free one of the form `vmtap<N>`.
        spec: TapSpec,
        /// Use of vhost-net for its packets.
        vhost: Vhost,
    },
    /// Taps that were opened before the program started.
    Fds {
        /// Descriptors, one for each queue pair. Each number is above 2, and no other function of the VM uses it.
        fds: Vec<RawFd>,
        /// Use of vhost-net for their packets.
        vhost: Vhost,
    },
    /// Another process.
    VhostUser {
        /// The socket to it. No other function of the VM uses it.
        socket: PathBuf,
        /// Side that listens on the socket.
        mode: VhostMode,
    },
    /// A vDPA device of the host. No other function of the VM uses it.
    Vdpa(VdpaSpec),
    /// The PF's switch, of which the function is a port.
    Port(PortSettings),
}

/// Action if the backend of a function is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MissingBackend {
    /// The VM is not created.
    #[default]
    Refused,
    /// The function is created without a link.
    LinkDown,
    /// As [`Self::LinkDown`], without trying to open the backend, for this reason.
    LeftOut(String),
}

impl BackendPlan {
    /// The backend of the function that `config` describes and `spec` is made from. `tap` names a tap without a name.
    pub(crate) fn of(config: &NetConfig, spec: &NetSpec, tap: Option<String>) -> Self {
        if config.port().is_some() {
            return Self::Port(switch::settings_of(config));
        }
        let BackendConfig { tap: name, ip, mask, host_mac, fds, vhost_socket, vhost_mode: mode, vdpa, .. } =
            &config.backend;
        // Only this program limits and inspects packets.
        let limited = spec.limits != RateLimits::default() || !spec.policy.is_open();
        let vhost = config.backend.vhost();
        let vhost = if limited && vhost == Vhost::Auto { Vhost::Off } else { vhost };
        let queue_pairs = spec.queue_pairs;
        match (vdpa, vhost_socket) {
            (Some(path), _) => Self::Vdpa(VdpaSpec {
                path: path.clone(),
                mac: config.mac.and_then(MacChoice::given).map(|mac| mac.0),
                queue_pairs,
            }),
            (None, Some(socket)) => Self::VhostUser { socket: socket.clone(), mode: *mode },
            _ if !fds.is_empty() => Self::Fds { fds: fds.clone(), vhost },
            _ => {
                let name = name.clone().or(tap);
                let (ip, mask, host_mac) = (*ip, *mask, host_mac.map(|mac| mac.0));
                Self::Tap { spec: TapSpec { name, ip, mask, host_mac, mtu: spec.mtu, queue_pairs }, vhost }
            }
        }
    }

    /// The name of the tap to open, if it has one.
    pub(crate) fn tap_name(&self) -> Option<&str> {
        match self {
            Self::Tap { spec, .. } => spec.name.as_deref(),
            _ => None,
        }
    }

    /// The socket to another process, if that is the backend.
    pub(crate) fn socket(&self) -> Option<&Path> {
        match self {
            Self::VhostUser { socket, .. } => Some(socket),
            _ => None,
        }
    }

    /// True if the guest's memory must be shared, because another process or device maps it.
    pub const fn needs_shared_memory(&self) -> bool {
        matches!(self, Self::VhostUser { .. } | Self::Vdpa(_))
    }

    /// True if host devices may have pinned pages of the guest's memory, which must then stay.
    pub const fn pins_memory(&self) -> bool {
        matches!(self, Self::Vdpa(_))
    }

    /// True if the backend's own MAC address applies, because the user gave none.
    pub const fn has_own_mac(&self) -> bool {
        matches!(self, Self::Vdpa(VdpaSpec { mac: None, .. }))
    }
}
