//! Maker of the tables, as each header names it.

/// Maker of the tables.
pub(crate) const OEM_ID: [u8; 6] = *b"SRIOV ";
/// Name of the set of tables.
pub(crate) const OEM_TABLE: [u8; 8] = *b"SRIOVVMM";
/// Their revision.
pub(crate) const OEM_REVISION: u32 = 1;
