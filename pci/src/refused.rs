//! Writes that a register refused.

use std::fmt;

/// A write, or a part of one, that a register did not take, and why. Nothing else follows from it: it is there to be
/// logged, and to find a driver's mistake.
///
/// Read-only and reserved bits are not reported: software writes them all the time.
///
/// ```
/// let refused = pci_sriov::Refused::VfEnable { num_vfs: 9, total_vfs: 8 };
/// assert_eq!(refused.to_string(), "VF Enable stays clear: NumVFs is 9, TotalVFs is 8");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// VF Enable was to be set while NumVFs exceeds TotalVFs.
    VfEnable {
        /// NumVFs.
        num_vfs: u16,
        /// TotalVFs.
        total_vfs: u16,
    },
    /// NumVFs was to be changed while VF Enable is set (`PCIe 6.2 §9.3.3.7`).
    NumVfs {
        /// The number of VFs that was written.
        written: u16,
    },
    /// System Page Size was to be changed while VF Enable is set (`§9.3.3.13`).
    SystemPageSizeLocked {
        /// Value that was written.
        written: u32,
    },
    /// System Page Size was to be something else than one supported size.
    SystemPageSize {
        /// Value that was written.
        written: u32,
    },
    /// ARI Capable Hierarchy was to be changed while VF Enable is set (`§9.3.3.3.5`).
    AriCapableHierarchy,
    /// PowerState was to be something else than D0 or D3hot (`§7.5.2.2`).
    PowerState {
        /// Value that was written, 1 or 2.
        written: u8,
    },
    /// The MSI-X table was written in other pieces than 4 or 8 bytes at a multiple of 4 (`§7.7.2`).
    MsixTable {
        /// The offset in the table.
        offset: u64,
        /// The number of bytes.
        len: usize,
    },
}

impl Refused {
    /// The register, as the standard names it.
    pub const fn register(self) -> &'static str {
        match self {
            Self::VfEnable { .. } => "VF Enable",
            Self::NumVfs { .. } => "NumVFs",
            Self::SystemPageSizeLocked { .. } | Self::SystemPageSize { .. } => "System Page Size",
            Self::AriCapableHierarchy => "ARI Capable Hierarchy",
            Self::PowerState { .. } => "PowerState",
            Self::MsixTable { .. } => "the MSI-X table",
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let register = self.register();
        match self {
            Self::VfEnable { num_vfs, total_vfs } => {
                write!(f, "{register} stays clear: NumVFs is {num_vfs}, TotalVFs is {total_vfs}")
            }
            Self::NumVfs { written } => write!(f, "{register} cannot become {written} while VF Enable is set"),
            Self::SystemPageSizeLocked { written } => {
                write!(f, "{register} cannot become {written:#x} while VF Enable is set")
            }
            Self::SystemPageSize { written } => {
                write!(f, "{register} cannot become {written:#x}: not one supported size")
            }
            Self::AriCapableHierarchy => write!(f, "{register} cannot change while VF Enable is set"),
            Self::PowerState { written } => write!(f, "{register} cannot become D{written}: only D0 and D3hot exist"),
            Self::MsixTable { offset, len } => {
                write!(f, "{register} takes 4 or 8 bytes at a multiple of 4, and not {len} bytes at {offset:#x}")
            }
        }
    }
}
