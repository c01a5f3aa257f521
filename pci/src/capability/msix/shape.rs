//! The places of MSI-X in a function's BARs.

use std::fmt;
use std::ops::Range;

use crate::spec::msix;
use crate::{BarIndex, BarSet};

/// Layout of MSI-X in a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixShape {
    /// The number of vectors, 1 to 2048.
    pub vectors: u16,
    /// The BAR that holds the table, and the table's offset in it: a multiple of 8 below 4 GiB.
    pub table: (BarIndex, u64),
    /// The BAR that holds the pending bits, and their offset in it: a multiple of 8 below 4 GiB.
    pub pba: (BarIndex, u64),
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

    /// The BAR that holds `structure`, and the offsets in it.
    pub fn range(&self, structure: MsixStructure) -> (BarIndex, Range<u64>) {
        let ((bar, start), len) = match structure {
            MsixStructure::Table => (self.table, self.table_len()),
            MsixStructure::PendingBits => (self.pba, self.pba_len()),
        };
        (bar, start..start.saturating_add(len))
    }

    /// The structure at `offset` of `bar`, and the offset in the structure.
    pub fn locate(&self, bar: BarIndex, offset: u64) -> Option<(MsixStructure, u64)> {
        MsixStructure::ALL.into_iter().find_map(|structure| {
            let (in_bar, range) = self.range(structure);
            (in_bar == bar && range.contains(&offset)).then(|| (structure, offset - range.start))
        })
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

impl MsixStructure {
    /// Both structures.
    pub const ALL: [Self; 2] = [Self::Table, Self::PendingBits];
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
        offset: u64,
    },
    /// The offset of a structure does not fit its register of 32 bits.
    #[error("{structure}: offset {offset:#x} does not fit 32 bits; put it below 4 GiB of its BAR")]
    Far {
        /// The structure.
        structure: MsixStructure,
        /// Offset in the BAR, in bytes.
        offset: u64,
    },
    /// A structure passes the end of its BAR.
    #[error("{structure}: {len:#x} bytes at offset {offset:#x} pass the end of BAR {bar}, {size:#x} bytes")]
    PastEnd {
        /// The structure.
        structure: MsixStructure,
        /// BAR that the structure is in.
        bar: BarIndex,
        /// Offset in the BAR, in bytes.
        offset: u64,
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
        let places = MsixStructure::ALL.map(|structure| (structure, self.range(structure)));
        for (structure, (bar, range)) in &places {
            check_place(bars, *structure, *bar, range)?;
        }
        let [(_, (table_bar, table)), (_, (pba_bar, pba))] = places;
        if table_bar == pba_bar && table.start < pba.end && pba.start < table.end {
            return Err(MsixError::Overlap { bar: table_bar });
        }
        Ok(())
    }
}

fn check_place(bars: &BarSet, structure: MsixStructure, bar: BarIndex, range: &Range<u64>) -> Result<(), MsixError> {
    let size = bars.kind(bar).ok_or(MsixError::NoBar { structure, bar })?.size();
    let offset = range.start;
    if offset % 8 != 0 {
        return Err(MsixError::Unaligned { structure, offset });
    }
    if offset > u64::from(u32::MAX) {
        return Err(MsixError::Far { structure, offset });
    }
    if range.end > size {
        return Err(MsixError::PastEnd { structure, bar, offset, len: range.end - offset, size });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BarKind, Msix};

    const BAR: BarIndex = BarIndex::ALL[4];
    const SHAPE: MsixShape = MsixShape { vectors: 3, table: (BAR, 0), pba: (BAR, 0x800) };

    /// 4 KiB in BAR 4, and 128 bytes in BAR 0.
    fn bars() -> BarSet {
        let large = BarKind::Memory64 { size: 0x1000, prefetchable: true };
        BarSet::new(&[(BAR, large), (BarIndex::ALL[0], BarKind::Memory32 { size: 128 })]).unwrap()
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
        assert!(refused(MsixShape { pba: (BAR, 0xffff_fff8), ..SHAPE }).contains("pass the end"));
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

    #[test]
    fn a_structure_past_4_gib_of_its_bar_is_refused() {
        let bars = BarSet::new(&[(BAR, BarKind::Memory64 { size: 1 << 33, prefetchable: true })]).unwrap();
        let at = |pba| Msix::new(MsixShape { pba: (BAR, pba), ..SHAPE }, &bars).map(drop);
        assert_eq!(at(0xffff_fff8), Ok(()));
        let structure = MsixStructure::PendingBits;
        assert_eq!(at(1 << 32), Err(MsixError::Far { structure, offset: 1 << 32 }));
        assert_eq!(at(!7), Err(MsixError::Far { structure, offset: !7 }));
    }

    #[test]
    fn an_offset_belongs_to_the_table_the_pba_or_neither() {
        let other = BarIndex::ALL[0];
        let located = [0, 0x2f, 0x30, 0x7ff, 0x800, 0x807, 0x808, u64::MAX].map(|offset| SHAPE.locate(BAR, offset));
        let (table, pba) = (MsixStructure::Table, MsixStructure::PendingBits);
        let expected = [Some((table, 0)), Some((table, 0x2f)), None, None, Some((pba, 0)), Some((pba, 7)), None, None];
        assert_eq!(located, expected);
        assert_eq!((SHAPE.locate(other, 0), SHAPE.locate(other, 0x800)), (None, None));
        let apart = MsixShape { pba: (other, 0), ..SHAPE };
        assert_eq!((apart.locate(other, 0), apart.locate(BAR, 0)), (Some((pba, 0)), Some((table, 0))));
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
}
