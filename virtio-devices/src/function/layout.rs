//! The layout of a virtio function's structures: BARs, MSI-X and virtio's capabilities (`virtio 1.4 §4.1.4`).
//!
//! A plain function, a PF and a VF have the same layout; a VF's BARs are its PF's VF BARs:
//!
//! | BAR | offset | content |
//! |---|---|---|
//! | 0 | 0 | the memory of a device that has some |
//! | 2 | 0 | common configuration, 64 bytes |
//! | 2 | 0x100 | ISR status, 1 byte |
//! | 2 | 0x200 | device configuration, to 0xfff |
//! | 2 | 0x1000 | doorbells, 4 bytes a queue, or a page each |
//! | 4 | 0 | MSI-X table |
//! | 4 | 0x800, or after the table | MSI-X pending bits |
//!
//! Each doorbell has its own page if a backend may give the guest a device's doorbell, because only whole pages can be
//! mapped.
//!
//! MSI-X has its own BAR, because nothing may share a page of the System Page Size with it (`PCIe 6.2 §7.7.2`,
//! `§9.3.3.13`).

use pci::{BarIndex, BarKind, MsixShape, VendorCapability};

use crate::VirtioDevice;
use crate::backend::DOORBELL_PAGE;
use crate::transport::Register;

/// The BAR of a device's memory.
pub(crate) const MEMORY_BAR: BarIndex = BarIndex::ALL[0];
/// The BAR of virtio's registers.
pub(crate) const REGISTERS_BAR: BarIndex = BarIndex::ALL[2];
/// The BAR of the MSI-X structures.
pub(crate) const MSIX_BAR: BarIndex = BarIndex::ALL[4];

/// The index of the PCI configuration access capability among the vendor-specific ones.
pub(crate) const CONFIG_ACCESS: usize = 4;

const ISR: u64 = 0x100;
const DEVICE_CONFIG: u64 = 0x200;
const NOTIFY: u64 = 0x1000;
/// The lowest offset of the pending bits, the same for all small tables.
const PBA_MIN: u64 = 0x800;
/// The least size of a BAR: a page.
const BAR_MIN: u64 = 0x1000;
/// The largest MSI-X table (`PCIe 6.2 §7.7.2.2`).
const VECTORS_MAX: u16 = 2048;

/// The structure at an offset of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegisterBlock {
    /// The common configuration, from its start.
    Common(u64),
    /// The ISR status.
    Isr,
    /// The device configuration, from its start.
    DeviceConfig(u64),
    /// The doorbell of a queue.
    Doorbell(u16),
    /// The BAR of the MSI-X structures, from its start.
    Msix(u64),
    /// No structure.
    Hole,
}

/// Distance between doorbells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spacing {
    /// 4 bytes.
    Dwords,
    /// Each has a page of its own.
    Pages,
}

impl Spacing {
    /// The spacing of functions that must look alike, one for each of `devices`: pages if any device can use them.
    pub(crate) fn of<'d, D: VirtioDevice + 'd>(devices: impl IntoIterator<Item = &'d D>) -> Self {
        let paged = devices.into_iter().any(|device| device.doorbell_pages().is_some());
        if paged { Self::Pages } else { Self::Dwords }
    }

    /// `notify_off_multiplier`: bytes from one queue's doorbell to the next one's (`virtio 1.4 §4.1.4.4`).
    const fn multiplier(self) -> u64 {
        match self {
            Self::Dwords => 4,
            Self::Pages => DOORBELL_PAGE,
        }
    }
}

/// The layout of a function with some number of queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    queues: u16,
    spacing: Spacing,
    msix: MsixShape,
    /// Bytes of memory of the device; usually 0.
    memory: u64,
}

impl Layout {
    /// Uses a vector for each queue and one for configuration changes, up to the largest MSI-X table.
    pub(crate) fn new(queues: u16, spacing: Spacing) -> Self {
        let vectors = queues.saturating_add(1).min(VECTORS_MAX);
        let table = MsixShape { vectors, table: (MSIX_BAR, 0), pba: (MSIX_BAR, 0) };
        let pba = table.table_len().max(PBA_MIN);
        Self { queues, spacing, msix: MsixShape { pba: (MSIX_BAR, pba), ..table }, memory: 0 }
    }

    /// Adds `memory` bytes of device memory, at most 2^63.
    pub(crate) fn with_memory(self, memory: u64) -> Self {
        Self { memory, ..self }
    }

    /// The MSI-X structures.
    pub(crate) fn msix(&self) -> MsixShape {
        self.msix
    }

    /// The BARs of one function.
    pub(crate) fn bars(&self) -> Vec<(BarIndex, BarKind)> {
        let memory = (self.memory > 0).then_some((MEMORY_BAR, self.memory.next_power_of_two()));
        let own = [REGISTERS_BAR, MSIX_BAR].map(|bar| (bar, self.bar_len(bar)));
        let all = memory.into_iter().chain(own);
        all.map(|(bar, size)| (bar, BarKind::Memory64 { size, prefetchable: true })).collect()
    }

    fn bar_len(&self, bar: BarIndex) -> u64 {
        let used = match bar {
            REGISTERS_BAR => NOTIFY + self.notify_len(),
            MSIX_BAR => self.msix.pba.1 + self.msix.pba_len(),
            _ => return 0,
        };
        used.next_power_of_two().max(BAR_MIN)
    }

    fn notify_len(&self) -> u64 {
        // A structure must have a length.
        u64::from(self.queues).max(1) * self.spacing.multiplier()
    }

    /// The offset of a queue's doorbell in [`REGISTERS_BAR`].
    pub(crate) fn doorbell(&self, queue: u16) -> u64 {
        NOTIFY + u64::from(queue) * self.spacing.multiplier()
    }

    /// The structure at an access of `len` bytes at `offset` of `bar`; `None` if any byte is outside of the function's
    /// BARs.
    pub(crate) fn locate(&self, bar: BarIndex, offset: u64, len: usize) -> Option<RegisterBlock> {
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        if offset >= self.bar_len(bar) || end > self.bar_len(bar) {
            return None;
        }
        let multiplier = self.spacing.multiplier();
        Some(if bar == MSIX_BAR {
            RegisterBlock::Msix(offset)
        } else {
            match offset {
                0..Register::SPACE => RegisterBlock::Common(offset),
                ISR => RegisterBlock::Isr,
                DEVICE_CONFIG..NOTIFY => RegisterBlock::DeviceConfig(offset - DEVICE_CONFIG),
                NOTIFY.. if offset.is_multiple_of(multiplier) => match u16::try_from((offset - NOTIFY) / multiplier) {
                    Ok(queue) if queue < self.queues => RegisterBlock::Doorbell(queue),
                    _ => RegisterBlock::Hole,
                },
                _ => RegisterBlock::Hole,
            }
        })
    }

    /// The five capabilities that describe this layout to the driver (`virtio 1.4 §4.1.4`).
    pub(crate) fn capabilities(&self) -> Vec<VendorCapability> {
        let multiplier = lower(self.spacing.multiplier()).to_le_bytes();
        vec![
            structure(1, 0, Register::SPACE, &[]),
            structure(2, NOTIFY, self.notify_len(), &multiplier),
            structure(3, ISR, 1, &[]),
            structure(4, DEVICE_CONFIG, NOTIFY - DEVICE_CONFIG, &[]),
            config_access(),
        ]
    }
}

/// A `virtio_pci_cap` of type `cfg_type`, from its length field on, followed by `rest`.
fn structure(cfg_type: u8, offset: u64, length: u64, rest: &[u8]) -> VendorCapability {
    let len = 16 + u8::try_from(rest.len()).unwrap_or(0);
    let mut body = vec![len, cfg_type, REGISTERS_BAR.get(), 0, 0, 0];
    body.extend(lower(offset).to_le_bytes());
    body.extend(lower(length).to_le_bytes());
    body.extend(rest);
    let writable = vec![0; body.len()];
    VendorCapability { body, writable }
}

/// The PCI configuration access capability (`virtio 1.4 §4.1.4.9`). The driver writes bar, offset and length. The data
/// field stores nothing: accessing it accesses the BAR.
fn config_access() -> VendorCapability {
    let body = vec![20, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut writable = vec![0; body.len()];
    writable.iter_mut().enumerate().filter(|(n, _)| matches!(n, 2 | 6..14)).for_each(|(_, mask)| *mask = 0xff);
    VendorCapability { body, writable }
}

/// Casts an offset or length within a BAR of at most 512 MiB.
fn lower(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_three_queues_takes_8_and_4_kib() {
        let layout = Layout::new(3, Spacing::Dwords);
        let sizes: Vec<_> = layout.bars().iter().map(|(bar, kind)| (bar.get(), kind.size())).collect();
        assert_eq!(sizes, [(2, 0x2000), (4, 0x1000)]);
        assert_eq!(layout.msix(), MsixShape { vectors: 4, table: (MSIX_BAR, 0), pba: (MSIX_BAR, 0x800) });
    }

    /// G35, G36: structures of functions of any size.
    #[test]
    fn structures_of_any_function_lie_within_their_bar_and_apart() {
        let queues = [0, 1, 127, 128, 1023, 1024, 1025, 2047, 2048, 65535];
        let shapes =
            [Spacing::Dwords, Spacing::Pages].into_iter().flat_map(|spacing| queues.map(|queues| (queues, spacing)));
        for (queues, spacing) in shapes {
            let layout = Layout::new(queues, spacing);
            let msix = layout.msix();
            assert_eq!(msix.vectors, (queues.saturating_add(1)).min(2048));
            assert!(msix.table_len() <= msix.pba.1);
            assert!(msix.pba.1 + msix.pba_len() <= layout.bar_len(MSIX_BAR));
            assert_ne!(REGISTERS_BAR, MSIX_BAR);
            for cap in layout.capabilities().iter().take(CONFIG_ACCESS) {
                let word = |at: usize| u32::from_le_bytes(cap.body[at..at + 4].try_into().unwrap());
                assert_eq!(usize::from(cap.body[0]), cap.body.len() + 2);
                assert!(u64::from(word(6) + word(10)) <= layout.bar_len(REGISTERS_BAR));
                assert_eq!((word(6) % 4, word(10) > 0), (0, true));
            }
            for queue in [0, queues / 2, queues.saturating_sub(1)].into_iter().filter(|queue| *queue < queues) {
                let place = layout.locate(REGISTERS_BAR, layout.doorbell(queue), 2);
                assert_eq!(place, Some(RegisterBlock::Doorbell(queue)));
                assert!(layout.doorbell(queue) + 4 <= NOTIFY + layout.notify_len());
            }
        }
    }

    #[test]
    fn doorbell_pages_are_placed_by_the_multiplier() {
        let layout = Layout::new(3, Spacing::Pages);
        let sizes: Vec<_> = layout.bars().iter().map(|(bar, kind)| (bar.get(), kind.size())).collect();
        assert_eq!(sizes, [(2, 0x4000), (4, 0x1000)]);
        assert_eq!(layout.msix(), Layout::new(3, Spacing::Dwords).msix());
        assert_eq!(layout.capabilities()[1].body[14..], 0x1000_u32.to_le_bytes());
        assert_eq!([0, 1, 2].map(|queue| layout.doorbell(queue)), [0x1000, 0x2000, 0x3000]);
        assert_eq!(layout.locate(REGISTERS_BAR, 0x3000, 2), Some(RegisterBlock::Doorbell(2)));
        assert_eq!(
            layout.locate(REGISTERS_BAR, 0x3004, 2),
            Some(RegisterBlock::Hole),
            "the rest of a page has no owner"
        );
    }

    #[test]
    fn an_access_that_leaves_its_bar_hits_nothing() {
        let layout = Layout::new(3, Spacing::Dwords);
        assert_eq!(layout.locate(REGISTERS_BAR, 0x1ffc, 4), Some(RegisterBlock::Hole));
        assert_eq!(layout.locate(REGISTERS_BAR, 0x1ffe, 4), None);
        assert_eq!(layout.locate(REGISTERS_BAR, u64::MAX, 4), None);
        assert_eq!(layout.locate(MSIX_BAR, 0x1000, 0), None);
        assert_eq!(layout.locate(BarIndex::new(0).unwrap(), 0, 1), None);
    }
}
