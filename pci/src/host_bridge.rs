//! The host bridge: function 00:00.0. It only shows software that there is a root bus.

use std::marker::PhantomData;

use crate::spec::{self, header};
use crate::{Device, Dword, DwordWrite, Outcome, ResetKind, Rid, Window, WindowId};

/// A host bridge without writable registers. It never stops anything; `S` is the type that the bus's other devices may
/// stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostBridge<S> {
    vendor: u16,
    device: u16,
    stops: PhantomData<fn() -> S>,
}

impl<S> HostBridge<S> {
    /// A host bridge with these IDs.
    pub const fn new(vendor: u16, device: u16) -> Self {
        Self { vendor, device, stops: PhantomData }
    }
}

impl<S> Device for HostBridge<S> {
    type Stopping = S;

    fn config_read(&self, _rid: Rid, reg: Dword) -> u32 {
        match reg.offset() {
            header::ID => u32::from(self.vendor) | u32::from(self.device) << 16,
            header::CLASS_REVISION => spec::CLASS_HOST_BRIDGE << 16,
            _ => 0,
        }
    }

    fn config_write(&mut self, _rid: Rid, _reg: Dword, _write: DwordWrite) -> Outcome<S> {
        Outcome::none()
    }

    fn mmio_read(&mut self, _window: WindowId, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&mut self, _window: WindowId, _offset: u64, _data: &[u8]) -> Outcome<S> {
        Outcome::none()
    }

    fn may_send(&self, _rid: Rid) -> bool {
        false
    }

    fn windows(&self, _out: &mut Vec<Window>) {}

    fn reset(&mut self, _kind: ResetKind) -> Outcome<S> {
        Outcome::none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_bridge_has_a_fixed_identity() {
        let mut bridge = HostBridge::<()>::new(0x8086, 0x0d57);
        let rid = Rid::from_bits(0);
        let image = |bridge: &HostBridge<()>| Dword::all().map(|reg| bridge.config_read(rid, reg)).collect::<Vec<_>>();
        let before = image(&bridge);
        assert_eq!((before[0], before[2]), (0x0d57_8086, 0x0600_0000));
        assert!(before.iter().enumerate().all(|(n, value)| matches!(n, 0 | 2) || *value == 0));
        assert!(Dword::all().all(|reg| bridge.config_write(rid, reg, DwordWrite::full(u32::MAX)).is_none()));
        assert!(bridge.reset(ResetKind::Conventional).is_none());
        assert_eq!(image(&bridge), before);
    }

    #[test]
    fn a_host_bridge_decodes_no_memory() {
        let mut bridge = HostBridge::<()>::new(0x8086, 0x0d57);
        let mut windows = Vec::new();
        bridge.windows(&mut windows);
        assert!(windows.is_empty());
        let window = WindowId::Bar(crate::BarIndex::ALL[0]);
        let mut data = [0; 4];
        assert!(bridge.mmio_write(window, 0, &data).is_none());
        bridge.mmio_read(window, 0, &mut data);
        assert_eq!(data, [0xff; 4]);
    }
}
