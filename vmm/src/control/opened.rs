//! A backend that was opened for a function without one.

use std::sync::Arc;

use virtio_devices::{GuestMap, Memory};
use vm_memory::GuestAddressSpace as _;

use crate::devices::connect::Connecting;

/// A backend that was opened for a function, and the guest memory it was opened for.
pub(crate) struct Opened {
    pub backend: Connecting,
    pub memory: Arc<GuestMap>,
}

impl Opened {
    /// True if guest memory has not changed since.
    pub(crate) fn has(&self, memory: &Memory) -> bool {
        Arc::ptr_eq(&self.memory, &memory.memory().into_inner())
    }
}
