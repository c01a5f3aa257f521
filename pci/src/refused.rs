//! Writes that a register refused.

use std::fmt;

/// The reason why a register refused a write, or a part of one. It has no other effect: it serves for logging, and for
/// finding a driver's mistake.
///
/// Writes to read-only and reserved bits are not reported: software makes them all the time.
///
/// ```
/// let refused = pci_sriov::Refused::VfEnable { num_vfs: 9, total_vfs: 8 };
/// assert_eq!(refused.to_string(), "VF Enable stays clear: NumVFs is 9, TotalVFs is 8");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// VF Enable was written 1 while NumVFs exceeds TotalVFs.
    VfEnable {
        /// NumVFs.
        num_vfs: u16,
        /// TotalVFs.
        total_vfs: u16,
    },
    /// VF Enable was written 1 while the host makes it fail
    /// ([`PfWithVfs::fail_enables`](crate::PfWithVfs::fail_enables)).
    FailingEnable,
    /// NumVFs was written while VF Enable is set (`PCIe 6.2 §9.3.3.7`).
    NumVfs {
        /// The written number of VFs.
        written: u16,
    },
    /// System Page Size was written while VF Enable is set (`§9.3.3.13`).
    SystemPageSizeLocked {
        /// The written value.
        written: u32,
    },
    /// The written System Page Size is not exactly one supported size.
    SystemPageSize {
        /// The written value.
        written: u32,
    },
    /// ARI Capable Hierarchy was written while VF Enable is set (`§9.3.3.3.5`).
    AriCapableHierarchy,
    /// The written PowerState is neither D0 nor D3hot (`§7.5.2.2`).
    PowerState {
        /// The written value, 1 or 2.
        written: u8,
    },
    /// The MSI-X table was written in units other than 4 or 8 bytes at a multiple of 4 (`§7.7.2`).
    MsixTable {
        /// The offset in the table.
        offset: u64,
        /// The number of bytes.
        len: usize,
    },
}

impl Refused {
    /// The register's name in the standard.
    pub const fn register(self) -> &'static str {
        match self {
            Self::VfEnable { .. } | Self::FailingEnable => "VF Enable",
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
            Self::FailingEnable => write!(f, "{register} stays clear: a fault that the host asked for"),
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
