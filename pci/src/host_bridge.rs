//! The host bridge: function 00:00.0, which says that there is a root bus and does nothing.

use crate::spec::{self, header};
use crate::{Device, Dword, DwordWrite, Effects, ResetKind, Rid, Window, WindowId};

/// A host bridge without registers to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostBridge {
    vendor: u16,
    device: u16,
}

impl HostBridge {
    /// A host bridge with these IDs.
    pub const fn new(vendor: u16, device: u16) -> Self {
        Self { vendor, device }
    }
}

impl Device for HostBridge {
    fn config_read(&self, _rid: Rid, reg: Dword) -> u32 {
        match reg.offset() {
            header::ID => u32::from(self.vendor) | u32::from(self.device) << 16,
            header::CLASS_REVISION => spec::CLASS_HOST_BRIDGE << 16,
            _ => 0,
        }
    }

    fn config_write(&mut self, _rid: Rid, _reg: Dword, _write: DwordWrite) -> Effects {
        Effects::NONE
    }

    fn mmio_read(&mut self, _window: WindowId, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&mut self, _window: WindowId, _offset: u64, _data: &[u8]) -> Effects {
        Effects::NONE
    }

    fn windows(&self, _out: &mut Vec<Window>) {}

    fn reset(&mut self, _kind: ResetKind) -> Effects {
        Effects::NONE
    }
}
