//! Followers of an IOMMU, which keep a copy of a function's mappings, such as the host's kernel for vhost-net, a device
//! of the host, or another process.
//!
//! Code that moves data in this process looks up each address ([`Translate`](super::Translate)), so it needs no
//! notification. A [`DmaFollower`] has a copy, which must be up to date when the driver's request completes.

use vm_memory::Permissions;

/// A range of a function's addresses, and its target in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMapping {
    /// The first address.
    pub first: u64,
    /// The last address, not below the first.
    pub last: u64,
    /// The guest physical address of the first. There may be no memory at it.
    pub target: u64,
    /// Accesses that are allowed.
    pub access: Permissions,
}

impl DmaMapping {
    /// All of the guest's memory by guest physical addresses.
    pub const IDENTITY: Self = Self { first: 0, last: u64::MAX, target: 0, access: Permissions::ReadWrite };
}

/// The memory that a function can reach.
pub enum DmaReach<'r> {
    /// Nothing: the function is in no domain.
    Nothing,
    /// All of the guest's memory, by guest physical addresses.
    Everything,
    /// These mappings, which do not overlap, in ascending order; the driver determines their number.
    Mapped(&'r mut dyn Iterator<Item = DmaMapping>),
}

/// Failure of a follower: the host has no memory for the mapping, or a limit is reached. The follower has logged the
/// cause, rate-limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a follower of the IOMMU failed")]
pub struct NotFollowed;

/// A copy of one function's mappings.
///
/// Notified of changes one at a time, in their order, before the driver's request completes: on the vCPU's thread,
/// which spins for the completion, if the driver made the request. So a follower takes bounded time, waits for no other
/// request to the IOMMU, and does not call [`Translate::follow`](super::Translate::follow). During the call, only locks
/// are held for which no threads wait except those that also change mappings.
///
/// A thread of the follower that makes its own copies looks an address up and passes it on within one
/// [pass](super::Translate::begin): removals during the pass are notified after its end.
pub trait DmaFollower: Send + Sync {
    /// The function's domain has a new mapping. The function may use it when this returns.
    ///
    /// # Errors
    ///
    /// [`NotFollowed`]. The driver's request is refused then, and [`Self::unmapped`] is called for the mapping.
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed>;

    /// These mappings, at least one and in ascending order, were removed, and nothing else is between the first and the
    /// last of them. The follower may not have had all of them. When this returns, the function can no longer reach
    /// them.
    fn unmapped(&self, mappings: &[DmaMapping]);

    /// False if the follower gave up waiting for removed mappings to become unreachable, so that the function may still
    /// reach them. It has logged that. The driver's request fails then, although its mappings are removed.
    fn has_forgotten(&self) -> bool {
        true
    }

    /// Replaces all mappings of the function. When this returns, the function can reach nothing else.
    ///
    /// # Errors
    ///
    /// [`NotFollowed`]. The function is then detached from its domain, with another notification, and the driver's
    /// request is refused.
    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed>;
}
