//! Followers of an IOMMU: parties that keep a copy of what a function reaches, such as the host's kernel for vhost-net,
//! a device of the host, or another process.
//!
//! Code that moves data in this process looks up each address ([`Translate`](super::Translate)), so it needs no
//! notification. A [`DmaFollower`] has a copy, which has to be right when the driver's request is answered.

use vm_memory::Permissions;

/// A range of a function's addresses, and the guest's memory that it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMapping {
    /// The first address.
    pub first: u64,
    /// The last address, not below the first.
    pub last: u64,
    /// The guest physical address of the first. There may be no memory.
    pub target: u64,
    /// Accesses that are allowed.
    pub access: Permissions,
}

impl DmaMapping {
    /// All of the guest's memory by guest physical addresses.
    pub const IDENTITY: Self = Self { first: 0, last: u64::MAX, target: 0, access: Permissions::ReadWrite };
}

/// Memory that a function reaches.
pub enum DmaReach<'r> {
    /// Nothing: it is in no domain, and such functions reach nothing.
    Nothing,
    /// All of the guest's memory, by guest physical addresses.
    Everything,
    /// These mappings, which do not overlap, in ascending order; as many as the driver likes.
    Mapped(&'r mut dyn Iterator<Item = DmaMapping>),
}

/// Failure of a follower: the host has no memory for it, or a limit is reached. The follower has logged the cause,
/// rate-limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("whoever follows the IOMMU cannot")]
pub struct NotFollowed;

/// A copy of what one function reaches.
///
/// It is told of changes one after the other, in the order in which they are made, before the driver is answered: on
/// the vCPU's thread if the driver asked for them, which spins for the answer. So it does what takes a bounded time,
/// waits for no other request to the IOMMU, and does not call [`Translate::follow`](super::Translate::follow). No lock
/// is held meanwhile for which anybody waits but who also changes what functions reach.
///
/// A thread of the follower that copies something by itself looks it up and passes it on within one
/// [pass](super::Translate::begin): what is taken away meanwhile is told when that pass has ended.
pub trait DmaFollower: Send + Sync {
    /// The function's domain has one mapping more. The function may use it when this returns.
    ///
    /// # Errors
    ///
    /// [`NotFollowed`]. The driver's request is refused then, and [`Self::unmapped`] is called for the mapping.
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed>;

    /// These mappings, at least one and in ascending order, are gone, and nothing else is between the first and the
    /// last of them. Some may have been unknown here. When this returns, the function does not reach them any more.
    fn unmapped(&self, mappings: &[DmaMapping]);

    /// False if the follower gave up waiting for what was taken away to be out of reach, so that the function may still
    /// reach it. It has logged that. The driver's request fails then, although its mappings are gone.
    fn has_forgotten(&self) -> bool {
        true
    }

    /// Replaces all that the function reaches. When this returns, the function reaches nothing else.
    ///
    /// # Errors
    ///
    /// [`NotFollowed`]. The function is taken out of its domain then, of which this is told again, and the driver's
    /// request is refused.
    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed>;
}
