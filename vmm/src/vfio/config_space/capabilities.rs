//! Capabilities of a host device that its guest sees, and the bits passed through to the host.
//!
//! The list names the allowed capabilities. An allowed capability stays at the device's offset, because drivers may
//! rely on that; the chain skips all others, which are hidden: they concern the host's topology, memory or power
//! (SR-IOV, ARI, Resizable BAR, ATS, PRI, PASID, ACS, LTR, TPH), or are unknown to this program.

use std::collections::BTreeMap;

use pci::Dword;
use pci::spec::{capability_id, extended_capability_id, header, msix, pcie, power};

/// Bytes of the part of configuration space that every device has.
const CONVENTIONAL: u16 = 0x100;
/// The most capabilities of a chain: each has at least 4 bytes.
const MOST: usize = 1024;

/// Bytes of the PCI Express capability, version 1 (`PCIe 6.2 §7.5.3`): up to Link Status.
const PCIE_1_LEN: u16 = 0x14;
/// The version in the PCI Express Capabilities register.
const PCIE_VERSION: u32 = 0xf;
/// Bits of PCI Express Capabilities that are shown: the version, and Interrupt Message Number.
const PCIE_SHOWN: u32 = 0x3e00 | PCIE_VERSION;
/// Bits of Device Capabilities that are shown: Max_Payload_Size, extended tags, role-based error reporting.
const DEVICE_CAPABILITIES: u32 = 0x8027;
/// Bits of Device Control that are passed through: all except phantom functions, auxiliary power and Initiate FLR.
const DEVICE_CONTROL: u32 = 0x79ff;
/// Bits of Device Status that are shown, and cleared by writing 1.
const DEVICE_STATUS: u32 = 0x3f_0000;
const DEVICE_STATUS_CLEAR: u32 = 0xf_0000;
/// Bits of Device Capabilities 2 and Device Control 2 that are passed through: completion timeouts.
const COMPLETION_TIMEOUTS: u32 = 0x1f;

/// Bytes of Advanced Error Reporting in a function that is not a root port (`PCIe 6.2 §7.8.4`).
const AER_LEN: u16 = 0x2c;
/// Bits that software may set in Advanced Error Capabilities and Control: ECRC generation and checking.
const AER_CONTROL: u32 = 0x140;
/// Bytes of the Device Serial Number capability (`PCIe 6.2 §7.9.3`).
const SERIAL_NUMBER_LEN: u16 = 0xc;
/// Bytes of the Vital Product Data capability (`PCIe 6.2 §7.9.18`).
const VPD_LEN: u16 = 8;

/// A dword with bits that are passed through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Passed {
    /// Bits that always read as 1.
    pub fixed: u32,
    /// Bits that read as on the host.
    pub read: u32,
    /// Bits that are written through.
    pub write: u32,
    /// Bits that a 1 acts on and a 0 leaves unchanged. Those that are not written through are written as 0.
    pub clear: u32,
}

impl Passed {
    const fn constant(fixed: u32) -> Self {
        Self { fixed, read: 0, write: 0, clear: 0 }
    }

    const fn all(write: u32, clear: u32) -> Self {
        Self { fixed: 0, read: u32::MAX, write: write | clear, clear }
    }
}

/// A capability that this program emulates. Guest writes to its registers never reach the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owned {
    Power,
    Msi,
    Msix,
}

/// Register at a dword of the guest's configuration space after the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    /// A capability of this program, and the dword in it. The next pointer is in the dword 0.
    Owned(Owned, Dword),
    /// Device Control. This program emulates Initiate FLR.
    DeviceControl(Passed),
    /// A host register with bits passed through.
    Passed(Passed),
}

/// The capabilities that the guest sees. A dword without a register reads as 0.
#[derive(Debug, Default)]
pub(crate) struct Capabilities {
    registers: BTreeMap<Dword, Register>,
    /// Offsets of the capabilities that this program owns, and their next pointers.
    owned: BTreeMap<Owned, (u16, u8)>,
    head: u8,
}

/// A capability in the host's configuration space.
#[derive(Debug, Clone, Copy)]
struct Found {
    id: u16,
    offset: u16,
    /// The first offset after its registers.
    end: u16,
}

impl Capabilities {
    /// The capabilities of a device with the configuration space `image` of 256 or 4,096 bytes. With `flr`, the guest
    /// can reset the function.
    pub(crate) fn of(image: &[u8], flr: bool) -> Self {
        let mut this = Self::default();
        let image = Image(image);
        this.take_conventional(&image, flr);
        this.take_extended(&image);
        this
    }

    /// The offset of the first capability; 0 if there is none.
    pub(crate) fn head(&self) -> u8 {
        self.head
    }

    /// Register at `reg`.
    pub(crate) fn register(&self, reg: Dword) -> Option<Register> {
        self.registers.get(&reg).copied()
    }

    /// Offset of a capability of this program.
    pub(crate) fn offset(&self, owned: Owned) -> Option<u16> {
        self.owned.get(&owned).map(|(offset, _)| *offset)
    }

    /// The next pointer of a capability of this program, as in its dword 0.
    pub(crate) fn next(&self, owned: Owned) -> u32 {
        self.owned.get(&owned).map_or(0, |(_, next)| u32::from(*next) << 8)
    }

    fn take_conventional(&mut self, image: &Image<'_>, flr: bool) {
        let kept: Vec<_> = image.conventional().into_iter().filter(|found| is_kept(found.id)).collect();
        let offsets = kept.iter().map(|found| found.offset.to_le_bytes()[0]);
        let nexts = offsets.clone().skip(1).chain([0]);
        self.head = offsets.clone().next().unwrap_or(0);
        for (found, next) in kept.iter().zip(nexts) {
            let header = u32::from(found.id) | u32::from(next) << 8;
            let [id, _] = found.id.to_le_bytes();
            match id {
                capability_id::POWER_MANAGEMENT => self.own(Owned::Power, found, power::LEN, next),
                capability_id::MSI => {
                    let control = image.dword(found.offset) >> 16;
                    self.own(Owned::Msi, found, super::msi::len_of(control), next);
                }
                capability_id::MSIX => self.own(Owned::Msix, found, msix::LEN, next),
                capability_id::PCI_EXPRESS => self.take_pcie(found, header, image, flr),
                capability_id::VPD => {
                    self.pass(found, 0, Passed { fixed: header, ..Passed::all(0xffff_0000, 0) }.below_header());
                    (4..VPD_LEN).step_by(4).for_each(|at| self.pass(found, at, Passed::all(u32::MAX, 0)));
                }
                _ => {
                    let len = u16::from(image.byte(found.offset + 2));
                    self.pass(found, 0, Passed { fixed: header, ..Passed::all(0xff00_0000, 0) }.below_header());
                    (4..len).step_by(4).for_each(|at| self.pass(found, at, Passed::all(u32::MAX, 0)));
                }
            }
        }
    }

    fn take_pcie(&mut self, found: &Found, header: u32, image: &Image<'_>, flr: bool) {
        let at = |offset| image.dword(found.offset + offset);
        let capabilities = at(pcie::CAPABILITIES) >> 16;
        let second = capabilities & PCIE_VERSION >= u32::from(pcie::VERSION_2);
        let kind = u32::from(pcie::TYPE_RC_INTEGRATED_ENDPOINT);
        self.pass(found, 0, Passed::constant(header | (capabilities & PCIE_SHOWN | kind) << 16));
        let device = at(pcie::DEVICE_CAPABILITIES) & DEVICE_CAPABILITIES;
        let device = if flr { device | pcie::FLR_CAPABLE } else { device };
        self.pass(found, pcie::DEVICE_CAPABILITIES, Passed::constant(device));
        let control = Passed {
            fixed: 0,
            read: DEVICE_CONTROL | DEVICE_STATUS,
            write: DEVICE_CONTROL | DEVICE_STATUS_CLEAR,
            // Whatever bits the device has, writes through never reset it.
            clear: DEVICE_STATUS_CLEAR | pcie::INITIATE_FLR,
        };
        self.put(found, pcie::DEVICE_CONTROL, PCIE_1_LEN, Register::DeviceControl(control));
        if second {
            let timeouts = at(pcie::DEVICE_CAPABILITIES_2) & COMPLETION_TIMEOUTS;
            self.pass(found, pcie::DEVICE_CAPABILITIES_2, Passed::constant(timeouts));
            let control = Passed { fixed: 0, read: COMPLETION_TIMEOUTS, write: COMPLETION_TIMEOUTS, clear: 0 };
            self.pass(found, pcie::DEVICE_CONTROL_2, control);
        }
    }

    fn take_extended(&mut self, image: &Image<'_>) {
        let kept: Vec<_> = image.extended().into_iter().filter(|found| is_kept_extended(found.id)).collect();
        let nexts = kept.iter().skip(1).map(|found| found.offset).chain([0]);
        if let Some(first) = kept.first().filter(|first| first.offset != header::FIRST_EXTENDED_CAPABILITY) {
            // The chain starts here, with a null capability.
            let null = Register::Passed(Passed::constant(u32::from(first.offset) << 20));
            self.registers.insert(Dword::containing(header::FIRST_EXTENDED_CAPABILITY), null);
        }
        for (found, next) in kept.iter().zip(nexts) {
            let header = image.dword(found.offset) & 0xf_ffff | u32::from(next) << 20;
            self.pass(found, 0, Passed::constant(header));
            let mut pass = |range: std::ops::Range<u16>, passed| {
                range.step_by(4).for_each(|at| self.pass(found, at, passed));
            };
            match found.id {
                extended_capability_id::AER => {
                    pass(0x04..0x08, Passed::all(0, u32::MAX));
                    pass(0x08..0x10, Passed::all(u32::MAX, 0));
                    pass(0x10..0x14, Passed::all(0, u32::MAX));
                    pass(0x14..0x18, Passed::all(u32::MAX, 0));
                    pass(0x18..0x1c, Passed::all(AER_CONTROL, 0));
                    pass(0x1c..AER_LEN, Passed::all(0, 0));
                }
                extended_capability_id::SERIAL_NUMBER => pass(4..SERIAL_NUMBER_LEN, Passed::all(0, 0)),
                _ => {
                    // The length is in the second dword (`PCIe 6.2 §7.9.5`).
                    let len = u16::try_from(image.dword(found.offset + 4) >> 20).unwrap_or(0);
                    pass(4..8, Passed::all(0, 0));
                    pass(8..len, Passed::all(u32::MAX, 0));
                }
            }
        }
    }

    fn own(&mut self, owned: Owned, found: &Found, len: u16, next: u8) {
        if self.owned.contains_key(&owned) {
            return;
        }
        self.owned.insert(owned, (found.offset, next));
        for at in (0..len).step_by(4) {
            self.put(found, at, len, Register::Owned(owned, Dword::containing(at)));
        }
    }

    fn pass(&mut self, found: &Found, at: u16, passed: Passed) {
        self.put(found, at, u16::MAX, Register::Passed(passed));
    }

    /// Puts a register at the byte `at` of a capability, unless another capability starts before it.
    fn put(&mut self, found: &Found, at: u16, len: u16, register: Register) {
        if let Some(offset) = found.offset.checked_add(at)
            && at < len
            && offset < found.end
        {
            self.registers.entry(Dword::containing(offset)).or_insert(register);
        }
    }
}

impl Passed {
    /// The register without the host's capability ID and next pointer.
    const fn below_header(self) -> Self {
        Self { read: self.read & !0xffff, write: self.write & !0xffff, ..self }
    }
}

fn is_kept(id: u16) -> bool {
    let [id, _] = id.to_le_bytes();
    matches!(
        id,
        capability_id::POWER_MANAGEMENT
            | capability_id::MSI
            | capability_id::MSIX
            | capability_id::PCI_EXPRESS
            | capability_id::VPD
            | capability_id::VENDOR
    )
}

fn is_kept_extended(id: u16) -> bool {
    let kept = [extended_capability_id::AER, extended_capability_id::SERIAL_NUMBER, extended_capability_id::VENDOR];
    kept.contains(&id)
}

/// The host's configuration space, as read when the device was opened. Beyond its end it reads as 0.
struct Image<'a>(&'a [u8]);

impl Image<'_> {
    fn byte(&self, offset: u16) -> u8 {
        self.0.get(usize::from(offset)).copied().unwrap_or(0)
    }

    fn dword(&self, offset: u16) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|n| self.byte(offset.saturating_add(n))))
    }

    /// The capabilities in the first 256 bytes, in the order of the chain.
    fn conventional(&self) -> Vec<Found> {
        let mut found = Vec::new();
        let mut offset = u16::from(self.byte(header::CAPABILITIES)) & !0b11;
        while offset >= header::FIRST_CAPABILITY && found.len() < MOST {
            found.push((u16::from(self.byte(offset)), offset));
            offset = u16::from(self.byte(offset + 1)) & !0b11;
            if found.iter().any(|(_, taken)| *taken == offset) {
                break;
            }
        }
        bounded(found, CONVENTIONAL)
    }

    /// The extended capabilities, in the order of the chain.
    fn extended(&self) -> Vec<Found> {
        let mut found = Vec::new();
        let mut offset = header::FIRST_EXTENDED_CAPABILITY;
        while offset >= header::FIRST_EXTENDED_CAPABILITY && found.len() < MOST {
            let header = self.dword(offset);
            if header == 0 || header == u32::MAX {
                break;
            }
            let [low, high, ..] = header.to_le_bytes();
            found.push((u16::from_le_bytes([low, high]), offset));
            offset = u16::try_from(header >> 20).unwrap_or(0) & !0b11;
            if found.iter().any(|(_, taken)| *taken == offset) {
                break;
            }
        }
        bounded(found, 4 * Dword::COUNT)
    }
}

/// Bounds the capabilities: each ends where the next one starts, whatever length it claims.
fn bounded(found: Vec<(u16, u16)>, end: u16) -> Vec<Found> {
    let next = |offset: u16| found.iter().map(|(_, other)| *other).filter(|other| *other > offset).min();
    found.iter().map(|&(id, offset)| Found { id, offset, end: next(offset).unwrap_or(end) }).collect()
}
