//! Offsets, identifiers and bit fields of configuration space, as in the standard.
//!
//! Section numbers are those of the PCI Express Base Specification 6.2.

/// Value of a read from a function that does not exist (`§2.3.2`, unsupported request).
pub const ALL_ONES: u32 = 0xffff_ffff;

/// Base class and sub-class of a host bridge.
pub const CLASS_HOST_BRIDGE: u32 = 0x0600;

/// The type 0 header (`§7.5.1`), byte offsets of its dwords.
pub mod header {
    /// Vendor ID 15:0, Device ID 31:16.
    pub const ID: u16 = 0x00;
    /// Command 15:0, Status 31:16.
    pub const COMMAND_STATUS: u16 = 0x04;
    /// Revision ID 7:0, Class Code 31:8.
    pub const CLASS_REVISION: u16 = 0x08;
    /// Cache Line Size 7:0, Latency Timer 15:8, Header Type 23:16, BIST 31:24.
    pub const CACHE_LINE_HEADER_TYPE: u16 = 0x0c;
    /// The first of six BARs.
    pub const BAR0: u16 = 0x10;
    /// The last of six BARs.
    pub const BAR5: u16 = 0x24;
    /// Subsystem Vendor ID 15:0, Subsystem ID 31:16.
    pub const SUBSYSTEM: u16 = 0x2c;
    /// Capabilities Pointer 7:0.
    pub const CAPABILITIES: u16 = 0x34;
    /// Interrupt Line 7:0, Interrupt Pin 15:8.
    pub const INTERRUPT: u16 = 0x3c;
    /// Lowest offset of a capability.
    pub const FIRST_CAPABILITY: u16 = 0x40;
    /// Offset of the first extended capability (`§7.6`).
    pub const FIRST_EXTENDED_CAPABILITY: u16 = 0x100;
}

/// The Command register (`§7.5.1.1.3`).
pub mod command {
    /// Memory Space Enable.
    pub const MEMORY_SPACE: u16 = 1 << 1;
    /// Bus Master Enable.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Parity Error Response.
    pub const PARITY_ERROR_RESPONSE: u16 = 1 << 6;
    /// SERR# Enable.
    pub const SERR: u16 = 1 << 8;
    /// Interrupt Disable.
    pub const INTERRUPT_DISABLE: u16 = 1 << 10;
}

/// The Status register (`§7.5.1.1.4`).
pub mod status {
    /// Interrupt Status: the function asserts its pin, or would if it were not disabled.
    pub const INTERRUPT: u16 = 1 << 3;
    /// Capabilities List.
    pub const CAPABILITIES_LIST: u16 = 1 << 4;
}

/// The low bits of a memory BAR (`§7.5.1.2.1`).
pub mod bar {
    /// The register and the next one together hold a 64-bit address.
    pub const MEMORY64: u32 = 0b10 << 1;
    /// Reads have no side effects.
    pub const PREFETCHABLE: u32 = 1 << 3;
}

/// Capability IDs (PCI Code and ID Assignment Specification §2).
pub mod capability_id {
    /// PCI Power Management.
    pub const POWER_MANAGEMENT: u8 = 0x01;
    /// Vital Product Data.
    pub const VPD: u8 = 0x03;
    /// Message Signaled Interrupts.
    pub const MSI: u8 = 0x05;
    /// Vendor specific; virtio's capabilities.
    pub const VENDOR: u8 = 0x09;
    /// PCI Express.
    pub const PCI_EXPRESS: u8 = 0x10;
    /// MSI-X.
    pub const MSIX: u8 = 0x11;
}

/// Extended capability IDs (PCI Code and ID Assignment Specification §3).
pub mod extended_capability_id {
    /// Advanced Error Reporting.
    pub const AER: u16 = 0x0001;
    /// Device Serial Number.
    pub const SERIAL_NUMBER: u16 = 0x0003;
    /// Vendor specific.
    pub const VENDOR: u16 = 0x000b;
    /// Access Control Services.
    pub const ACS: u16 = 0x000d;
    /// Alternative Routing-ID Interpretation.
    pub const ARI: u16 = 0x000e;
    /// Single Root I/O Virtualization.
    pub const SRIOV: u16 = 0x0010;
}

/// The PCI Express capability (`§7.5.3`), byte offsets from its start.
pub mod pcie {
    /// Capability header 15:0, PCI Express Capabilities 31:16.
    pub const CAPABILITIES: u16 = 0x00;
    /// Device Capabilities.
    pub const DEVICE_CAPABILITIES: u16 = 0x04;
    /// Device Control 15:0, Device Status 31:16.
    pub const DEVICE_CONTROL: u16 = 0x08;
    /// Link Capabilities.
    pub const LINK_CAPABILITIES: u16 = 0x0c;
    /// Link Control 15:0, Link Status 31:16.
    pub const LINK_CONTROL: u16 = 0x10;
    /// Device Capabilities 2.
    pub const DEVICE_CAPABILITIES_2: u16 = 0x24;
    /// Device Control 2 15:0, Device Status 2 31:16.
    pub const DEVICE_CONTROL_2: u16 = 0x28;
    /// Link Capabilities 2.
    pub const LINK_CAPABILITIES_2: u16 = 0x2c;
    /// Link Control 2 15:0, Link Status 2 31:16.
    pub const LINK_CONTROL_2: u16 = 0x30;
    /// Bytes of the capability, version 2.
    pub const LEN: u16 = 0x3c;
    /// Capability version 2, in the PCI Express Capabilities register.
    pub const VERSION_2: u16 = 2;
    /// Device/Port Type, PCI Express Endpoint, in the PCI Express Capabilities register.
    pub const TYPE_ENDPOINT: u16 = 0;
    /// Device/Port Type, Root Complex Integrated Endpoint, in the PCI Express Capabilities register.
    pub const TYPE_RC_INTEGRATED_ENDPOINT: u16 = 9 << 4;
    /// Role-Based Error Reporting, in Device Capabilities.
    pub const ROLE_BASED_ERROR_REPORTING: u32 = 1 << 15;
    /// Function Level Reset Capability, in Device Capabilities.
    pub const FLR_CAPABLE: u32 = 1 << 28;
    /// Initiate Function Level Reset, in Device Control; reads 0.
    pub const INITIATE_FLR: u32 = 1 << 15;
    /// Writable bits of Device Control besides Initiate FLR: error reporting enables 3:0, Enable Relaxed Ordering 4,
    /// Enable No Snoop 11, Max_Read_Request_Size 14:12. Max_Payload_Size 7:5 is always 128 bytes, the only size that
    /// Device Capabilities offers (`§7.5.3.4`).
    pub const DEVICE_CONTROL_RW: u32 = 0x781f;
    /// Device Control at power-on: relaxed ordering and no snoop enabled, 512 bytes maximum read request.
    pub const DEVICE_CONTROL_RESET: u32 = 0x2810;
    /// ASPM Optionality Compliance, in Link Capabilities; ASPM itself is not supported.
    pub const ASPM_OPTIONALITY_COMPLIANCE: u32 = 1 << 22;
    /// Writable bits of an Endpoint's Link Control: ASPM Control 1:0, Read Completion Boundary 3, Common Clock
    /// Configuration 6, Extended Synch 7. The rest belongs to ports, or to features that Link Capabilities does not
    /// offer (`§7.5.3.7`).
    pub const LINK_CONTROL_RW: u32 = 0x00cb;
    /// Completion Timeout Disable Supported, in Device Capabilities 2, and Completion Timeout Disable, in Device
    /// Control 2. Every Endpoint that issues requests has them.
    pub const COMPLETION_TIMEOUT_DISABLE: u32 = 1 << 4;
    /// 2.5 GT/s, in the Supported Link Speeds Vector of Link Capabilities 2.
    pub const SPEED_2_5: u32 = 1 << 1;
    /// 5.0 GT/s, in the Supported Link Speeds Vector of Link Capabilities 2.
    pub const SPEED_5_0: u32 = 1 << 2;
    /// Writable bits of Link Control 2 of an Endpoint with 5.0 GT/s: Target Link Speed 3:0, Enter Compliance 4,
    /// Transmit Margin 9:7, Enter Modified Compliance 10, Compliance SOS 11, Compliance Preset/De-emphasis 15:12. A
    /// link of 2.5 GT/s has none of them (`§7.5.3.19`).
    pub const LINK_CONTROL_2_RW: u32 = 0xff9f;
    /// Target Link Speed 5.0 GT/s, in Link Control 2.
    pub const TARGET_SPEED_5_0: u32 = 2;
}

/// The ARI extended capability (`§7.8.8`), byte offsets from its start.
pub mod ari {
    /// Extended capability header.
    pub const HEADER: u16 = 0x00;
    /// ARI Capability 15:0, with Next Function Number in 15:8, and ARI Control 31:16.
    pub const CAPABILITY_CONTROL: u16 = 0x04;
    /// Bytes of the capability.
    pub const LEN: u16 = 0x08;
}

/// The ACS extended capability (`§7.7.11`), byte offsets from its start.
pub mod acs {
    /// Extended capability header.
    pub const HEADER: u16 = 0x00;
    /// ACS Capability 15:0, ACS Control 31:16. 0 without peer-to-peer between functions.
    pub const CAPABILITY_CONTROL: u16 = 0x04;
    /// Bytes of the capability, without an Egress Control Vector.
    pub const LEN: u16 = 0x08;
}

/// The Advanced Error Reporting extended capability (`§7.8.4`), byte offsets from its start.
pub mod aer {
    /// Extended capability header.
    pub const HEADER: u16 = 0x00;
    /// Uncorrectable Error Mask.
    pub const UNCORRECTABLE_MASK: u16 = 0x08;
    /// Uncorrectable Error Severity.
    pub const UNCORRECTABLE_SEVERITY: u16 = 0x0c;
    /// Correctable Error Mask.
    pub const CORRECTABLE_MASK: u16 = 0x14;
    /// Bytes of the capability, without the registers of root ports and a TLP prefix log.
    pub const LEN: u16 = 0x2c;
    /// Errors of every Endpoint, in the registers for uncorrectable errors: Data Link Protocol 4, Poisoned TLP 12, Flow
    /// Control Protocol 13, Completion Timeout 14, Completer Abort 15, Unexpected Completion 16, Receiver Overflow 17,
    /// Malformed TLP 18, Unsupported Request 20.
    pub const UNCORRECTABLE: u32 = 0x0017_f010;
    /// Errors of the above that are fatal at power-on.
    pub const FATAL: u32 = 0x0006_2010;
    /// Errors of every Endpoint, in the registers for correctable errors: Receiver 0, Bad TLP 6, Bad DLLP 7, Replay Num
    /// Rollover 8, Replay Timer Timeout 12, Advisory Non-Fatal 13.
    pub const CORRECTABLE: u32 = 0x31c1;
    /// Advisory Non-Fatal Error, which is masked at power-on.
    pub const ADVISORY: u32 = 1 << 13;
}

/// The Device Serial Number extended capability (`§7.9.3`), byte offsets from its start.
pub mod serial {
    /// Extended capability header.
    pub const HEADER: u16 = 0x00;
    /// Lower dword of the number.
    pub const LOWER: u16 = 0x04;
    /// Upper dword of the number.
    pub const UPPER: u16 = 0x08;
    /// Bytes of the capability.
    pub const LEN: u16 = 0x0c;
}

/// The Power Management capability (`§7.5.2`), byte offsets from its start.
pub mod power {
    /// Capability header 15:0, Power Management Capabilities 31:16.
    pub const CAPABILITIES: u16 = 0x00;
    /// Power Management Control/Status.
    pub const CONTROL_STATUS: u16 = 0x04;
    /// Bytes of the capability.
    pub const LEN: u16 = 0x08;
    /// Version 3, in Power Management Capabilities.
    pub const VERSION_3: u16 = 3;
    /// PowerState, in Control/Status.
    pub const STATE: u32 = 0b11;
    /// D0, the value of PowerState.
    pub const D0: u32 = 0b00;
    /// D3hot, the value of PowerState.
    pub const D3_HOT: u32 = 0b11;
    /// No_Soft_Reset, in Control/Status.
    pub const NO_SOFT_RESET: u32 = 1 << 3;
}

/// The MSI-X capability (`§7.7.2`), byte offsets from its start, and its table.
pub mod msix {
    /// Capability header 15:0, Message Control 31:16.
    pub const CONTROL: u16 = 0x00;
    /// Table BIR 2:0, Table Offset 31:3.
    pub const TABLE: u16 = 0x04;
    /// PBA BIR 2:0, PBA Offset 31:3.
    pub const PBA: u16 = 0x08;
    /// Bytes of the capability.
    pub const LEN: u16 = 0x0c;
    /// Function Mask, in Message Control.
    pub const FUNCTION_MASK: u16 = 1 << 14;
    /// MSI-X Enable, in Message Control.
    pub const ENABLE: u16 = 1 << 15;
    /// The largest number of vectors.
    pub const MAX_VECTORS: u16 = 2048;
    /// Bytes of a table entry.
    pub const ENTRY_LEN: u64 = 16;
    /// Mask Bit, in an entry's Vector Control.
    pub const VECTOR_MASK: u32 = 1;
}

/// The SR-IOV extended capability (`§9.3.3`), byte offsets from its start.
///
/// | offset | bits 31:16 | bits 15:0 |
/// |---|---|---|
/// | 00 | next, version | 0x0010 |
/// | 04 | SR-IOV Capabilities | |
/// | 08 | SR-IOV Status | SR-IOV Control |
/// | 0c | TotalVFs | InitialVFs |
/// | 10 | Function Dependency Link (23:16) | NumVFs |
/// | 14 | VF Stride | First VF Offset |
/// | 18 | VF Device ID | reserved |
/// | 1c | Supported Page Sizes | |
/// | 20 | System Page Size | |
/// | 24-38 | VF BAR0-5 | |
/// | 3c | VF Migration State Array Offset | |
pub mod sriov {
    /// Extended capability header.
    pub const HEADER: u16 = 0x00;
    /// SR-IOV Capabilities (`§9.3.3.2`).
    pub const CAPABILITIES: u16 = 0x04;
    /// SR-IOV Control and Status (`§9.3.3.3`, `§9.3.3.4`).
    pub const CONTROL_STATUS: u16 = 0x08;
    /// InitialVFs and TotalVFs (`§9.3.3.5`, `§9.3.3.6`).
    pub const INITIAL_TOTAL_VFS: u16 = 0x0c;
    /// NumVFs and Function Dependency Link (`§9.3.3.7`, `§9.3.3.8`).
    pub const NUM_VFS_FDL: u16 = 0x10;
    /// First VF Offset and VF Stride (`§9.3.3.9`, `§9.3.3.10`).
    pub const OFFSET_STRIDE: u16 = 0x14;
    /// VF Device ID (`§9.3.3.11`).
    pub const VF_DEVICE_ID: u16 = 0x18;
    /// Supported Page Sizes (`§9.3.3.12`).
    pub const SUPPORTED_PAGE_SIZES: u16 = 0x1c;
    /// System Page Size (`§9.3.3.13`).
    pub const SYSTEM_PAGE_SIZE: u16 = 0x20;
    /// VF BAR0 (`§9.3.3.14`).
    pub const VF_BAR0: u16 = 0x24;
    /// VF BAR5.
    pub const VF_BAR5: u16 = 0x38;
    /// Bytes of the capability.
    pub const LEN: u16 = 0x40;
    /// VF Enable, in SR-IOV Control.
    pub const VF_ENABLE: u16 = 1 << 0;
    /// VF Memory Space Enable, in SR-IOV Control.
    pub const VF_MSE: u16 = 1 << 3;
    /// ARI Capable Hierarchy, in SR-IOV Control of the lowest-numbered PF of an Endpoint.
    pub const ARI_CAPABLE_HIERARCHY: u16 = 1 << 4;
    /// ARI Capable Hierarchy Preserved, in SR-IOV Capabilities: the bit above outlives D3hot.
    pub const ARI_CAPABLE_HIERARCHY_PRESERVED: u32 = 1 << 1;
    /// The page sizes that every PF must support, 4 KiB, 8 KiB, 64 KiB, 256 KiB, 1 MiB and 4 MiB: bit n is 2^(n+12)
    /// bytes.
    pub const PAGE_SIZES: u32 = 0x553;
}
