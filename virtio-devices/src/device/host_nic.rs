//! The properties of a network function that the host inspects and changes while a guest uses it.

use std::any::Any;
use std::fmt;

use thiserror::Error;

use crate::transport::features::has;
use crate::{BackendKind, BackendObserver, ErrorKind, Policy, RateLimits, Replaced, Status};

/// The host's interface to a network function.
pub trait HostNic {
    /// The kind of the backend.
    fn backend_kind(&self) -> BackendKind;

    /// The reason why the function has no backend, in one line, if it has none. Its link is down then.
    fn backend_missing(&self) -> Option<&str> {
        None
    }

    /// True if the function accepts a backend ([`crate::Lifecycle::connect`]): it has none, or a tap that was deleted.
    fn takes_backend(&self) -> bool {
        self.backend_missing().is_some()
    }

    /// Records that another backend has replaced a lost one, and notifies the observer.
    fn backend_replaced(&mut self) {}

    /// True if the backend was lost, and is not back yet.
    fn backend_lost(&self) -> bool;

    /// The number of losses of the backend since the function was plugged in.
    fn backend_losses(&self) -> u64;

    /// Notifies `observer` when the backend is lost, and when it is back.
    fn observe_backend(&self, observer: BackendObserver);

    /// The name of the backend: the interface of a tap, the path of a socket or device.
    fn backend_name(&self) -> &str;

    /// The current Ethernet address: the driver may have changed it.
    fn mac(&self) -> [u8; 6];

    /// Sets another address, which the next driver finds. Behind a switch, it applies to all frames after a wait.
    ///
    /// # Errors
    ///
    /// [`MacError`]; the address is unchanged then.
    fn set_mac(&mut self, mac: [u8; 6]) -> Result<Replaced, MacError>;

    /// As [`Self::set_mac`], also while a driver uses the address that it has read: its guest has asked for the change,
    /// and makes the driver use the new one.
    ///
    /// # Errors
    ///
    /// [`MacError`]; the address is unchanged then.
    fn set_mac_for_guest(&mut self, mac: [u8; 6]) -> Result<Replaced, MacError> {
        self.set_mac(mac)
    }

    /// Puts off what several changes have in common until [`Self::end_changes`]: a switch builds one table for all of
    /// them.
    fn begin_changes(&mut self) {}

    /// Ends that. The changes since [`Self::begin_changes`] apply to all frames after a wait.
    fn end_changes(&mut self) -> Replaced {
        Replaced::default()
    }

    /// Keeps the host's settings of a VF that now has others of its guest. The next conventional reset returns to them
    /// before a driver can see the VF again. `None` keeps the current ones.
    fn return_to(&mut self, _host: Option<HostSettings>) {}

    /// Replaces the policy. Buckets whose limits stay are not refilled.
    fn set_policy(&mut self, policy: Policy, limits: RateLimits) -> Replaced;

    /// The policy that the guest has set, if it governs the function. [`Self::set_policy`] has no effect then.
    fn guest_policy(&self) -> Option<Policy> {
        None
    }

    /// True if the link is up.
    fn link_up(&self) -> bool;

    /// Sets the link up or down, and notifies the driver (`virtio 1.4 §5.1.4`). While it is down, frames are dropped in
    /// both directions; behind a switch, all of them after a wait.
    fn set_link(&mut self, up: bool) -> Replaced;

    /// True if the host has set the function's own tap down (`ip link set NAME down`). False for other backends, for a
    /// tap that was deleted, and for a macvtap, which does not report it.
    fn tap_down(&self) -> bool {
        false
    }

    /// Makes the link follow the function's own tap, which is the default, or stay up while the host has set it down.
    fn follow_tap(&mut self, _follows: bool) {}

    /// Keeps the link down, or no longer, independently of the host's setting, and notifies the driver. Does nothing
    /// for a function without a backend, whose link stays down.
    fn hold_link(&mut self, held: bool);

    /// Asks the driver to announce its addresses to the network, so that they are found at the new place
    /// (`virtio 1.4 §5.1.6.5.4`). Returns true if it will: not a driver that did not negotiate
    /// `VIRTIO_NET_F_GUEST_ANNOUNCE`, or with the link down.
    fn announce(&mut self) -> bool;

    /// Announces the addresses with RARP frames of this host if the driver does not: over a tap, vhost-net, and a
    /// vhost-user peer that supports it. Returns true if it is necessary.
    fn announce_here(&mut self) -> bool;
}

/// The reason why a network function cannot have an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// The address is a group address, or zero.
    #[error("not an address that a NIC can have; give one whose first byte is even")]
    NotUnicast,
    /// A driver has read the current address, and nothing makes a driver read it again.
    #[error("its driver has already read its address; unbind the driver or disable the VFs first")]
    InUse,
}

impl MacError {
    /// The party that has to act on the error.
    pub const fn kind(self) -> ErrorKind {
        match self {
            Self::NotUnicast => ErrorKind::Invalid,
            Self::InUse => ErrorKind::Busy,
        }
    }
}

/// Settings of a network function that the host has made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Ethernet address; `None` for that of its backend, which stays.
    pub mac: Option<[u8; 6]>,
    /// Policy of its packets.
    pub policy: Policy,
    /// Limits of its packets.
    pub limits: RateLimits,
    /// True if the link is up.
    pub link_up: bool,
    /// True if the link follows the function's own tap, or its switch's uplink.
    pub follows_tap: bool,
}

/// The status of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionStatus {
    /// True if the function is visible: always, except for a VF that is not enabled or was removed.
    pub exists: bool,
    /// True for an enabled VF that the host removed by surprise: it is not visible.
    pub removed: bool,
    /// The device status, as the driver reads it (`virtio 1.4 §2.1`).
    pub driver: Status,
    /// The register that keeps the queues of a ready driver stopped, if one does.
    pub stopped_by: Option<StoppedBy>,
    /// The cause of its last reset while a driver used it.
    pub reset_by: ResetBy,
    /// The number of its conventional resets. A VF has one whenever it ceases to exist.
    pub conventional_resets: u64,
}

/// A register by which the guest keeps the queues of a ready driver stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoppedBy {
    /// Bus Master Enable is clear.
    BusMaster,
    /// The function is in D3hot.
    D3hot,
    /// The PF of the VF is in D3hot.
    PfD3hot,
}

impl fmt::Display for StoppedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BusMaster => "Bus Master Enable is clear",
            Self::D3hot => "the function is in D3hot",
            Self::PfD3hot => "the PF is in D3hot",
        })
    }
}

/// The cause of a function's reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResetBy {
    /// The driver: 0 as the device status.
    Driver,
    /// A function level reset.
    Flr,
    /// The surprise removal of a VF.
    Removal,
    /// A conventional reset: of the whole device, or of a VF that was disabled.
    #[default]
    Conventional,
}

/// The registers of a PF's SR-IOV capability that define the existing VFs (`PCIe 6.2 §9.3.3`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SriovStatus {
    /// NumVFs.
    pub num_vfs: u16,
    /// VF Enable.
    pub vf_enable: bool,
    /// The cause of the last disabling of VFs.
    pub disabled_by: ResetBy,
}

impl SriovStatus {
    /// The number of VFs that exist now.
    pub fn num_visible(self) -> u16 {
        // NumVFs is at most TotalVFs while VF Enable is set.
        if self.vf_enable { self.num_vfs } else { 0 }
    }
}

/// A backend for a NIC whose own is missing or lost, opened and checked before the NIC is touched.
pub struct NewBackend {
    kind: BackendKind,
    name: String,
    /// The part that only a NIC interprets.
    inside: Box<dyn Any + Send>,
}

impl NewBackend {
    /// A backend of this kind and name.
    pub(crate) fn of(kind: BackendKind, name: String, inside: impl Any + Send) -> Self {
        Self { kind, name, inside: Box::new(inside) }
    }

    /// The kind of the backend.
    pub fn kind(&self) -> BackendKind {
        self.kind
    }

    /// The name that users know.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The part that only a NIC interprets, if it has this type.
    pub(crate) fn inside_mut<T: Any>(&mut self) -> Option<&mut T> {
        self.inside.downcast_mut()
    }
}

/// The reason why a NIC cannot get a backend: one line, to follow the NIC's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConnectError {
    /// The device is not a network function.
    #[error("not a network function")]
    NoNic,
    /// The NIC's queues run.
    #[error("its queues run; please report this")]
    Running,
    /// The NIC has a backend.
    #[error("it has a backend ({0}); only one that is missing, or a tap that was deleted, can be replaced")]
    Present(String),
    /// The driver was promised more features.
    #[error("{name} lacks virtio features that its driver uses: {}; give a backend that has them", bits(*.missing))]
    Features {
        /// The backend.
        name: String,
        /// The features that the backend lacks.
        missing: u64,
    },
    /// The driver has read another MTU.
    #[error("{name} has an MTU of {has}, but its driver has read {told}; raise it to {told}")]
    Mtu {
        /// The backend.
        name: String,
        /// The backend's.
        has: u16,
        /// The driver's.
        told: u16,
    },
    /// The backend has an address of its own, which differs.
    #[error("{0} has another MAC address than the function; give that to the device")]
    Mac(String),
    /// The backend runs the control queue, and lacks the state that the driver has set through it.
    #[error("{0} handles the control queue itself and cannot report its state; unbind the driver first")]
    ControlQueue(String),
}

impl ConnectError {
    /// The party that has to act on the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NoNic => ErrorKind::Invalid,
            Self::Running => ErrorKind::Host,
            Self::Present(_) | Self::ControlQueue(_) => ErrorKind::Busy,
            Self::Features { .. } | Self::Mtu { .. } | Self::Mac(_) => ErrorKind::Unsuitable,
        }
    }
}

fn bits(features: u64) -> String {
    let bits = (0..u64::BITS).filter(|bit| has(features, *bit)).map(|bit| bit.to_string());
    format!("bits {}", bits.collect::<Vec<_>>().join(", "))
}
