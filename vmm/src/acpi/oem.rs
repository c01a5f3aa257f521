//! Who made the tables, as the header of each says.

/// Who made the tables.
pub(crate) const OEM_ID: [u8; 6] = *b"SRIOV ";
/// Which tables they are.
pub(crate) const OEM_TABLE: [u8; 8] = *b"SRIOVVMM";
/// Their revision.
pub(crate) const OEM_REVISION: u32 = 1;
