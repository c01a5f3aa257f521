//! Base address registers of a PF and of its VFs.

use crate::spec::bar::{MEMORY64, PREFETCHABLE};
use crate::{BarIndex, DwordWrite, MemoryKind, Window, WindowId};

/// The smallest BAR (`PCIe 6.2 §7.5.1.2.1`), in bytes.
const SMALLEST: u64 = 128;

/// The address space of a BAR. There are no I/O BARs: a VF must not have one (`PCIe 6.2 §9.3.3.14`), and no other
/// function needs one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    /// Memory below 4 GiB.
    Memory32 {
        /// Bytes, a power of two, at least 128.
        size: u32,
    },
    /// Memory at any 64-bit address; takes two registers.
    Memory64 {
        /// Bytes, a power of two, at least 128.
        size: u64,
        /// Reads have no side effects.
        prefetchable: bool,
    },
}

impl BarKind {
    /// Bytes that one function decodes.
    pub const fn size(self) -> u64 {
        match self {
            Self::Memory32 { size } => size as u64,
            Self::Memory64 { size, .. } => size,
        }
    }

    /// The kind of memory, without its size.
    pub const fn memory(self) -> MemoryKind {
        match self {
            Self::Memory32 { .. } => MemoryKind::Memory32,
            Self::Memory64 { prefetchable, .. } => MemoryKind::Memory64 { prefetchable },
        }
    }

    const fn type_bits(self) -> u32 {
        match self {
            Self::Memory32 { .. } => 0,
            Self::Memory64 { prefetchable, .. } => MEMORY64 | if prefetchable { PREFETCHABLE } else { 0 },
        }
    }
}

/// Reason why a set of BARs is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BarError {
    /// The size is not a power of two, or is below 128.
    #[error("BAR {index}: {size} bytes is not a power of two of at least 128")]
    Size {
        /// The BAR.
        index: BarIndex,
        /// Requested size, in bytes.
        size: u64,
    },
    /// Two BARs take the same register, or a 64-bit BAR begins in the last register.
    #[error("BAR {index}: its registers are taken or do not exist")]
    Register {
        /// The BAR.
        index: BarIndex,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    Unused,
    Low(BarKind),
    /// The upper half of the 64-bit BAR in the register before.
    High(BarKind),
}

/// Six BAR registers.
///
/// Sizing needs no special case: the address bits below the size are read-only 0, so that the value written for sizing
/// reads back as the mask (`PCIe 6.2 §7.5.1.2.1`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BarSet {
    registers: [Register; 6],
    values: [u32; 6],
    granule: u64,
}

impl BarSet {
    /// BARs at address 0.
    ///
    /// # Errors
    ///
    /// Fails if a size is invalid, or a register is taken or does not exist.
    pub fn new(bars: &[(BarIndex, BarKind)]) -> Result<Self, BarError> {
        let mut registers = [Register::Unused; 6];
        let mut take = |index: BarIndex, n: usize, register| match registers.get_mut(n) {
            Some(slot @ Register::Unused) => {
                *slot = register;
                Ok(())
            }
            _ => Err(BarError::Register { index }),
        };
        for &(index, kind) in bars {
            if !kind.size().is_power_of_two() || kind.size() < SMALLEST {
                return Err(BarError::Size { index, size: kind.size() });
            }
            let n = usize::from(index.get());
            take(index, n, Register::Low(kind))?;
            if matches!(kind, BarKind::Memory64 { .. }) {
                take(index, n + 1, Register::High(kind))?;
            }
        }
        Ok(Self { registers, values: [0; 6], granule: 1 })
    }

    fn register(&self, n: u16) -> (Register, u32) {
        let n = usize::from(n);
        (self.registers.get(n).copied().unwrap_or(Register::Unused), self.values.get(n).copied().unwrap_or(0))
    }

    /// The address bits in register `register`.
    fn writable(&self, register: Register) -> u32 {
        let address = |kind: BarKind| !(self.spacing(kind) - 1);
        match register {
            Register::Unused => 0,
            Register::Low(kind) => lower(address(kind)) & !0xf,
            Register::High(kind) => lower(address(kind) >> 32),
        }
    }

    fn spacing(&self, kind: BarKind) -> u64 {
        kind.size().max(self.granule)
    }

    /// Reads register `n`, 0 to 5. Registers without a BAR read 0.
    pub fn read(&self, n: u16) -> u32 {
        match self.register(n) {
            (Register::Low(kind), value) => value | kind.type_bits(),
            (_, value) => value,
        }
    }

    /// Writes register `n`, 0 to 5; returns true if it changed.
    pub fn write(&mut self, n: u16, write: DwordWrite) -> bool {
        let (register, old) = self.register(n);
        let new = write.apply(old, self.writable(register));
        if let Some(value) = self.values.get_mut(usize::from(n)) {
            *value = new;
        }
        old != new
    }

    /// The kind of BAR `index`; `None` if no BAR begins there.
    pub fn kind(&self, index: BarIndex) -> Option<BarKind> {
        match self.register(u16::from(index.get())).0 {
            Register::Low(kind) => Some(kind),
            _ => None,
        }
    }

    /// The BARs and their kinds in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (BarIndex, BarKind)> {
        BarIndex::ALL.into_iter().filter_map(|index| Some((index, self.kind(index)?)))
    }

    /// The address in BAR `index`, a multiple of [`Self::aperture`]; `None` if no BAR begins there.
    pub fn base(&self, index: BarIndex) -> Option<u64> {
        let n = u16::from(index.get());
        match self.register(n) {
            (Register::Low(BarKind::Memory32 { .. }), low) => Some(u64::from(low)),
            (Register::Low(BarKind::Memory64 { .. }), low) => {
                Some(u64::from(self.register(n + 1).1) << 32 | u64::from(low))
            }
            _ => None,
        }
    }

    /// The bytes that BAR `index` takes per function: the larger of its size and the granule.
    pub fn aperture(&self, index: BarIndex) -> Option<u64> {
        self.kind(index).map(|kind| self.spacing(kind))
    }

    /// Appends a window for each BAR: `count` consecutive slices of its aperture. A BAR whose slices would pass the end
    /// of its address space decodes nothing.
    pub fn windows(&self, count: u16, id: fn(BarIndex) -> WindowId, out: &mut Vec<Window>) {
        out.extend(self.iter().filter_map(|(index, kind)| {
            let base = self.base(index)?;
            let len = self.aperture(index)?.checked_mul(u64::from(count)).filter(|len| *len > 0)?;
            let end = base.checked_add(len)?;
            let decodes = matches!(kind, BarKind::Memory64 { .. }) || end <= 1 << 32;
            decodes.then_some(Window { id: id(index), base, len, kind: kind.memory() })
        }));
    }

    /// Makes every BAR take at least `granule` bytes, a power of two. Addresses keep the bits that remain writable.
    pub fn set_granule(&mut self, granule: u64) {
        self.granule = granule;
        for n in 0..6 {
            let (register, old) = self.register(n);
            let writable = self.writable(register);
            if let Some(value) = self.values.get_mut(usize::from(n)) {
                *value = old & writable;
            }
        }
    }

    /// Clears all addresses.
    pub fn reset(&mut self) {
        self.values = [0; 6];
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the caller wants the lower half")]
const fn lower(value: u64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(n: u8) -> BarIndex {
        BarIndex::new(n).unwrap()
    }

    fn set(bars: &[(u8, BarKind)]) -> BarSet {
        BarSet::new(&bars.iter().map(|&(n, kind)| (index(n), kind)).collect::<Vec<_>>()).unwrap()
    }

    const PAIR: BarKind = BarKind::Memory64 { size: 0x2000, prefetchable: true };

    /// G11: sizing.
    #[test]
    fn sizing_reads_back_the_size_and_the_type() {
        let mut bars = set(&[(0, BarKind::Memory32 { size: 0x1000 }), (2, PAIR)]);
        for n in 0..6 {
            bars.write(n, DwordWrite::full(u32::MAX));
        }
        let read: Vec<_> = (0..6).map(|n| bars.read(n)).collect();
        assert_eq!(read, [0xffff_f000, 0, 0xffff_e00c, 0xffff_ffff, 0, 0]);
    }

    /// G12: the upper half of a 64-bit BAR.
    #[test]
    fn the_upper_half_is_a_full_register() {
        let mut bars = set(&[(2, PAIR)]);
        bars.write(3, DwordWrite::full(0x8000_0001));
        bars.write(2, DwordWrite::full(0x4567_8fff));
        assert_eq!(bars.base(index(2)), Some(0x8000_0001_4567_8000));
        assert_eq!(bars.base(index(3)), None);
    }

    #[test]
    fn a_bar_of_4_gib_and_more_has_read_only_bits_in_the_upper_half() {
        let mut bars = set(&[(0, BarKind::Memory64 { size: 1 << 34, prefetchable: false })]);
        bars.write(0, DwordWrite::full(u32::MAX));
        bars.write(1, DwordWrite::full(u32::MAX));
        assert_eq!((bars.read(0), bars.read(1)), (0x4, 0xffff_fffc));
    }

    #[test]
    fn a_window_ends_where_its_address_space_does() {
        let windows = |bars: &BarSet, count| {
            let mut out = Vec::new();
            bars.windows(count, WindowId::Bar, &mut out);
            out.iter().map(|window| (window.base, window.len)).collect::<Vec<_>>()
        };
        let mut bars = set(&[(0, BarKind::Memory32 { size: 0x1000 }), (2, PAIR)]);
        for n in [0, 2, 3] {
            bars.write(n, DwordWrite::full(u32::MAX));
        }
        // The BAR may have the last 4 KiB below 4 GiB, but a second slice does not fit.
        assert_eq!(windows(&bars, 1), [(0xffff_f000, 0x1000)]);
        assert_eq!(windows(&bars, 2), []);
        assert_eq!(windows(&bars, 0), []);
        bars.write(2, DwordWrite::full(0xffff_c000));
        assert_eq!(windows(&bars, 1), [(0xffff_f000, 0x1000), (0xffff_ffff_ffff_c000, 0x2000)]);
        assert_eq!(windows(&bars, 2), [], "the end of the address space is not an address");
        bars.reset();
        assert_eq!(windows(&bars, 3), [(0, 0x3000), (0, 0x6000)]);
    }

    #[test]
    fn a_window_keeps_the_kind_of_its_memory() {
        let plain = BarKind::Memory64 { size: 0x1000, prefetchable: false };
        let bars = set(&[(0, BarKind::Memory32 { size: 0x1000 }), (2, PAIR), (4, plain)]);
        let mut out = Vec::new();
        bars.windows(1, WindowId::VfBar, &mut out);
        let kinds: Vec<_> = out.iter().map(|window| window.kind).collect();
        let memory64 = |prefetchable| MemoryKind::Memory64 { prefetchable };
        assert_eq!(kinds, [MemoryKind::Memory32, memory64(true), memory64(false)]);
    }

    #[test]
    fn a_granule_above_the_size_is_the_aperture_and_the_mask() {
        let mut bars = set(&[(2, PAIR), (4, BarKind::Memory64 { size: 0x4_0000, prefetchable: true })]);
        bars.write(2, DwordWrite::full(0x1001_2000));
        bars.set_granule(0x1_0000);
        assert_eq!((bars.aperture(index(2)), bars.aperture(index(4))), (Some(0x1_0000), Some(0x4_0000)));
        assert_eq!(bars.read(2), 0x1001_000c);
        bars.write(2, DwordWrite::full(u32::MAX));
        assert_eq!(bars.read(2), 0xffff_000c);
    }

    /// B20: impossible BARs are an error when configured.
    #[test]
    fn impossible_bars_are_refused() {
        let new = |bars: &[(u8, BarKind)]| {
            BarSet::new(&bars.iter().map(|&(n, kind)| (index(n), kind)).collect::<Vec<_>>()).unwrap_err()
        };
        assert_eq!(new(&[(5, PAIR)]), BarError::Register { index: index(5) });
        assert_eq!(new(&[(2, PAIR), (3, BarKind::Memory32 { size: 128 })]), BarError::Register { index: index(3) });
        assert_eq!(new(&[(0, BarKind::Memory32 { size: 192 })]), BarError::Size { index: index(0), size: 192 });
        let too_small = new(&[(0, BarKind::Memory32 { size: 64 })]);
        assert_eq!(too_small.to_string(), "BAR 0: 64 bytes is not a power of two of at least 128");
    }
}
