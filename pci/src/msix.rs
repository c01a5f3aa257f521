//! MSI-X: the capability, its table and its pending bits (`PCIe 6.2 §7.7.2`).

use std::fmt;

use crate::spec::{capability_id, msix};
use crate::{Access, BarIndex, BarSet, Dword, DwordWrite, Effects, Refused};

/// Layout of MSI-X in a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixShape {
    /// The number of vectors, 1 to 2048.
    pub vectors: u16,
    /// The BAR that holds the table, and the table's offset in it, a multiple of 8.
    pub table: (BarIndex, u32),
    /// The BAR that holds the pending bits, and their offset in it, a multiple of 8.
    pub pba: (BarIndex, u32),
}

impl MsixShape {
    /// Bytes of the table.
    pub fn table_len(&self) -> u64 {
        u64::from(self.vectors) * msix::ENTRY_LEN
    }

    /// Bytes of the pending bits: a multiple of 8.
    pub fn pba_len(&self) -> u64 {
        u64::from(self.vectors).div_ceil(64) * 8
    }
}

/// The two structures of MSI-X in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MsixStructure {
    /// The table.
    Table,
    /// The pending bits (PBA).
    PendingBits,
}

impl fmt::Display for MsixStructure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Table => "MSI-X table",
            Self::PendingBits => "MSI-X PBA",
        })
    }
}

/// Reason why MSI-X is impossible in a function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MsixError {
    /// The number of vectors is 0, or above 2048.
    #[error("{0} MSI-X vectors; there must be 1 to 2048")]
    Vectors(u16),
    /// A structure is in a BAR that does not exist.
    #[error("{structure}: there is no BAR {bar}")]
    NoBar {
        /// The structure.
        structure: MsixStructure,
        /// The BAR of the structure.
        bar: BarIndex,
    },
    /// The offset of a structure is not a multiple of 8.
    #[error("{structure}: offset {offset:#x} is not a multiple of 8")]
    Unaligned {
        /// The structure.
        structure: MsixStructure,
        /// Offset in the BAR, in bytes.
        offset: u32,
    },
    /// A structure passes the end of its BAR.
    #[error("{structure}: {len:#x} bytes at offset {offset:#x} pass the end of BAR {bar}, {size:#x} bytes")]
    PastEnd {
        /// The structure.
        structure: MsixStructure,
        /// BAR that the structure is in.
        bar: BarIndex,
        /// Offset in the BAR, in bytes.
        offset: u32,
        /// Length in bytes.
        len: u64,
        /// The size of the BAR in bytes.
        size: u64,
    },
    /// Table and pending bits overlap.
    #[error("MSI-X table and PBA overlap in BAR {bar}")]
    Overlap {
        /// Their BAR.
        bar: BarIndex,
    },
}

impl MsixShape {
    /// Checks that it fits a function with these BARs, or a VF with these VF BARs.
    pub(crate) fn check(&self, bars: &BarSet) -> Result<(), MsixError> {
        if self.vectors == 0 || self.vectors > msix::MAX_VECTORS {
            return Err(MsixError::Vectors(self.vectors));
        }
        let (table, pba) = (self.table_len(), self.pba_len());
        check_place(bars, MsixStructure::Table, self.table, table)?;
        check_place(bars, MsixStructure::PendingBits, self.pba, pba)?;
        let (table_at, pba_at) = (u64::from(self.table.1), u64::from(self.pba.1));
        if self.table.0 == self.pba.0 && table_at < pba_at + pba && pba_at < table_at + table {
            return Err(MsixError::Overlap { bar: self.table.0 });
        }
        Ok(())
    }
}

fn check_place(
    bars: &BarSet,
    structure: MsixStructure,
    (bar, offset): (BarIndex, u32),
    len: u64,
) -> Result<(), MsixError> {
    let size = bars.kind(bar).ok_or(MsixError::NoBar { structure, bar })?.size();
    if !offset.is_multiple_of(8) {
        return Err(MsixError::Unaligned { structure, offset });
    }
    if u64::from(offset) + len > size {
        return Err(MsixError::PastEnd { structure, bar, offset, len, size });
    }
    Ok(())
}

/// Table entry: Message Address, Message Upper Address, Message Data, Vector Control.
type Entry = [u32; 4];

const ENTRY_RESET: Entry = [0, 0, 0, msix::VECTOR_MASK];

/// The implemented bits of each dword of an entry: the address is dword aligned, and Vector Control has only the mask
/// bit.
const ENTRY_WRITABLE: Entry = [!0b11, u32::MAX, u32::MAX, msix::VECTOR_MASK];

/// The registers of the capability, and its table.
///
/// Pending bits are not state of this crate. The device tracks which masked vectors it tried to signal, and passes that
/// to [`Self::pba_read`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Msix {
    shape: MsixShape,
    control: u16,
    table: Box<[Entry]>,
}

impl Msix {
    /// Creates MSI-X disabled, with all vectors masked, in a function with these BARs. For a VF, these are the VF BARs
    /// of its PF.
    ///
    /// # Errors
    ///
    /// Fails if the number of vectors, or the location of a structure, is invalid.
    pub fn new(shape: MsixShape, bars: &BarSet) -> Result<Self, MsixError> {
        shape.check(bars)?;
        Ok(Self { shape, control: 0, table: vec![ENTRY_RESET; usize::from(shape.vectors)].into() })
    }

    /// Layout of the two structures.
    pub fn shape(&self) -> &MsixShape {
        &self.shape
    }

    /// The number of vectors.
    pub fn vectors(&self) -> u16 {
        self.shape.vectors
    }

    /// True if MSI-X Enable is set.
    pub fn enabled(&self) -> bool {
        self.control & msix::ENABLE != 0
    }

    fn may_send(&self) -> bool {
        self.control & (msix::ENABLE | msix::FUNCTION_MASK) == msix::ENABLE
    }

    /// The address and data of `vector`, if MSI-X is enabled and neither the vector nor the function is masked.
    pub fn message(&self, vector: u16) -> Option<(u64, u32)> {
        match self.table.get(usize::from(vector)) {
            Some(&[low, high, data, control]) if self.may_send() && control & msix::VECTOR_MASK == 0 => {
                Some((u64::from(high) << 32 | u64::from(low), data))
            }
            _ => None,
        }
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        let place = |(bar, offset): (BarIndex, u32)| offset & !0b111 | u32::from(bar.get());
        match reg.offset() {
            msix::CONTROL => {
                let control = self.control | self.shape.vectors.saturating_sub(1);
                u32::from(capability_id::MSIX) | u32::from(control) << 16
            }
            msix::TABLE => place(self.shape.table),
            msix::PBA => place(self.shape.pba),
            _ => 0,
        }
    }

    /// Writes the dword at `reg`.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        if reg.offset() != msix::CONTROL {
            return Effects::NONE;
        }
        let writable = u32::from(msix::ENABLE | msix::FUNCTION_MASK) << 16;
        let [_, _, low, high] = write.apply(u32::from(self.control) << 16, writable).to_le_bytes();
        let new = u16::from_le_bytes([low, high]);
        let messages = new != self.control;
        self.control = new;
        Effects { messages, ..Effects::NONE }
    }

    fn table_dword(&self, offset: u64) -> u32 {
        let entry = usize::try_from(offset / msix::ENTRY_LEN).ok().and_then(|n| self.table.get(n));
        let dword = usize::try_from(offset % msix::ENTRY_LEN / 4).ok();
        entry.zip(dword).and_then(|(entry, dword)| entry.get(dword)).copied().unwrap_or(0)
    }

    /// Reads `data.len()` bytes of the table at `offset`; bytes beyond it read 0.
    pub fn table_read(&self, offset: u64, data: &mut [u8]) {
        read_dwords(offset, data, |offset| self.table_dword(offset));
    }

    /// Writes `data` to the table at `offset`. Software must write aligned dwords or qwords (`§7.7.2`). As in hardware,
    /// a qword is two dwords, at any multiple of 4; other widths and offsets are refused.
    pub fn table_write(&mut self, offset: u64, data: &[u8]) -> Effects {
        if !matches!(data.len(), 4 | 8) || !offset.is_multiple_of(4) {
            return Effects::refused(Refused::MsixTable { offset, len: data.len() });
        }
        let mut changed = false;
        for (dword, value) in (0..).zip(data.chunks_exact(4)) {
            let offset = offset.saturating_add(4 * dword);
            let value = value.try_into().map_or(0, u32::from_le_bytes);
            let entry = usize::try_from(offset / msix::ENTRY_LEN).ok().and_then(|n| self.table.get_mut(n));
            let dword = usize::try_from(offset % msix::ENTRY_LEN / 4).unwrap_or(0);
            let slot = entry.and_then(|entry| entry.get_mut(dword));
            if let (Some(slot), Some(&writable)) = (slot, ENTRY_WRITABLE.get(dword)) {
                let new = DwordWrite::full(value).apply(*slot, writable);
                changed |= *slot != new;
                *slot = new;
            }
        }
        // Linux fills the table while the function is masked; until it is done, no change needs to be reported.
        Effects { messages: changed && self.may_send(), ..Effects::NONE }
    }

    /// Reads `data.len()` bytes of the pending bits at `offset`; `pending` returns each vector's bit.
    pub fn pba_read(&self, offset: u64, data: &mut [u8], pending: impl Fn(u16) -> bool) {
        read_dwords(offset, data, |offset| {
            (0..32).fold(0, |dword, bit| {
                let vector = offset.checked_mul(8).and_then(|first| u16::try_from(first + bit).ok());
                let set = vector.is_some_and(|vector| vector < self.shape.vectors && pending(vector));
                dword | u32::from(set) << bit
            })
        });
    }

    /// Returns to the power-on state.
    pub fn reset(&mut self) {
        let Self { shape: _, control, table } = self;
        *control = 0;
        table.fill(ENTRY_RESET);
    }
}

/// Reads bytes of an array of dwords, within one dword or as whole dwords; other reads return all-ones.
fn read_dwords(offset: u64, data: &mut [u8], dword: impl Fn(u64) -> u32) {
    if offset.is_multiple_of(4) && data.len().is_multiple_of(4) {
        for (n, data) in (0..).zip(data.chunks_exact_mut(4)) {
            data.copy_from_slice(&dword(offset.saturating_add(4 * n)).to_le_bytes());
        }
        return;
    }
    match Access::decode(offset & 3, data.len()) {
        Some(access) => access.extract(dword(offset & !3), data),
        None => data.fill(0xff),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BarKind;

    const CONTROL: Dword = Dword::containing(0);
    const BAR: BarIndex = BarIndex::ALL[4];
    const SHAPE: MsixShape = MsixShape { vectors: 3, table: (BAR, 0), pba: (BAR, 0x800) };

    /// 4 KiB in BAR 4, and 128 bytes in BAR 0.
    fn bars() -> BarSet {
        let large = BarKind::Memory64 { size: 0x1000, prefetchable: true };
        BarSet::new(&[(BAR, large), (BarIndex::ALL[0], BarKind::Memory32 { size: 128 })]).unwrap()
    }

    fn msix() -> Msix {
        Msix::new(SHAPE, &bars()).unwrap()
    }

    fn refused(shape: MsixShape) -> String {
        Msix::new(shape, &bars()).unwrap_err().to_string()
    }

    /// B20: impossible numbers of vectors are an error when configured.
    #[test]
    fn numbers_of_vectors_that_msi_x_cannot_have_are_refused() {
        assert_eq!(refused(MsixShape { vectors: 0, ..SHAPE }), "0 MSI-X vectors; there must be 1 to 2048");
        assert_eq!(refused(MsixShape { vectors: 2049, ..SHAPE }), "2049 MSI-X vectors; there must be 1 to 2048");
    }

    /// G35, B20: table and pending bits lie within existing BARs.
    #[test]
    fn structures_outside_of_the_bars_are_refused() {
        // The upper half of BAR 4 is no BAR.
        for bar in [BarIndex::ALL[1], BarIndex::ALL[5]] {
            assert_eq!(refused(MsixShape { table: (bar, 0), ..SHAPE }), format!("MSI-X table: there is no BAR {bar}"));
            assert_eq!(refused(MsixShape { pba: (bar, 0), ..SHAPE }), format!("MSI-X PBA: there is no BAR {bar}"));
        }
        let table = MsixShape { table: (BAR, 0xfd8), ..SHAPE };
        assert_eq!(refused(table), "MSI-X table: 0x30 bytes at offset 0xfd8 pass the end of BAR 4, 0x1000 bytes");
        assert!(Msix::new(MsixShape { table: (BAR, 0xfd0), ..SHAPE }, &bars()).is_ok());
        let pba = MsixShape { pba: (BarIndex::ALL[0], 128), ..SHAPE };
        assert_eq!(refused(pba), "MSI-X PBA: 0x8 bytes at offset 0x80 pass the end of BAR 0, 0x80 bytes");
        assert!(Msix::new(MsixShape { pba: (BarIndex::ALL[0], 120), ..SHAPE }, &bars()).is_ok());
        assert!(refused(MsixShape { pba: (BAR, !7), ..SHAPE }).contains("pass the end"));
    }

    #[test]
    fn structures_at_odd_offsets_are_refused() {
        for offset in [1, 4, 0x7fc] {
            let error = refused(MsixShape { table: (BAR, offset), ..SHAPE });
            assert_eq!(error, format!("MSI-X table: offset {offset:#x} is not a multiple of 8"));
            assert!(refused(MsixShape { pba: (BAR, offset), ..SHAPE }).starts_with("MSI-X PBA: offset"));
        }
    }

    #[test]
    fn a_table_that_overlaps_its_pending_bits_is_refused() {
        let at = |table, pba| Msix::new(MsixShape { vectors: 3, table: (BAR, table), pba: (BAR, pba) }, &bars());
        assert_eq!(at(0, 0x28).unwrap_err().to_string(), "MSI-X table and PBA overlap in BAR 4");
        assert_eq!(at(0, 0).unwrap_err(), MsixError::Overlap { bar: BAR });
        assert_eq!(at(0x100, 0x100).unwrap_err(), MsixError::Overlap { bar: BAR });
        assert!(at(0, 0x30).is_ok() && at(8, 0).is_ok(), "next to each other");
        let apart = MsixShape { table: (BAR, 0), pba: (BarIndex::ALL[0], 0), ..SHAPE };
        assert!(Msix::new(apart, &bars()).is_ok(), "in two BARs");
    }

    fn enable(msix: &mut Msix, control: u16) -> Effects {
        msix.write(CONTROL, DwordWrite::new(u32::from(control) << 16, 0b1100))
    }

    #[test]
    fn the_capability_names_its_table() {
        let mut msix = msix();
        assert_eq!(msix.read(CONTROL), 0x0002_0011);
        let _ = msix.write(CONTROL, DwordWrite::full(u32::MAX));
        assert_eq!(msix.read(CONTROL), 0xc002_0011);
        assert_eq!(msix.read(Dword::containing(4)), 4);
        assert_eq!(msix.read(Dword::containing(8)), 0x804);
    }

    #[test]
    fn a_message_needs_enable_and_no_mask() {
        let mut msix = msix();
        let _ = msix.table_write(16, &[0x03, 0, 0xe0, 0xfe, 1, 0, 0, 0]);
        let _ = msix.table_write(24, &[0x41, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(msix.message(1), None);
        assert!(enable(&mut msix, 0xc000).messages);
        assert_eq!(msix.message(1), None);
        assert!(enable(&mut msix, 0x8000).messages);
        assert_eq!(msix.message(1), Some((0x1_fee0_0000, 0x41)));
        assert_eq!(msix.message(0), None);
        assert!(msix.table_write(28, &[1, 0, 0, 0]).messages);
        assert_eq!(msix.message(1), None);
        msix.reset();
        assert_eq!(msix, self::msix());
    }

    #[test]
    fn entries_written_under_the_function_mask_have_no_effect_yet() {
        let mut msix = msix();
        let _ = enable(&mut msix, 0xc000);
        assert!(msix.table_write(0, &[1; 8]).is_none());
        assert!(enable(&mut msix, 0xc000).is_none());
    }

    #[test]
    fn msix_tables_take_16_bytes_a_vector_and_pbas_8_per_64_vectors() {
        let bar = BarIndex::ALL[4];
        let lens = |vectors| {
            let shape = MsixShape { vectors, table: (bar, 0), pba: (bar, 0x8000) };
            (shape.table_len(), shape.pba_len())
        };
        assert_eq!([1, 64, 65, 2048].map(lens), [(16, 8), (0x400, 8), (0x410, 16), (0x8000, 0x100)]);
    }

    #[test]
    fn an_entry_holds_an_aligned_address_and_one_mask_bit() {
        let mut msix = msix();
        assert!(!msix.enabled());
        let _ = enable(&mut msix, 0x8000);
        assert!(msix.enabled());
        assert!(msix.table_write(0, &[0xff; 8]).messages);
        let _ = msix.table_write(8, &[0xff; 8]);
        let mut entry = [0; 16];
        msix.table_read(0, &mut entry);
        assert_eq!(entry, [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]);
        let mut behind = [0xaa; 4];
        msix.table_read(3 * 16, &mut behind);
        assert_eq!(behind, [0; 4], "there are three vectors");
        assert_eq!(msix.read(Dword::containing(12)), 0);
    }

    #[test]
    fn odd_table_accesses_are_harmless() {
        let mut msix = msix();
        for len in [0, 1, 2, 3, 4, 5, 8, 12, 16] {
            for offset in [0, 1, 2, 4, 8, 40, 44, 47, 48, 0x7fc, u64::MAX - 7, u64::MAX] {
                let effects = msix.table_write(offset, &vec![0xff; len]);
                let whole = matches!(len, 4 | 8) && offset % 4 == 0;
                let refused = (!whole).then_some(Refused::MsixTable { offset, len });
                assert_eq!((effects.is_none(), effects.refused), (true, refused));
                msix.table_read(offset, &mut vec![0; len]);
                msix.pba_read(offset, &mut vec![0; len], |_| true);
            }
        }
    }

    #[test]
    fn a_qword_is_two_dwords_at_any_multiple_of_4() {
        let (mut qword, mut dwords) = (msix(), msix());
        assert_eq!(qword.table_write(20, &[1, 2, 3, 4, 5, 6, 7, 8]).refused, None);
        let _ = dwords.table_write(20, &[1, 2, 3, 4]);
        let _ = dwords.table_write(24, &[5, 6, 7, 8]);
        assert_eq!(qword, dwords);
        assert_ne!(qword, msix());
    }

    #[test]
    fn pending_bits_are_those_of_the_vectors() {
        let mut data = [0; 8];
        msix().pba_read(0, &mut data, |vector| vector != 1);
        assert_eq!(data, [0b101, 0, 0, 0, 0, 0, 0, 0]);
        let mut byte = [0];
        msix().pba_read(0, &mut byte, |_| true);
        assert_eq!(byte, [0b111]);
    }
}
