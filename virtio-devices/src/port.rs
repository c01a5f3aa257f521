//! What the host can inspect and change in a network function while a guest uses it.

use std::any::Any;

use thiserror::Error;

use crate::features::has;
use crate::{BackendKind, BackendObserver, ErrorKind, Policy, RateLimits, Replaced, Status};

/// A network function's end of its link, as the host has it.
pub trait Port {
    /// What its backend is.
    fn backend_kind(&self) -> BackendKind;

    /// Why it has no backend, in one line, if it has none. Its link is down then.
    fn backend_missing(&self) -> Option<&str> {
        None
    }

    /// True if it can be given a backend ([`crate::Lifecycle::connect`]): it has none, or a tap that was deleted.
    fn takes_backend(&self) -> bool {
        self.backend_missing().is_some()
    }

    /// Notes that another backend has taken the place of one that was lost, and notifies the observer.
    fn backend_replaced(&mut self) {}

    /// Whether its backend was lost, and is not back yet.
    fn backend_lost(&self) -> bool;

    /// How often its backend was lost since it was plugged in.
    fn backend_losses(&self) -> u64;

    /// Notifies `observer` when its backend is lost, and when it is back.
    fn observe_backend(&self, observer: BackendObserver);

    /// The name of its backend: the interface of a tap, the path of a socket or device.
    fn backend_name(&self) -> &str;

    /// Its Ethernet address now: the driver may have changed it.
    fn mac(&self) -> [u8; 6];

    /// Gives it another address, which the next driver finds. Behind a switch, it holds for all frames after a wait.
    ///
    /// # Errors
    ///
    /// [`MacError`]; its address is what it was then.
    fn set_mac(&mut self, mac: [u8; 6]) -> Result<Replaced, MacError>;

    /// Replaces what the function may send and receive. Buckets whose limits stay are not refilled.
    fn set_policy(&mut self, policy: Policy, limits: RateLimits) -> Replaced;

    /// Whether the link is up.
    fn link_up(&self) -> bool;

    /// Takes the link up or down, and tells the driver (`virtio 1.4 §5.1.4`). While it is down, frames are dropped in
    /// both directions; behind a switch, all of them after a wait.
    fn set_link(&mut self, up: bool) -> Replaced;

    /// Keeps the link down whatever the host wants, or no longer, and tells the driver. Not for a function without a
    /// backend, whose link nothing takes up.
    fn hold_link(&mut self, held: bool);

    /// Asks the driver to announce its addresses to the network, so that it is found at its new place
    /// (`virtio 1.4 §5.1.6.5.4`). Returns whether it will: a driver that did not negotiate
    /// `VIRTIO_NET_F_GUEST_ANNOUNCE`, and one whose link is down, does not.
    fn announce(&mut self) -> bool;

    /// Announces its addresses by frames of its own (RARP) where its driver does not: over a tap, vhost-net, and a
    /// vhost-user peer that can. Returns whether it is to.
    fn announce_here(&mut self) -> bool;
}

/// Why a network function cannot have an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// It is a group address, or zero.
    #[error("not an address that a NIC can have; give one whose first byte is even")]
    NotUnicast,
    /// A driver has read the one that it has, and nothing makes a driver read it again.
    #[error("its driver has already read its address; unbind the driver or disable the VFs first")]
    InUse,
}

impl MacError {
    /// Who has to act on it.
    pub const fn kind(self) -> ErrorKind {
        match self {
            Self::NotUnicast => ErrorKind::Invalid,
            Self::InUse => ErrorKind::Busy,
        }
    }
}

/// What a function is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionStatus {
    /// Whether it can be seen: always, but for a VF that is not enabled.
    pub exists: bool,
    /// The device status, as the driver reads it (`virtio 1.4 §2.1`).
    pub driver: Status,
}

/// The registers of a PF's SR-IOV capability that say which VFs there are (`PCIe 6.2 §9.3.3`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SriovStatus {
    /// NumVFs.
    pub num_vfs: u16,
    /// VF Enable.
    pub vf_enable: bool,
}

impl SriovStatus {
    /// How many VFs exist now.
    pub fn num_visible(self) -> u16 {
        // NumVFs is at most TotalVFs while VF Enable is set.
        if self.vf_enable { self.num_vfs } else { 0 }
    }
}

/// A backend for a NIC whose own is missing or lost, opened and checked before the NIC is touched.
pub struct NewBackend {
    kind: BackendKind,
    name: String,
    /// What only a NIC knows.
    inside: Box<dyn Any + Send>,
}

impl NewBackend {
    /// A backend of this kind and name.
    pub(crate) fn of(kind: BackendKind, name: String, inside: impl Any + Send) -> Self {
        Self { kind, name, inside: Box::new(inside) }
    }

    /// What it is.
    pub fn kind(&self) -> BackendKind {
        self.kind
    }

    /// What users call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What only a NIC knows, if this is of the kind that it knows.
    pub(crate) fn inside_mut<T: Any>(&mut self) -> Option<&mut T> {
        self.inside.downcast_mut()
    }
}

/// Why a NIC is not given a backend: one line, to follow what names the NIC.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConnectError {
    /// It is no network function.
    #[error("it is no network function")]
    NoNic,
    /// Its queues run.
    #[error("its queues run; please report this")]
    Running,
    /// It has one.
    #[error("it has a backend ({0}); only one that is missing, or a tap that was deleted, can be replaced")]
    Present(String),
    /// The driver was promised more.
    #[error("{name} lacks virtio features that its driver uses: {}; give a backend that has them", bits(*.missing))]
    Features {
        /// The backend.
        name: String,
        /// What it lacks.
        missing: u64,
    },
    /// The driver was told another MTU.
    #[error("{name} has an MTU of {has}, and its driver was told {told}; raise it to {told}")]
    Mtu {
        /// The backend.
        name: String,
        /// The backend's.
        has: u16,
        /// The driver's.
        told: u16,
    },
    /// The backend has an address of its own, which is another.
    #[error("{0} has another MAC address than the function; give that to the device")]
    Mac(String),
    /// The backend runs the control queue, and does not know what the driver has commanded.
    #[error("{0} runs the control queue, and does not know what the driver has set by it; unbind the driver first")]
    ControlQueue(String),
}

impl ConnectError {
    /// Who has to act on it.
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
