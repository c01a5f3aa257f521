//! What the host can inspect and change in a network function while a guest uses it.

use crate::{BackendKind, ErrorKind, Policy, RateLimits, Replaced, Status};

/// A network function's end of its link, as the host has it.
pub trait Port {
    /// What its backend is.
    fn backend_kind(&self) -> BackendKind;

    /// Whether its backend was lost, and is not back yet.
    fn backend_lost(&self) -> bool;

    /// How often its backend was lost since it was plugged in.
    fn backend_losses(&self) -> u64;

    /// The name of its backend: the interface of a tap, the path of a socket or device.
    fn backend_name(&self) -> &str;

    /// Its Ethernet address now: the driver may have changed it.
    fn mac(&self) -> [u8; 6];

    /// Gives it another address, which the next driver finds.
    ///
    /// # Errors
    ///
    /// [`MacError`]; its address is what it was then.
    fn set_mac(&mut self, mac: [u8; 6]) -> Result<(), MacError>;

    /// Replaces what the function may send and receive. Buckets whose limits stay are not refilled.
    fn set_policy(&mut self, policy: Policy, limits: RateLimits) -> Replaced;

    /// Whether the link is up.
    fn link_up(&self) -> bool;

    /// Takes the link up or down, and tells the driver (`virtio 1.4 §5.1.4`). While it is down, frames are dropped in
    /// both directions.
    fn set_link(&mut self, up: bool);
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
