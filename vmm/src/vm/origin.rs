//! Origin of a guest's memory and disks while its VM is made.

use crate::devices::passed_taps::PassedTaps;
use crate::vm::memory::Image;

/// Origin of memory and disks.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'o> {
    /// No other program uses them. With an image, memory is a mapping of that.
    Snapshot(Option<&'o Image>),
    /// Another program runs the guest. Its disks must not be written before
    /// [`StorageLocks::take`](virtio_devices::StorageLocks::take), nor its memory, if that is passed.
    Running(Option<(&'o Image, &'o PassedTaps)>),
}

impl<'o> Origin<'o> {
    pub(super) const fn image(self) -> Option<&'o Image> {
        match self {
            Self::Snapshot(image) => image,
            Self::Running(Some((image, _))) => Some(image),
            Self::Running(None) => None,
        }
    }

    pub(super) const fn taps(self) -> &'o PassedTaps {
        match self {
            Self::Running(Some((_, taps))) => taps,
            _ => const { &PassedTaps(Vec::new()) },
        }
    }

    pub(super) const fn is_running(self) -> bool {
        matches!(self, Self::Running(_))
    }
}
