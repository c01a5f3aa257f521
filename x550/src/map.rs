//! The registers of the PF that are stored: their offsets, writable bits and values after a reset.
//!
//! An offset without a row reads 0 and drops writes, unless [`Nic`](crate::Nic) gives it a behaviour of its own. Where
//! the datasheet reserves single bits of a register that has no effect here, all bits are stored.

mod row;
mod statistics;

pub use row::Row;
use row::{counter, many, one, spaced};
use statistics::STATISTICS;

use crate::spec;

/// Offset from which on BAR 0 has no registers, in bytes.
pub(crate) const END: u32 = 0x2_0000;
/// Dwords below [`END`].
pub(crate) const DWORDS: usize = 0x8000;
/// All bits.
const ALL: u32 = u32::MAX;

const SRRCTL: u32 = 0x1fc0_3f1f;
const RXDCTL: u32 = 0x427f_ffff;
const TXDCTL: u32 = 0x027f_7f7f;
const RING_LENGTH: u32 = 0x000f_ff80;

const REGISTERS: &[Row] = &[
    // General control. RST and LRST clear by themselves.
    one("CTRL", 0x0, ALL & !(1 << 26 | 1 << 3), 0),
    one("CTRL_EXT", 0x18, ALL, 0),
    one("ESDP", 0x20, ALL, 0),
    one("I2CCTL", 0x28, ALL, 0),
    one("LEDCTL", 0x200, ALL, 0),
    // Interrupts; Interrupts has the others.
    many("EITR", 0x820, 24, 0x8ff8),
    one("EITRSEL", 0x894, ALL, 0),
    one("GPIE", 0x898, 0xc000_ffff, 0),
    many("IVAR", 0x900, 64, 0xbfbf_bfbf),
    one("IVAR_MISC", 0xa00, 0xbfbf, 0),
    many("EITR_24", 0x12300, 104, 0x8ff8),
    // Receive queues.
    spaced("RDBAL", 0x1000, 0x40, 64, !0x7f),
    spaced("RDBAH", 0x1004, 0x40, 64, ALL),
    spaced("RDLEN", 0x1008, 0x40, 64, RING_LENGTH),
    spaced("DCA_RXCTRL", 0x100c, 0x40, 64, ALL),
    spaced("RDH", 0x1010, 0x40, 64, 0xffff),
    spaced("SRRCTL", 0x1014, 0x40, 64, SRRCTL),
    spaced("RDT", 0x1018, 0x40, 64, 0xffff),
    spaced("RXDCTL", 0x1028, 0x40, 64, RXDCTL),
    spaced("RSCCTL", 0x102c, 0x40, 64, 0xd),
    spaced("RDBAL_64", 0xd000, 0x40, 64, !0x7f),
    spaced("RDBAH_64", 0xd004, 0x40, 64, ALL),
    spaced("RDLEN_64", 0xd008, 0x40, 64, RING_LENGTH),
    spaced("DCA_RXCTRL_64", 0xd00c, 0x40, 64, ALL),
    spaced("RDH_64", 0xd010, 0x40, 64, 0xffff),
    spaced("SRRCTL_64", 0xd014, 0x40, 64, SRRCTL),
    spaced("RDT_64", 0xd018, 0x40, 64, 0xffff),
    spaced("RXDCTL_64", 0xd028, 0x40, 64, RXDCTL),
    spaced("RSCCTL_64", 0xd02c, 0x40, 64, 0xd),
    // Transmit queues.
    spaced("TDBAL", 0x6000, 0x40, 128, !0x7f),
    spaced("TDBAH", 0x6004, 0x40, 128, ALL),
    spaced("TDLEN", 0x6008, 0x40, 128, RING_LENGTH),
    spaced("DCA_TXCTRL", 0x600c, 0x40, 128, ALL),
    spaced("TDH", 0x6010, 0x40, 128, 0xffff),
    spaced("TDT", 0x6018, 0x40, 128, 0xffff),
    spaced("TXDCTL", 0x6028, 0x40, 128, TXDCTL),
    spaced("TDWBAL", 0x6038, 0x40, 128, !2),
    spaced("TDWBAH", 0x603c, 0x40, 128, ALL),
    // Receive path. DMAIDONE is always set.
    many("RTRPT4C", 0x2140, 8, ALL),
    many("RQSMR", spec::RQSMR, 32, 0x0f0f_0f0f),
    one("RTRPCS", 0x2430, ALL, 0),
    one("RDRXCTL", 0x2f00, ALL & !(1 << 3), 1 << 3),
    one("RXCTRL", 0x3000, 1, 0),
    one("PFCTOP", 0x3008, ALL, 0),
    one("RTRUP2TC", 0x3020, ALL, 0),
    one("RSCDBU", 0x3028, ALL, 0),
    many("FCTTV", 0x3200, 4, ALL),
    many("FCRTL", 0x3220, 8, 0x8007_fff0),
    many("FCRTH", 0x3260, 8, 0x8007_fff0),
    one("FCRTV", 0x32a0, ALL, 0),
    many("PFVFMRQC", 0x3400, 64, ALL),
    one("RXPBSIZE", 0x3c00, 0x000f_fc00, 0x0006_0000),
    many("RXPBSIZE_1", 0x3c04, 7, 0x000f_fc00),
    one("FCCFG", 0x3d00, 0x18, 0),
    // MAC.
    one("PCS1GLCTL", 0x4208, ALL, 0),
    one("PCS1GANA", 0x4218, ALL, 0),
    one("HLREG0", 0x4240, ALL, 0),
    one("MHADD", 0x4268, 0xffff_0000, 0),
    one("MFLCN", 0x4294, 0xfff, 0),
    one("LINKS", 0x42a4, 0, 0),
    one("MMNGC", 0x42d0, 0, 0),
    one("MACC", 0x4330, ALL, 0),
    // Transmit path.
    one("RTTDCS", 0x4900, ALL, 0),
    one("RTTDQSEL", 0x4904, 0x7f, 0),
    many("RTTDT2C", 0x4910, 8, ALL),
    many("TXPBTHRESH", 0x4950, 8, 0x3ff),
    one("RTTBCNRM", 0x4980, ALL, 0),
    one("DMATXCTL", 0x4a80, ALL, 0),
    many("TQSM", spec::TQSM, 32, 0x0f0f_0f0f),
    one("RTTUP2TC", 0xc800, ALL, 0),
    many("TXPBSIZE", 0xcc00, 8, 0x000f_fc00),
    one("RTTPCS", 0xcd00, ALL, 0),
    many("RTTPT2C", 0xcd20, 8, ALL),
    // Filters.
    one("RXCSUM", 0x5000, 0x3000, 0),
    one("RFCTL", 0x5008, ALL, 0),
    one("FCTRL", 0x5080, 0xf702, 0),
    one("VLNCTRL", 0x5088, 0x7000_ffff, 0x8100),
    one("MCSTCTRL", 0x5090, 0x7, 0),
    many("PFFLP", 0x50b0, 2, ALL),
    one("RXMTRL", 0x5120, ALL, 0),
    many("ETQF", 0x5128, 8, ALL),
    many("VMTXSW", 0x5180, 2, ALL),
    one("TSYNCRXCTL", 0x5188, 0x1e, 0),
    one("RXSTMPH", 0x51a4, 0, 0),
    one("VT_CTL", 0x51b0, 0x6000_1f81, 0),
    many("VFRE", 0x51e0, 2, ALL),
    one("RXSTMPL", 0x51e8, 0, 0),
    many("MTA", 0x5200, 128, ALL),
    one("WUC", 0x5800, ALL, 0),
    one("WUFC", 0x5808, ALL, 0),
    one("WUS", 0x5810, 0, 0),
    one("MRQC", 0x5818, ALL, 0),
    many("RETA", 0x5c00, 32, ALL),
    many("RSSRK", 0x5c80, 10, ALL),
    many("VFTA", 0xa000, 128, ALL),
    spaced("RAL", 0xa200, 8, 128, ALL),
    spaced("RAH", 0xa204, 8, 128, 0x8000_ffff),
    many("MPSAR", 0xa600, 256, ALL),
    many("PSRTYPE", 0xea00, 64, ALL),
    many("ETQS", 0xec00, 8, ALL),
    one("SYNQF", 0xec30, ALL, 0),
    one("RQTC", 0xec70, ALL, 0),
    many("ERETA", 0xee80, 96, ALL),
    // Flow director: initialized at once, and commands end at once.
    one("FDIRCTRL", 0xee00, ALL & !(1 << 3), 1 << 3),
    many("FDIRSIPV6", 0xee0c, 3, ALL),
    one("FDIRIPSA", 0xee18, ALL, 0),
    one("FDIRIPDA", 0xee1c, ALL, 0),
    one("FDIRPORT", 0xee20, ALL, 0),
    one("FDIRVLAN", 0xee24, ALL, 0),
    one("FDIRHASH", 0xee28, ALL, 0),
    one("FDIRCMD", 0xee2c, ALL & !3, 0),
    one("FDIRFREE", 0xee38, 0, 0),
    one("FDIRDIP4M", 0xee3c, ALL, 0),
    one("FDIRSIP4M", 0xee40, ALL, 0),
    one("FDIRTCPM", 0xee44, ALL, 0),
    one("FDIRUDPM", 0xee48, ALL, 0),
    one("FDIRHKEY", 0xee68, ALL, 0),
    one("FDIRSKEY", 0xee6c, ALL, 0),
    one("FDIRM", 0xee70, ALL, 0),
    one("FDIRIP6M", 0xee74, ALL, 0),
    one("FDIRSCTPM", 0xee78, ALL, 0),
    // Virtualization.
    many("VMVIR", 0x8000, 64, 0xc000_ffff),
    many("VFTE", 0x8110, 2, ALL),
    one("MTQC", 0x8120, 0xf, 0),
    many("PFVFSPOOF", 0x8200, 8, 0x00ff_ffff),
    one("PFDTXGSWC", 0x8220, 1, 0),
    many("VMECM", 0x8790, 2, ALL),
    many("VMOLR", 0xf000, 64, 0x1fc0_0000),
    many("VLVF", 0xf100, 64, 0x8000_0fff),
    many("VLVFB", 0xf200, 128, ALL),
    many("UTA", 0xf400, 128, ALL),
    many("MRCTL", 0xf600, 4, 0x3f0f),
    many("VMRVLAN", 0xf610, 8, ALL),
    many("VMRVM", 0xf630, 8, ALL),
    many("PFVFRSSRK", 0x18000, 1024, ALL),
    many("PFVFRETA", 0x19000, 1024, ALL),
    // Security is fused off: the paths are ready.
    one("SECTXCTRL", 0x8800, ALL, 0),
    one("SECTXSTAT", 0x8804, 0, 3),
    one("SECTXBUFFAF", 0x8808, ALL, 0),
    one("SECTXMINIFG", 0x8810, ALL, 0),
    one("SECRXCTRL", 0x8d00, ALL, 0),
    one("SECRXSTAT", 0x8d04, 0, 3),
    // Time stamps; the clock does not run.
    one("TSYNCTXCTL", 0x8c00, 0x10, 0),
    one("TXSTMPL", 0x8c04, 0, 0),
    one("TXSTMPH", 0x8c08, 0, 0),
    one("SYSTIML", 0x8c0c, ALL, 0),
    one("SYSTIMH", 0x8c10, ALL, 0),
    one("TIMINCA", 0x8c14, ALL, 0),
    one("TSAUXC", 0x8c20, ALL, 0),
    one("SYSTIMR", 0x8c58, ALL, 0),
    one("TSIM", 0x8c68, ALL, 0),
    // Flash, firmware and bus. The flash is present, read and flushed; its size is the model's.
    // Those of an X540 alone hold what the last access of the flash returned.
    counter("EERD", spec::EERD, 4, 1),
    counter("EEWR", spec::EEWR, 4, 1),
    one("EEC", 0x10010, 0, 1 << 8 | 1 << 9 | 1 << 26),
    one("FWSM", 0x10148, 0, 1 << 15),
    one("FACTPS", 0x10150, 0, 0),
    one("SW_FW_SYNC", 0x10160, ALL, 0),
    one("GCR", 0x11000, ALL, 0),
    one("GCR_EXT", 0x11050, ALL, 0),
];

/// All rows, in no order.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    REGISTERS.iter().chain(STATISTICS)
}

/// Number of the row of each dword, counted from 1; 0 without one.
static INDEX: [u8; DWORDS] = index();

#[expect(clippy::indexing_slicing, reason = "evaluated by the compiler")]
const fn index() -> [u8; DWORDS] {
    let mut index = [0; DWORDS];
    let (mut row, mut number) = (0, 1u8);
    while row < REGISTERS.len() + STATISTICS.len() {
        let Row { first, stride, count, .. } =
            if row < REGISTERS.len() { REGISTERS[row] } else { STATISTICS[row - REGISTERS.len()] };
        let mut n = 0;
        while n < count {
            let dword = ((first + n * stride) / 4) as usize;
            assert!(index[dword] == 0, "two rows have the same register");
            index[dword] = number;
            n += 1;
        }
        row += 1;
        number += 1;
    }
    index
}

/// The row of the register at `offset`.
pub(crate) fn row(offset: u32) -> Option<&'static Row> {
    let number = INDEX.get(usize::try_from(offset / 4).ok()?)?;
    let row = usize::from(*number).checked_sub(1)?;
    REGISTERS.get(row).or_else(|| STATISTICS.get(row.checked_sub(REGISTERS.len())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u32) -> Option<&'static Row> {
        row(offset)
    }

    #[test]
    fn a_register_has_the_row_that_lists_it() {
        for row in rows() {
            for offset in (0..row.count).map(|n| row.first + n * row.stride) {
                assert_eq!(at(offset), Some(row), "{offset:#x}");
            }
        }
        assert_eq!([0x4, 0x4000 - 4, END, u32::MAX].map(at), [None; 4]);
    }

    #[test]
    fn names_are_unique_and_reset_values_need_no_write() {
        let mut names: Vec<_> = rows().map(|row| row.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(rows().all(|row| !row.clears || row.counts && row.writable == 0));
    }
}
