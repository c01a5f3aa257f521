//! Map from guest addresses to devices' windows.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pci::{Window, WindowId};

/// A window of device `owner`.
#[derive(Debug, Clone)]
struct Region<T> {
    window: Window,
    owner: T,
}

impl<T> Region<T> {
    fn offset_of(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.window.base).filter(|offset| *offset < self.window.len)
    }
}

/// The windows that devices decode now.
///
/// vCPUs use a snapshot, without a lock; a device's windows are replaced as a whole.
#[derive(Debug)]
pub struct MmioMap<T> {
    /// In ascending order of their bases.
    regions: ArcSwap<Vec<Region<T>>>,
    writer: Mutex<()>,
}

impl<T> Default for MmioMap<T> {
    fn default() -> Self {
        Self { regions: ArcSwap::from_pointee(Vec::new()), writer: Mutex::new(()) }
    }
}

impl<T: Clone> MmioMap<T> {
    /// Replaces the windows of `owner`, which `is_owner` recognises, by `windows`.
    pub fn replace(&self, owner: &T, is_owner: impl Fn(&T) -> bool, windows: &[Window]) {
        let _writer = self.writer.lock();
        let mut regions: Vec<_> =
            self.regions.load().iter().filter(|region| !is_owner(&region.owner)).cloned().collect();
        regions.extend(windows.iter().map(|&window| Region { window, owner: owner.clone() }));
        regions.sort_by_key(|region| region.window.base);
        self.regions.store(Arc::new(regions));
    }

    /// Finds the device, its window and the offset in it for `address`. Of windows that a guest made overlap, the one
    /// with the highest base answers.
    pub fn find(&self, address: u64) -> Option<(T, WindowId, u64)> {
        let regions = self.regions.load();
        let end = regions.partition_point(|region| region.window.base <= address);
        regions
            .iter()
            .take(end)
            .rev()
            .find_map(|region| region.offset_of(address).map(|offset| (region.owner.clone(), region.window.id, offset)))
    }

    /// The number of windows.
    #[cfg(any(test, feature = "testing"))]
    pub fn window_count(&self) -> usize {
        self.regions.load().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(bar: u8, base: u64, len: u64) -> Window {
        let kind = pci::MemoryKind::Memory64 { prefetchable: true };
        Window { id: WindowId::Bar(pci::BarIndex::new(bar).unwrap()), base, len, kind }
    }

    #[test]
    fn an_address_belongs_to_the_window_around_it() {
        let map = MmioMap::default();
        map.replace(&1, |owner| *owner == 1, &[window(0, 0x1000, 0x100), window(2, 0x3000, 0x1000)]);
        map.replace(&2, |owner| *owner == 2, &[window(0, 0x2000, 0x1000)]);
        let find = |address| map.find(address).map(|(owner, _, offset)| (owner, offset));
        assert_eq!(find(0xfff), None);
        assert_eq!(find(0x10ff), Some((1, 0xff)));
        assert_eq!(find(0x1100), None);
        assert_eq!(find(0x2fff), Some((2, 0xfff)));
        assert_eq!(find(0x3000), Some((1, 0)));
        assert_eq!(find(u64::MAX), None);
    }

    #[test]
    fn replaced_windows_are_gone() {
        let map = MmioMap::default();
        map.replace(&1, |owner| *owner == 1, &[window(0, 0x1000, 0x100)]);
        map.replace(&1, |owner| *owner == 1, &[window(0, 0x5000, 0x100)]);
        assert!(map.find(0x1000).is_none());
        assert!(map.find(0x5000).is_some());
        map.replace(&1, |owner| *owner == 1, &[]);
        assert_eq!(map.window_count(), 0);
    }

    #[test]
    fn overlapping_windows_do_not_hide_what_is_around_them() {
        let map = MmioMap::default();
        map.replace(&1, |owner| *owner == 1, &[window(0, 0x1000, 0x4000)]);
        map.replace(&2, |owner| *owner == 2, &[window(0, 0x2000, 0x1000)]);
        let owner = |address| map.find(address).map(|(owner, ..)| owner);
        assert_eq!((owner(0x1fff), owner(0x2000), owner(0x3000)), (Some(1), Some(2), Some(1)));
    }
}
