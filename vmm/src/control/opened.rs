//! A backend that was opened for a function that has none.

use std::sync::Arc;

use virtio_devices::{GuestMap, Memory};
use vm_memory::GuestAddressSpace as _;

use crate::devices::connect::Connecting;

/// A backend that was opened for a function, and the guest's memory for which it was.
pub(crate) struct Opened {
    pub backend: Connecting,
    pub memory: Arc<GuestMap>,
}

impl Opened {
    /// True if the guest's memory has not changed.
    pub(crate) fn has(&self, memory: &Memory) -> bool {
        Arc::ptr_eq(&self.memory, &memory.memory().into_inner())
    }
}
