//! Effects of an access beyond the registers.

/// A function of the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The PF.
    Pf,
    /// The VF of this index, from 0.
    Vf(u16),
}

/// The direction of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Frames for the guest.
    Receive,
    /// Frames of the guest.
    Transmit,
}

/// A tail that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Doorbell {
    /// The direction of the queue.
    pub direction: Direction,
    /// The queue of the NIC, 0 to 127.
    pub queue: u16,
}

/// Effects of an access beyond the registers. As in `pci`, each is a hint to ask again, except the vectors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct Effects {
    /// MSI-X vectors to send now, for each function a bit per vector. A vector that MSI-X masks becomes pending there.
    pub vectors: Vec<(Place, u64)>,
    /// True if a queue may have been enabled, disabled or moved.
    pub queues: bool,
    /// True if the result of [`Nic::pool`](crate::Nic::pool) or [`Nic::switching`](crate::Nic::switching) may have
    /// changed.
    pub pools: bool,
    /// True if the result of [`Nic::flows`](crate::Nic::flows) or [`Nic::rss`](crate::Nic::rss) may have changed.
    pub steering: bool,
    /// True if a message waits since this access: [`Nic::due`](crate::Nic::due) may be earlier than before.
    pub moderation: bool,
    /// The queue whose tail was written.
    pub doorbell: Option<Doorbell>,
}

impl Effects {
    /// Only registers changed.
    pub const NONE: Self = Self::hints(false, false, false, false);
    /// Queues may have changed.
    pub const QUEUES: Self = Self::hints(true, false, false, false);
    /// Pools may have changed.
    pub const POOLS: Self = Self::hints(false, true, false, false);
    /// Flow rules or RSS may have changed.
    pub const STEERING: Self = Self::hints(false, false, true, false);
    /// All values may have changed, as after a reset.
    pub(crate) const ALL: Self = Self::hints(true, true, true, true);

    const fn hints(queues: bool, pools: bool, steering: bool, moderation: bool) -> Self {
        Self { vectors: Vec::new(), queues, pools, steering, moderation, doorbell: None }
    }

    /// Sends `vectors` of `place`, one bit each.
    pub(crate) fn send(place: Place, vectors: u64) -> Self {
        if vectors == 0 { Self::NONE } else { Self { vectors: vec![(place, vectors)], ..Self::NONE } }
    }

    /// Both effects.
    pub fn and(mut self, other: Self) -> Self {
        self.vectors.extend(other.vectors);
        Self {
            vectors: self.vectors,
            queues: self.queues | other.queues,
            pools: self.pools | other.pools,
            steering: self.steering | other.steering,
            moderation: self.moderation | other.moderation,
            doorbell: other.doorbell.or(self.doorbell),
        }
    }

    /// True if nothing needs to be done.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}
