//! Offsets in BAR 0 and bits of registers that have a meaning here. Offsets are bytes.

/// Device Control.
pub const CTRL: u32 = 0x0;
/// GIO Master Disable, in CTRL.
pub const CTRL_GIO_DIS: u32 = 1 << 2;
/// Link Reset, in CTRL.
pub const CTRL_LRST: u32 = 1 << 3;
/// Device Reset, in CTRL.
pub const CTRL_RST: u32 = 1 << 26;
/// Device Status.
pub const STATUS: u32 = 0x8;
/// Number of VFs, 17:10 of STATUS: the shift.
pub const STATUS_NUM_VFS_SHIFT: u32 = 10;
/// IOV Active, in STATUS.
pub const STATUS_IOV: u32 = 1 << 18;
/// GIO Master Enable Status, in STATUS.
pub const STATUS_GIO: u32 = 1 << 19;
/// Extended Device Control.
pub const CTRL_EXT: u32 = 0x18;
/// PF Reset Done, in CTRL_EXT.
pub const CTRL_EXT_PFRSTD: u32 = 1 << 14;

/// The second VF Level Reset Events register; the first one is [`VFLRE_0`].
pub const VFLRE_1: u32 = 0x1c0;
/// VF Level Reset Events of VFs 0 to 31.
pub const VFLRE_0: u32 = 0x600;
/// VF Level Reset Events Clear, two registers.
pub const VFLREC: u32 = 0x700;
/// VF Mailbox Interrupt Causes, four registers of 16 VFs: requests in 15:0, acknowledgements in 31:16.
pub const MBVFICR: u32 = 0x710;

/// Extended Interrupt Cause.
pub const EICR: u32 = 0x800;
/// Extended Interrupt Cause Set.
pub const EICS: u32 = 0x808;
/// Extended Interrupt Auto Clear.
pub const EIAC: u32 = 0x810;
/// Extended Interrupt Throttle of vectors 0 to 23.
pub const EITR: u32 = 0x820;
/// Extended Interrupt Throttle of vectors 24 to 127.
pub const EITR_24: u32 = 0x12300;
/// Interval of EITR, in bits 11:3, in units of 2 µs.
pub const EITR_INTERVAL: u32 = 0xff8;
/// Extended Interrupt Mask Set.
pub const EIMS: u32 = 0x880;
/// Extended Interrupt Mask Clear.
pub const EIMC: u32 = 0x888;
/// Extended Interrupt Auto Mask.
pub const EIAM: u32 = 0x890;
/// General Purpose Interrupt Enable.
pub const GPIE: u32 = 0x898;
/// Other Clear Disable, in GPIE: a read of EICR clears no cause of a queue.
pub const GPIE_OCD: u32 = 1 << 5;
/// Extended Interrupt Auto Mask Enable, in GPIE.
pub const GPIE_EIAME: u32 = 1 << 30;
/// Interrupt Vector Allocation, a register of two queues.
pub const IVAR: u32 = 0x900;
/// Miscellaneous Interrupt Vector Allocation.
pub const IVAR_MISC: u32 = 0xa00;
/// Allocation is valid, in each byte of IVAR and IVAR_MISC.
pub const IVAR_VALID: u8 = 1 << 7;
/// Extended Interrupt Cause Set of vectors 0 to 63, two registers.
pub const EICS_EX: u32 = 0xa90;
/// Extended Interrupt Mask Set of vectors 0 to 63, two registers.
pub const EIMS_EX: u32 = 0xaa0;
/// Extended Interrupt Mask Clear of vectors 0 to 63, two registers.
pub const EIMC_EX: u32 = 0xab0;
/// Extended Interrupt Auto Mask of vectors 0 to 63, two registers.
pub const EIAM_EX: u32 = 0xad0;
/// Cause of a mailbox event or VF reset, in EICR.
pub const EICR_MAILBOX: u32 = 1 << 19;
/// Cause of a changed link, in EICR.
pub const EICR_LSC: u32 = 1 << 20;

/// Queue Drop Enable, an indirect register.
pub const QDE: u32 = 0x2f04;
/// Hide VLAN, in QDE.
pub const QDE_HIDE_VLAN: u32 = 1 << 1;
/// Write, in QDE.
pub const QDE_WRITE: u32 = 1 << 16;
/// Receive DMA Control.
pub const RDRXCTL: u32 = 0x2f00;
/// Receive Control.
pub const RXCTRL: u32 = 0x3000;
/// Receive Enable, in RXCTRL.
pub const RXCTRL_RXEN: u32 = 1;
/// RSS Queues and Types of a pool.
pub const PFVFMRQC: u32 = 0x3400;
/// MDI Single Command and Address.
pub const MSCA: u32 = 0x425c;
/// MDI Single Read and Write Data.
pub const MSRWD: u32 = 0x4260;
/// Link Status.
pub const LINKS: u32 = 0x42a4;
/// LINKS of a link that is up at 10 Gbit/s.
pub const LINKS_UP_10G: u32 = 0x7000_0000;
/// Speed of the link that is up, in Mbit/s.
pub const LINK_SPEED: u32 = 10_000;
/// Transmit Descriptor Queue Select.
pub const RTTDQSEL: u32 = 0x4904;
/// Transmit Rate-Scheduler Configuration of the selected queue.
pub const RTTBCNRC: u32 = 0x4984;
/// Rate-Scheduler Enable, in RTTBCNRC.
pub const RTTBCNRC_ENABLE: u32 = 1 << 31;
/// DMA Transmit Control.
pub const DMATXCTL: u32 = 0x4a80;
/// Transmit Enable, in DMATXCTL.
pub const DMATXCTL_TE: u32 = 1;
/// PF Mailbox, a register of each VF.
pub const PFMAILBOX: u32 = 0x4b00;
/// Filter Control.
pub const FCTRL: u32 = 0x5080;
/// Highlander Control 0.
pub const HLREG0: u32 = 0x4240;
/// Loopback, in HLREG0.
pub const HLREG0_LPBK: u32 = 1 << 15;
/// Multicast Promiscuous Enable, in FCTRL.
pub const FCTRL_MPE: u32 = 1 << 8;
/// Unicast Promiscuous Enable, in FCTRL.
pub const FCTRL_UPE: u32 = 1 << 9;
/// Broadcast Accept Mode, in FCTRL.
pub const FCTRL_BAM: u32 = 1 << 10;
/// VLAN Control.
pub const VLNCTRL: u32 = 0x5088;
/// VLAN Filter Enable, in VLNCTRL.
pub const VLNCTRL_VFE: u32 = 1 << 30;
/// Multicast Control.
pub const MCSTCTRL: u32 = 0x5090;
/// Multicast Filter Enable, in MCSTCTRL.
pub const MCSTCTRL_MFE: u32 = 1 << 2;
/// VM Transmit Switch Loopback Enable, two registers.
pub const VMTXSW: u32 = 0x5180;
/// Virtual Control.
pub const VT_CTL: u32 = 0x51b0;
/// Virtualization Enable, in VT_CTL.
pub const VT_CTL_ENABLE: u32 = 1;
/// Disable Default Pool, in VT_CTL.
pub const VT_CTL_DIS_DEFPL: u32 = 1 << 29;
/// Replication Enable, in VT_CTL.
pub const VT_CTL_REPLICATE: u32 = 1 << 30;
/// VF Receive Enable, two registers.
pub const VFRE: u32 = 0x51e0;
/// Multicast Table Array, 128 registers.
pub const MTA: u32 = 0x5200;
/// Packet Split Receive Type of pools 0 to 15.
pub const PSRTYPE_LOW: u32 = 0x5480;
/// Packet Split Receive Type of all pools.
pub const PSRTYPE: u32 = 0xea00;
/// Receive Address Low of addresses 0 to 15; RAH follows.
pub const RAL_LOW: u32 = 0x5400;
/// Receive Address Low of all 128 addresses; RAH follows.
pub const RAL: u32 = 0xa200;
/// Address Valid, in RAH.
pub const RAH_AV: u32 = 1 << 31;
/// Multiple Pool Select of an address, two registers.
pub const MPSAR: u32 = 0xa600;
/// VM VLAN Insert, a register of each pool.
pub const VMVIR: u32 = 0x8000;
/// VF Transmit Enable, two registers.
pub const VFTE: u32 = 0x8110;
/// Anti-Spoof Control, a register of 8 pools.
pub const PFVFSPOOF: u32 = 0x8200;
/// DMA Transmit General Switch Control.
pub const PFDTXGSWC: u32 = 0x8220;
/// Local switching enabled (VEB), in PFDTXGSWC.
pub const PFDTXGSWC_VMDLBEN: u32 = 1;
/// Receive Queue Statistics Mapping: the counter of each queue, a register of 4 queues.
pub const RQSMR: u32 = 0x2300;
/// Transmit Queue Statistics Mapping, likewise.
pub const TQSM: u32 = 0x8600;
/// Queue Packets Received Count 0. The others follow at a distance of [`QUEUE_LEN`], as do those of bytes.
pub const QPRC: u32 = 0x1030;
/// Queue Bytes Received Count 0, lower half.
pub const QBRC_L: u32 = 0x1034;
/// Queue Bytes Received Count 0, upper half.
pub const QBRC_H: u32 = 0x1038;
/// Queue Packets Transmitted Count, 16 registers.
pub const QPTC: u32 = 0x8680;
/// Queue Bytes Transmitted Count, 16 pairs of registers, the lower half first.
pub const QBTC_L: u32 = 0x8700;
/// The upper half of the first.
pub const QBTC_H: u32 = 0x8704;
/// Switch Security Violation Packet Count.
pub const SSVPC: u32 = 0x8780;
/// Multiple Receive Queues Command.
pub const MRQC: u32 = 0x5818;
/// Redirection table of RSS, entries 0 to 127.
pub const RETA: u32 = 0x5c00;
/// RSS key, 10 registers.
pub const RSSRK: u32 = 0x5c80;
/// VLAN Filter Table Array, 128 registers.
pub const VFTA: u32 = 0xa000;
/// VM Offload, a register of each pool.
pub const VMOLR: u32 = 0xf000;
/// Unicast Promiscuous, in VMOLR.
pub const VMOLR_UPE: u32 = 1 << 22;
/// VLAN Promiscuous, in VMOLR.
pub const VMOLR_VPE: u32 = 1 << 23;
/// Accept Untagged Packets, in VMOLR.
pub const VMOLR_AUPE: u32 = 1 << 24;
/// Receive Overflow Multicast Packets, in VMOLR: groups that MTA has.
pub const VMOLR_ROMPE: u32 = 1 << 25;
/// Receive Overflow Packets, in VMOLR: addresses that UTA has.
pub const VMOLR_ROPE: u32 = 1 << 26;
/// Broadcast Accept, in VMOLR.
pub const VMOLR_BAM: u32 = 1 << 27;
/// Multicast Promiscuous, in VMOLR.
pub const VMOLR_MPE: u32 = 1 << 28;
/// Pool VLAN Filter, 64 registers.
pub const VLVF: u32 = 0xf100;
/// VLAN ID Enable, in VLVF.
pub const VLVF_VIEN: u32 = 1 << 31;
/// Pool VLAN Filter Bitmap, two registers of each VLVF.
pub const VLVFB: u32 = 0xf200;
/// Redirection table of RSS, entries 128 to 511 of an X550.
pub const ERETA: u32 = 0xee80;
/// Unicast Table Array, 128 registers.
pub const UTA: u32 = 0xf400;
/// Mirror Rule Control, four registers.
pub const MRCTL: u32 = 0xf600;
/// Mirror Rule VLAN, two registers of each rule, four registers apart.
pub const VMRVLAN: u32 = 0xf610;
/// Mirror Rule Pool, two registers of each rule, four registers apart.
pub const VMRVM: u32 = 0xf630;

/// EEPROM/Flash Control.
pub const EEC: u32 = 0x1_0010;
/// EE_SIZE, in EEC: the shift.
pub const EEC_SIZE_SHIFT: u32 = 11;
/// EEPROM Read: a word of the flash of an X540.
pub const EERD: u32 = 0x1_0014;
/// EEPROM Write: a word of the flash of an X540.
pub const EEWR: u32 = 0x1_0018;
/// Start, in EERD and EEWR.
pub const EERD_START: u32 = 1;
/// Done, in EERD and EEWR.
pub const EERD_DONE: u32 = 1 << 1;
/// Software Semaphore.
pub const SWSM: u32 = 0x10140;
/// Software Semaphore Bit, in SWSM.
pub const SWSM_SMBI: u32 = 1;
/// PCIe Control Extended.
pub const GCR_EXT: u32 = 0x11050;
/// Buffers of the mailboxes, 64 bytes for each VF.
pub const PFMBMEM: u32 = 0x13000;
/// Command buffer of the management firmware.
pub const FLEX_MNG: u32 = 0x15800;
/// Bytes of the command buffer.
pub const FLEX_MNG_LEN: u32 = 0x700;
/// Host Interface Control.
pub const HICR: u32 = 0x15f00;
/// Firmware Status.
pub const FWSTS: u32 = 0x15f0c;
/// RSS keys of pools, 64 bytes for each.
pub const PFVFRSSRK: u32 = 0x18000;
/// Redirection tables of pools, 64 bytes for each.
pub const PFVFRETA: u32 = 0x19000;

/// Flow Director Filters Control.
pub const FDIRCTRL: u32 = 0xee00;
/// Initialization Done, in FDIRCTRL.
pub const FDIRCTRL_INIT_DONE: u32 = 1 << 3;
/// Source Address of IPv4, its bytes in the order of the wire.
pub const FDIRIPSA: u32 = 0xee18;
/// Destination Address of IPv4, its bytes in the order of the wire.
pub const FDIRIPDA: u32 = 0xee1c;
/// Ports: source in 15:0, destination in 31:16.
pub const FDIRPORT: u32 = 0xee20;
/// VLAN in 15:0, flexible bytes in 31:16.
pub const FDIRVLAN: u32 = 0xee24;
/// Bucket of a rule in 12:0, software index in 30:16.
pub const FDIRHASH: u32 = 0xee28;
/// Flow Director Command.
pub const FDIRCMD: u32 = 0xee2c;
/// Free places for rules.
pub const FDIRFREE: u32 = 0xee38;
/// Masked bits of the destination address.
pub const FDIRDIP4M: u32 = 0xee3c;
/// Masked bits of the source address.
pub const FDIRSIP4M: u32 = 0xee40;
/// Masked bits of the ports of TCP, each port's in reverse order.
pub const FDIRTCPM: u32 = 0xee44;
/// Masked bits of the ports of UDP, each port's in reverse order.
pub const FDIRUDPM: u32 = 0xee48;
/// Longest list of rules: its length in 5:0, its bucket in 30:16.
pub const FDIRLEN: u32 = 0xee4c;
/// Rules that were added in 15:0, and removed in 31:16.
pub const FDIRUSTAT: u32 = 0xee50;
/// Rules that could not be added in 7:0, and removed in 15:8.
pub const FDIRFSTAT: u32 = 0xee54;
/// Frames that matched a rule.
pub const FDIRMATCH: u32 = 0xee58;
/// Frames that matched no rule.
pub const FDIRMISS: u32 = 0xee5c;
/// Fields that no rule compares.
pub const FDIRM: u32 = 0xee70;
/// Masked bits of the ports of SCTP, each port's in reverse order; X550 alone.
pub const FDIRSCTPM: u32 = 0xee78;

/// Registers of a receive queue, from its first one.
pub mod receive {
    /// Registers of queues 0 to 63; from 64 on they begin at [`HIGH`].
    pub const LOW: u32 = 0x1000;
    /// Registers of queues 64 to 127.
    pub const HIGH: u32 = 0xd000;
    /// Descriptor Base Address Low; the upper half follows.
    pub const RDBAL: u32 = 0x0;
    /// Descriptor Ring Length, in bytes.
    pub const RDLEN: u32 = 0x8;
    /// Head.
    pub const RDH: u32 = 0x10;
    /// Split and Replication Control.
    pub const SRRCTL: u32 = 0x14;
    /// Tail.
    pub const RDT: u32 = 0x18;
    /// Descriptor Control.
    pub const RXDCTL: u32 = 0x28;
    /// Receive Side Coalescing Control.
    pub const RSCCTL: u32 = 0x2c;
    /// SRRCTL of queues 0 to 15 at its second place.
    pub const SRRCTL_LOW: u32 = 0x2100;
    /// DCA_RXCTRL of queues 0 to 15 at its second place.
    pub const DCA_RXCTRL_LOW: u32 = 0x2200;
    /// DCA Control.
    pub const DCA_RXCTRL: u32 = 0xc;
}

/// Registers of a transmit queue, from its first one.
pub mod transmit {
    /// Registers of queue 0.
    pub const FIRST: u32 = 0x6000;
    /// Descriptor Base Address Low; the upper half follows.
    pub const TDBAL: u32 = 0x0;
    /// Descriptor Ring Length, in bytes.
    pub const TDLEN: u32 = 0x8;
    /// Head.
    pub const TDH: u32 = 0x10;
    /// Tail.
    pub const TDT: u32 = 0x18;
    /// Descriptor Control.
    pub const TXDCTL: u32 = 0x28;
    /// QPTC at its second place, of the first 16 queues.
    pub const QPTC_LOW: u32 = 0x30;
    /// Descriptor Completion Write-Back Address Low; the upper half follows.
    pub const TDWBAL: u32 = 0x38;
}

/// Bytes of the registers of a queue.
pub const QUEUE_LEN: u32 = 0x40;
/// Queue Enable, in RXDCTL and TXDCTL.
pub const QUEUE_ENABLE: u32 = 1 << 25;

/// Registers of a VF, offsets in its BAR 0.
pub mod vf {
    /// Control.
    pub const VFCTRL: u32 = 0x0;
    /// Reset, in VFCTRL.
    pub const VFCTRL_RST: u32 = 1 << 26;
    /// Status.
    pub const VFSTATUS: u32 = 0x8;
    /// Link Status: its PF's LINKS.
    pub const VFLINKS: u32 = 0x10;
    /// Interrupt Cause.
    pub const VTEICR: u32 = 0x100;
    /// Interrupt Cause Set.
    pub const VTEICS: u32 = 0x104;
    /// Interrupt Mask Set.
    pub const VTEIMS: u32 = 0x108;
    /// Interrupt Mask Clear.
    pub const VTEIMC: u32 = 0x10c;
    /// Interrupt Auto Clear.
    pub const VTEIAC: u32 = 0x110;
    /// Interrupt Auto Mask.
    pub const VTEIAM: u32 = 0x114;
    /// Interrupt Vector Allocation, a register of two queues, four registers.
    pub const VTIVAR: u32 = 0x120;
    /// Miscellaneous Interrupt Vector Allocation.
    pub const VTIVAR_MISC: u32 = 0x140;
    /// The mailbox's buffer, 64 bytes.
    pub const VFMBMEM: u32 = 0x200;
    /// Mailbox.
    pub const VFMAILBOX: u32 = 0x2fc;
    /// Packet Split Receive Type.
    pub const VFPSRTYPE: u32 = 0x300;
    /// Interrupt Throttle, a register of each vector.
    pub const VTEITR: u32 = 0x820;
    /// Registers of receive queue 0.
    pub const RECEIVE: u32 = 0x1000;
    /// Registers of transmit queue 0.
    pub const TRANSMIT: u32 = 0x2000;
    /// RSS Queues and Types.
    pub const VFMRQC: u32 = 0x3000;
    /// RSS key.
    pub const VFRSSRK: u32 = 0x3100;
    /// Redirection table.
    pub const VFRETA: u32 = 0x3200;
    /// Queues that the registers have room for.
    pub const QUEUES: u32 = 8;
}
