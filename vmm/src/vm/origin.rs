//! Origin of a guest's memory and disks while its VM is made.

use std::sync::Arc;

use virtio_devices::PassedSockets;

use crate::devices::passed_taps::PassedTaps;
use crate::vm::memory::Image;

/// Memory, taps and listening sockets that another program on this host has passed.
pub(crate) struct Passed {
    /// The memory.
    pub image: Image,
    /// The taps.
    pub taps: PassedTaps,
    /// The listening sockets of vsock and consoles.
    pub sockets: Arc<PassedSockets>,
}

/// Origin of memory and disks.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'o> {
    /// No other program uses them. With an image, memory is a mapping of that.
    Snapshot(Option<&'o Image>),
    /// Another program runs the guest. Its disks must not be written before
    /// [`StorageLocks::take`](virtio_devices::StorageLocks::take), nor its memory, if that is passed.
    Running(Option<&'o Passed>),
}

impl<'o> Origin<'o> {
    pub(super) const fn image(self) -> Option<&'o Image> {
        match self {
            Self::Snapshot(image) => image,
            Self::Running(Some(passed)) => Some(&passed.image),
            Self::Running(None) => None,
        }
    }

    pub(super) const fn taps(self) -> &'o PassedTaps {
        match self {
            Self::Running(Some(passed)) => &passed.taps,
            _ => const { &PassedTaps(Vec::new()) },
        }
    }

    pub(super) fn sockets(self) -> Arc<PassedSockets> {
        match self {
            Self::Running(Some(passed)) => Arc::clone(&passed.sockets),
            _ => Arc::default(),
        }
    }

    pub(super) const fn is_running(self) -> bool {
        matches!(self, Self::Running(_))
    }
}
