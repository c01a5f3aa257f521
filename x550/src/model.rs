//! The product that a NIC is. An X540 is an X550 with few differences: its identity, its PHY, the way to its flash, and
//! RSS that all pools share.

use std::fmt;

use crate::spec;

/// The product that a NIC is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Model {
    /// X550-T2: PF 8086:1563, VFs 8086:1565.
    #[default]
    X550,
    /// X540-T2: PF 8086:1528, VFs 8086:1515.
    X540,
}

impl fmt::Display for Model {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::X550 => "X550",
            Self::X540 => "X540",
        })
    }
}

impl Model {
    /// The device IDs of the PF and of its VFs.
    pub const fn devices(self) -> [u16; 2] {
        match self {
            Self::X550 => [0x1563, 0x1565],
            Self::X540 => [0x1528, 0x1515],
        }
    }

    /// The second half of the PHY's identifier.
    pub(crate) const fn phy(self) -> u16 {
        match self {
            Self::X550 => 0x0221,
            Self::X540 => 0x0200,
        }
    }

    /// EEC.EE_SIZE: the power of two of the flash's words, less 6. Drivers count the words in 16 bits. Those that EERD
    /// of an X540 can address are 16 K.
    pub(crate) const fn flash_size(self) -> u32 {
        match self {
            Self::X550 => 9,
            Self::X540 => 8,
        }
    }

    /// The last word that the flash's checksum covers.
    pub(crate) const fn last_checked_word(self) -> u16 {
        match self {
            Self::X550 => 0x41,
            Self::X540 => 0x3e,
        }
    }

    /// True if each pool may have its own RSS key, types and table.
    pub(crate) const fn has_pool_rss(self) -> bool {
        matches!(self, Self::X550)
    }

    /// True if the product has no register at `offset` although the other one does.
    pub(crate) const fn lacks(self, offset: u32) -> bool {
        match self {
            Self::X550 => matches!(offset, spec::EERD | spec::EEWR),
            Self::X540 => {
                matches!(offset, spec::FDIRSCTPM | 0x3400..0x3500 | 0xee80..0xf000 | 0x1_8000..0x1_a000)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_has_its_name_and_devices() {
        assert_eq!([Model::X550, Model::X540].map(|model| model.to_string()), ["X550", "X540"]);
        assert_eq!((Model::X550.devices(), Model::X540.devices()), ([0x1563, 0x1565], [0x1528, 0x1515]));
        assert_eq!(Model::default(), Model::X550);
    }

    #[test]
    fn registers_of_one_model_are_not_the_other_models() {
        for (offset, x550, x540) in [
            (spec::EERD, false, true),
            (spec::EEWR, false, true),
            (spec::FDIRSCTPM, true, false),
            (spec::PFVFMRQC, true, false),
            (spec::PFVFMRQC + 4 * 63, true, false),
            (spec::PFVFRSSRK, true, false),
            (spec::PFVFRETA + 0xffc, true, false),
            (spec::ERETA, true, false),
            (spec::RETA, true, true),
            (spec::EEC, true, true),
        ] {
            assert_eq!((!Model::X550.lacks(offset), !Model::X540.lacks(offset)), (x550, x540), "{offset:#x}");
        }
    }
}
