//! A function's configuration space: type 0 header, BARs and capabilities (`PCIe 6.2 §7.5`).

use crate::bar::{BarError, BarSet};
use crate::capability::aer::Aer;
use crate::capability::msix::{Msix, MsixError, MsixShape};
use crate::capability::pcie::Pcie;
use crate::capability::power::Power;
use crate::capability::{self, Chain, ChainError, Kind, VendorCapability, VendorError};
use crate::port::PortType;
use crate::spec::{self, acs, ari, command, extended_capability_id, header, serial, status};
use crate::sriov::{Sriov, SriovError, SriovShape};
use crate::{BarIndex, BarKind, Dword, DwordWrite, Effects, ResetKind, Window, WindowId};

/// The fixed registers that identify a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID; a VF reads FFFFh (`PCIe 6.2 §9.3.4.1.1`).
    pub vendor: u16,
    /// Device ID; a VF reads FFFFh.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Base class, sub-class, programming interface.
    pub class: [u8; 3],
    /// Subsystem Vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// The role of a function in SR-IOV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// No role.
    Plain,
    /// A physical function with these VFs.
    Pf(SriovShape),
    /// A virtual function; its BAR registers are in its PF.
    Vf,
}

/// Layout of a function's configuration space.
///
/// ```
/// use pci_sriov::{BarIndex, BarKind, ConfigShape, ConfigSpace, Identity, MsixShape, Role};
///
/// let identity =
///     Identity {
///         vendor: 0x1af4, device: 0x1041, revision: 1, class: [2, 0, 0], subsystem_vendor: 0x1af4, subsystem: 1
///     };
/// let bar = BarIndex::ALL[0];
/// let space = ConfigSpace::new(ConfigShape {
///     bars: vec![(bar, BarKind::Memory64 { size: 0x1000, prefetchable: true })],
///     msix: Some(MsixShape { vectors: 2, table: (bar, 0), pba: (bar, 0x800) }),
///     ..ConfigShape::new(identity, Role::Plain)
/// });
/// assert!(space.is_ok());
/// ```
#[derive(Debug, Clone)]
pub struct ConfigShape {
    /// IDs and class of the function.
    pub identity: Identity,
    /// Role in SR-IOV.
    pub role: Role,
    /// Attachment to the hierarchy. VFs are attached like their PF.
    pub port: PortType,
    /// BARs. For a VF, the VF BARs of its PF: its own header has none, but its MSI-X structures lie in them.
    pub bars: Vec<(BarIndex, BarKind)>,
    /// Vendor-specific capabilities.
    pub vendor: Vec<VendorCapability>,
    /// MSI-X capability, if the function has one.
    pub msix: Option<MsixShape>,
    /// True if there is an Advanced Error Reporting capability.
    pub aer: bool,
    /// Number of the Device Serial Number capability, if the function has one.
    pub serial_number: Option<u64>,
    /// Offsets of the capabilities, for a function whose driver does not search for them. Empty: they follow each
    /// other. Otherwise every capability of the function needs one; those of capabilities that it does not have are
    /// ignored. Extended capabilities begin at 100h and end below [`ConfigSpace::EXTENT`].
    pub offsets: Vec<(Kind, u16)>,
}

impl ConfigShape {
    /// A Root Complex Integrated Endpoint without BARs, vendor-specific and optional capabilities, and MSI-X.
    pub fn new(identity: Identity, role: Role) -> Self {
        Self {
            identity,
            role,
            port: PortType::default(),
            bars: Vec::new(),
            vendor: Vec::new(),
            msix: None,
            aer: false,
            serial_number: None,
            offsets: Vec::new(),
        }
    }
}

/// Reason why a configuration space is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// The BARs are impossible.
    #[error(transparent)]
    Bar(#[from] BarError),
    /// The Vendor ID of a function that is not a VF is FFFFh, which means that no function exists.
    #[error("Vendor ID ffff means that there is no function; give the vendor's own")]
    VendorId,
    /// The SR-IOV capability is impossible.
    #[error(transparent)]
    Sriov(#[from] SriovError),
    /// MSI-X is impossible.
    #[error(transparent)]
    Msix(#[from] MsixError),
    /// A vendor-specific capability is impossible.
    #[error("vendor-specific capability {index}: {error}")]
    Vendor {
        /// Index of the capability, from 0.
        index: usize,
        /// Fault of the capability.
        error: VendorError,
    },
    /// Too many capabilities.
    #[error(transparent)]
    Chain(#[from] ChainError),
}

/// Writable bits of Command. A VF has only Bus Master Enable; the rest is its PF's (`§9.3.4.1.3`).
const COMMAND_WRITABLE: u16 = command::MEMORY_SPACE
    | command::BUS_MASTER
    | command::PARITY_ERROR_RESPONSE
    | command::SERR
    | command::INTERRUPT_DISABLE;
const VF_COMMAND_WRITABLE: u16 = command::BUS_MASTER;

/// The registers of a function. They are its only state: they determine what it decodes, and if it may send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSpace {
    identity: Identity,
    is_vf: bool,
    port: PortType,
    command: u16,
    cache_line_size: u8,
    /// Empty in a VF.
    bars: BarSet,
    chain: Chain,
    pcie: Pcie,
    msix: Option<Msix>,
    /// Power management; `None` for a VF, which follows its PF (`§9.6`).
    power: Option<Power>,
    vendor: Vec<VendorCapability>,
    /// The vendor capabilities in their reset state.
    vendor_reset: Vec<VendorCapability>,
    sriov: Option<Sriov>,
    aer: Option<Aer>,
    serial_number: Option<u64>,
}

impl ConfigSpace {
    /// Bytes from the start of configuration space beyond which every function reads 0.
    pub const EXTENT: u16 = capability::EXTENT;

    /// The power-on state.
    ///
    /// # Errors
    ///
    /// Fails if no function can have this shape.
    pub fn new(shape: ConfigShape) -> Result<Self, ShapeError> {
        let ConfigShape { identity, role, port, bars, vendor, msix, aer, serial_number, offsets } = shape;
        let is_vf = role == Role::Vf;
        if !is_vf && identity.vendor == 0xffff {
            return Err(ShapeError::VendorId);
        }
        let bars = BarSet::new(&bars)?;
        let msix = msix.map(|shape| Msix::new(shape, &bars)).transpose()?;
        let sriov = match role {
            Role::Pf(shape) => Some(Sriov::new(shape, &port)?),
            Role::Plain | Role::Vf => None,
        };
        let mut capabilities = vec![(Kind::Pcie, spec::pcie::LEN)];
        capabilities.extend(msix.as_ref().map(|_| (Kind::Msix, spec::msix::LEN)));
        capabilities.extend((!is_vf).then_some((Kind::Power, spec::power::LEN)));
        for (index, vendor) in vendor.iter().enumerate() {
            let len = vendor.check().map_err(|error| ShapeError::Vendor { index, error })?;
            capabilities.push((Kind::Vendor(index), len));
        }
        // Software expects SR-IOV first.
        let mut extended = Vec::new();
        extended.extend(sriov.as_ref().map(|_| (Kind::Sriov, spec::sriov::LEN)));
        if let Some(endpoint) = port.endpoint() {
            extended.extend(endpoint.ari.map(|_| (Kind::Ari, ari::LEN)));
            extended.extend(endpoint.acs.then_some((Kind::Acs, acs::LEN)));
        }
        extended.extend(aer.then_some((Kind::Aer, spec::aer::LEN)));
        extended.extend(serial_number.map(|_| (Kind::SerialNumber, serial::LEN)));
        Ok(Self {
            identity,
            is_vf,
            port,
            command: 0,
            cache_line_size: 0,
            bars: if is_vf { BarSet::new(&[])? } else { bars },
            chain: Chain::new(&capabilities, &extended, &offsets)?,
            pcie: Pcie::new(&port, is_vf),
            msix,
            power: (!is_vf).then(Power::default),
            vendor_reset: vendor.clone(),
            vendor,
            sriov,
            aer: aer.then(|| Aer::new(is_vf)),
            serial_number,
        })
    }

    /// True if the function is a VF.
    pub fn is_vf(&self) -> bool {
        self.is_vf
    }

    /// Attachment of the function to the hierarchy.
    pub fn port(&self) -> &PortType {
        &self.port
    }

    /// MSI-X, if the function has it.
    pub fn msix(&self) -> Option<&Msix> {
        self.msix.as_ref()
    }

    /// MSI-X, to access its table.
    pub fn msix_mut(&mut self) -> Option<&mut Msix> {
        self.msix.as_mut()
    }

    /// The address and data of `vector`, if the function can send its message: it has Bus Master Enable, is in D0, and
    /// neither MSI-X nor the vector is off or masked. For a VF, the caller must also check the power state of its PF.
    pub fn message(&self, vector: u16) -> Option<(u64, u32)> {
        self.msix().filter(|_| self.bus_master())?.message(vector)
    }

    /// Reads the MSI-X structure at `offset` of `bar`, as [`Msix::bar_read`]. Returns false if there is none; `data` is
    /// unchanged then. `raised` is [`PendingBits::contains`](crate::PendingBits::contains), or the like.
    pub fn msix_read(&self, bar: BarIndex, offset: u64, data: &mut [u8], raised: impl Fn(u16) -> bool) -> bool {
        self.msix().is_some_and(|msix| msix.bar_read(bar, offset, data, self.bus_master(), raised))
    }

    /// Writes the MSI-X structure at `offset` of `bar`; `None` if there is none. The effects are for
    /// [`Function::changed`](crate::Function::changed).
    pub fn msix_write(&mut self, bar: BarIndex, offset: u64, data: &[u8]) -> Option<Effects> {
        self.msix_mut()?.bar_write(bar, offset, data)
    }

    /// The SR-IOV capability of a PF.
    pub fn sriov(&self) -> Option<&Sriov> {
        self.sriov.as_ref()
    }

    pub(crate) fn sriov_mut(&mut self) -> Option<&mut Sriov> {
        self.sriov.as_mut()
    }

    pub(crate) fn aer_mut(&mut self) -> Option<&mut Aer> {
        self.aer.as_mut()
    }

    pub(crate) fn aer(&self) -> Option<&Aer> {
        self.aer.as_ref()
    }

    pub(crate) fn vendor(&self) -> &[VendorCapability] {
        &self.vendor
    }

    pub(crate) fn vendor_mut(&mut self) -> &mut [VendorCapability] {
        &mut self.vendor
    }

    pub(crate) fn pcie_offset(&self) -> u16 {
        self.chain.offset(Kind::Pcie).unwrap_or(0)
    }

    /// The offset of the MSI-X capability, if the function has it.
    pub fn msix_offset(&self) -> Option<u16> {
        self.chain.offset(Kind::Msix)
    }

    pub(crate) fn power_offset(&self) -> Option<u16> {
        self.chain.offset(Kind::Power)
    }

    /// The offset of the n-th vendor-specific capability, counted from 0; 0 if there are not that many.
    pub fn vendor_offset(&self, n: usize) -> u16 {
        self.chain.offset(Kind::Vendor(n)).unwrap_or(0)
    }

    /// True if the function may access memory and send messages: Bus Master Enable is set, and the function is in D0.
    /// For a VF, the caller must also check the power state of its PF.
    pub fn bus_master(&self) -> bool {
        self.command & command::BUS_MASTER != 0 && self.is_d0()
    }

    /// True if the function is in D0. Always true for a VF, which follows its PF.
    pub fn is_d0(&self) -> bool {
        self.power.as_ref().is_none_or(Power::is_d0)
    }

    /// Appends the windows that the function decodes; for a PF, also those of its VFs.
    ///
    /// The PF's own BARs decode with its Memory Space Enable, the VF BARs with VF Enable and VF MSE (`§9.3.3.3.4`).
    /// Nothing decodes outside of D0.
    pub fn windows(&self, out: &mut Vec<Window>) {
        if !self.is_d0() {
            return;
        }
        if self.command & command::MEMORY_SPACE != 0 {
            self.bars.windows(1, WindowId::Bar, out);
        }
        if let Some(sriov) = &self.sriov {
            sriov.windows(out);
        }
    }

    /// Reads a dword. Registers that are not implemented read 0.
    pub fn read(&self, reg: Dword) -> u32 {
        if let Some((kind, inner, next)) = self.chain.locate(reg) {
            let value = match kind {
                Kind::Pcie => self.pcie.read(inner),
                Kind::Msix => self.msix.as_ref().map_or(0, |msix| msix.read(inner)),
                Kind::Power => self.power.as_ref().map_or(0, |power| power.read(inner)),
                Kind::Vendor(n) => self.vendor.get(n).map_or(0, |vendor| vendor.read(inner)),
                Kind::Sriov => self.sriov.as_ref().map_or(0, |sriov| sriov.read(inner)),
                // Next Function Number is 0: only VFs follow, and software finds these through their PF.
                Kind::Ari => match inner.offset() {
                    ari::HEADER => u32::from(extended_capability_id::ARI) | 1 << 16,
                    _ => 0,
                },
                Kind::Acs => match inner.offset() {
                    acs::HEADER => u32::from(extended_capability_id::ACS) | 1 << 16,
                    _ => 0,
                },
                Kind::Aer => self.aer.as_ref().map_or(0, |aer| aer.read(inner)),
                Kind::SerialNumber => self.read_serial_number(inner.offset()),
            };
            return value | next;
        }
        self.read_header(reg.offset())
    }

    fn read_serial_number(&self, offset: u16) -> u32 {
        let [a, b, c, d, e, f, g, h] = self.serial_number.unwrap_or(0).to_le_bytes();
        match offset {
            serial::HEADER => u32::from(extended_capability_id::SERIAL_NUMBER) | 1 << 16,
            serial::LOWER => u32::from_le_bytes([a, b, c, d]),
            serial::UPPER => u32::from_le_bytes([e, f, g, h]),
            _ => 0,
        }
    }

    fn read_header(&self, offset: u16) -> u32 {
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let Identity { vendor, device, revision, class: [base, sub, interface], subsystem_vendor, subsystem } =
            self.identity;
        match offset {
            header::ID if self.is_vf => spec::ALL_ONES,
            header::ID => pair(vendor, device),
            header::COMMAND_STATUS => pair(self.command, status::CAPABILITIES_LIST),
            header::CLASS_REVISION => u32::from_le_bytes([revision, interface, sub, base]),
            header::CACHE_LINE_HEADER_TYPE => u32::from(self.cache_line_size),
            header::BAR0..=header::BAR5 => self.bars.read((offset - header::BAR0) / 4),
            header::SUBSYSTEM => pair(subsystem_vendor, subsystem),
            header::CAPABILITIES => u32::from(self.chain.head()),
            _ => 0,
        }
    }

    /// Writes a dword. If it initiates a function level reset, all registers are reset when this returns.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        if let Some((kind, inner, _)) = self.chain.locate(reg) {
            return match kind {
                Kind::Pcie if self.pcie.write(inner, write) => self.reset(ResetKind::Flr),
                Kind::Pcie => Effects::NONE,
                Kind::Msix => self.msix.as_mut().map_or(Effects::NONE, |msix| msix.write(inner, write)),
                Kind::Power => self.power.as_mut().map_or(Effects::NONE, |power| power.write(inner, write)),
                Kind::Vendor(n) => {
                    if let Some(vendor) = self.vendor.get_mut(n) {
                        vendor.write(inner, write);
                    }
                    Effects::NONE
                }
                Kind::Sriov => self.sriov.as_mut().map_or(Effects::NONE, |sriov| sriov.write(inner, write)),
                Kind::Aer => {
                    if let Some(aer) = &mut self.aer {
                        aer.write(inner, write);
                    }
                    Effects::NONE
                }
                // None has writable control bits.
                Kind::Ari | Kind::Acs | Kind::SerialNumber => Effects::NONE,
            };
        }
        match reg.offset() {
            header::COMMAND_STATUS => self.write_command(write),
            header::CACHE_LINE_HEADER_TYPE if !self.is_vf => {
                let [cache_line_size, ..] = write.apply(u32::from(self.cache_line_size), 0xff).to_le_bytes();
                self.cache_line_size = cache_line_size;
                Effects::NONE
            }
            offset @ header::BAR0..=header::BAR5 => {
                let changed = self.bars.write((offset - header::BAR0) / 4, write);
                Effects { windows: changed && self.command & command::MEMORY_SPACE != 0, ..Effects::NONE }
            }
            _ => Effects::NONE,
        }
    }

    fn write_command(&mut self, write: DwordWrite) -> Effects {
        let writable = if self.is_vf { VF_COMMAND_WRITABLE } else { COMMAND_WRITABLE };
        let [low, high, ..] = write.apply(u32::from(self.command), u32::from(writable)).to_le_bytes();
        let new = u16::from_le_bytes([low, high]);
        let changed = self.command ^ new;
        self.command = new;
        let bus_master = changed & command::BUS_MASTER != 0;
        Effects {
            windows: changed & command::MEMORY_SPACE != 0,
            messages: bus_master,
            queues: bus_master,
            ..Effects::NONE
        }
    }

    /// Resets the function; a PF's VFs cease to exist (`§9.2.2`).
    pub fn reset(&mut self, kind: ResetKind) -> Effects {
        let Self {
            identity: _,
            is_vf: _,
            port: _,
            command,
            cache_line_size,
            bars,
            chain: _,
            pcie,
            msix,
            power,
            vendor,
            vendor_reset,
            sriov,
            aer,
            serial_number: _,
        } = self;
        *command = 0;
        *cache_line_size = 0;
        bars.reset();
        pcie.reset(kind);
        if let Some(msix) = msix {
            msix.reset();
        }
        if let Some(power) = power {
            power.reset();
        }
        if let Some(aer) = aer {
            aer.reset(kind);
        }
        vendor.clone_from(vendor_reset);
        let vfs = sriov.as_mut().map_or(Effects::NONE, |sriov| sriov.reset(kind));
        vfs.and(Effects { windows: true, messages: true, queues: true, reset: Some(kind), ..Effects::NONE })
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
