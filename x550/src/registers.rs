//! Storage of the PF's registers.

use crate::Mac;
use crate::map::{self, DWORDS, rows};
use crate::spec;

/// The values of all registers that have a row in the map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registers {
    values: Box<[u32]>,
}

/// The offset at which a register with two places is stored.
fn canonical(offset: u32) -> u32 {
    let queue = |first: u32, register: u32| spec::receive::LOW + (offset - first) / 4 * spec::QUEUE_LEN + register;
    match offset {
        0x5400..0x5480 => offset - spec::RAL_LOW + spec::RAL,
        0x5480..0x54c0 => offset - spec::PSRTYPE_LOW + spec::PSRTYPE,
        0x2100..0x2140 => queue(spec::receive::SRRCTL_LOW, spec::receive::SRRCTL),
        0x6000..0x6400 if offset % spec::QUEUE_LEN == spec::transmit::QPTC_LOW => {
            spec::QPTC + (offset - spec::transmit::FIRST) / spec::QUEUE_LEN * 4
        }
        0x2200..0x2240 => queue(spec::receive::DCA_RXCTRL_LOW, spec::receive::DCA_RXCTRL),
        _ => offset,
    }
}

impl Registers {
    /// The state after a reset, with a link that is down.
    pub(crate) fn new(mac: Mac) -> Self {
        let mut this = Self { values: vec![0; DWORDS].into() };
        for row in rows().filter(|row| row.reset != 0) {
            for n in 0..row.count {
                this.set(row.first + n * row.stride, row.reset);
            }
        }
        let (low, high) = mac.to_registers();
        this.set(spec::RAL, low);
        this.set(spec::RAL + 4, high | spec::RAH_AV);
        this
    }

    fn slot(&mut self, offset: u32) -> Option<&mut u32> {
        usize::try_from(offset / 4).ok().and_then(|dword| self.values.get_mut(dword))
    }

    /// The register at `offset`; 0 where there is none.
    pub(crate) fn get(&self, offset: u32) -> u32 {
        let dword = usize::try_from(canonical(offset) / 4).ok();
        dword.and_then(|dword| self.values.get(dword)).copied().unwrap_or(0)
    }

    /// The pair of registers at `offset`, the lower half first.
    pub(crate) fn pair(&self, offset: u32) -> u64 {
        u64::from(self.get(offset)) | u64::from(self.get(offset + 4)) << 32
    }

    /// Sets a register as the NIC does, without a mask.
    pub(crate) fn set(&mut self, offset: u32, value: u32) {
        if let Some(slot) = self.slot(canonical(offset)) {
            *slot = value;
        }
    }

    /// Writes a register as software does. Returns true if it changed.
    pub(crate) fn write(&mut self, offset: u32, value: u32) -> bool {
        let offset = canonical(offset);
        let Some(writable) = map::row(offset).map(|row| row.writable) else { return false };
        let Some(slot) = self.slot(offset) else { return false };
        let new = *slot & !writable | value & writable;
        let changed = *slot != new;
        *slot = new;
        changed
    }

    /// Clears a register that a read clears.
    pub(crate) fn after_read(&mut self, offset: u32) {
        if map::row(canonical(offset)).is_some_and(|row| row.clears) {
            self.set(offset, 0);
        }
    }

    /// Sets the registers from `first` to before `first + len` to their values after a reset.
    pub(crate) fn reset_range(&mut self, first: u32, len: u32) {
        for offset in (first..first.saturating_add(len)).step_by(4) {
            if let Some(row) = map::row(offset).filter(|row| !row.counts) {
                self.set(offset, row.reset);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    #[test]
    fn a_register_with_two_places_is_one_register() {
        let mut registers = Registers::new(MAC);
        for (low, high) in [
            (0x5408, 0xa208),
            (0x547c, 0xa27c),
            (0x5484, 0xea04),
            (0x2104, 0x1054),
            (0x213c, 0x1000 + 15 * 0x40 + 0x14),
            (0x2204, 0x104c),
        ] {
            assert!(registers.write(low, 0x103), "{low:#x}");
            assert_eq!((registers.get(low), registers.get(high)), (0x103, 0x103), "{low:#x}");
            assert!(registers.write(high, 0x202), "{high:#x}");
            assert_eq!(registers.get(low), 0x202, "{low:#x}");
        }
        assert_eq!(registers.get(0xa204), 0x8000_0100, "the permanent address");
    }

    /// X2: bits that software can write.
    #[test]
    fn software_writes_the_bits_of_the_mask() {
        for row in rows() {
            for offset in [row.first, row.first + (row.count - 1) * row.stride] {
                for pattern in [u32::MAX, 0x5a5a_5a5a, 0xa5a5_a5a5, 0] {
                    let mut registers = Registers::new(MAC);
                    let before = registers.get(offset);
                    registers.write(offset, pattern);
                    let expected = before & !row.writable | pattern & row.writable;
                    assert_eq!(registers.get(offset), expected, "{} at {offset:#x}", row.name);
                }
            }
        }
    }

    #[test]
    fn an_offset_without_a_row_stores_nothing() {
        let mut registers = Registers::new(MAC);
        for offset in [0x4, 0x10, 0x30, 0x5900, 0x1fffc, 0x20000, u32::MAX - 3] {
            assert!(!registers.write(offset, u32::MAX));
            assert_eq!(registers.get(offset), 0, "{offset:#x}");
        }
    }
}
