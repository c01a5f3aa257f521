//! A function's configuration space: type 0 header, BARs and capabilities (`PCIe 6.2 §7.5`).

use crate::bar::{BarError, BarSet};
use crate::capability::{Chain, ChainError, Kind, VendorCapability};
use crate::msix::{Msix, MsixShape};
use crate::pcie::Pcie;
use crate::power::Power;
use crate::spec::{self, command, header, status};
use crate::sriov::{Sriov, SriovError, SriovShape};
use crate::{BarIndex, BarKind, Dword, DwordWrite, Effects, ResetKind, Window, WindowId};

/// The fixed registers that say what a function is.
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

/// What a function is to SR-IOV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Nothing.
    Plain,
    /// A physical function with these VFs.
    Pf(SriovShape),
    /// A virtual function, whose BARs are in its PF.
    Vf,
}

/// What a function's configuration space looks like.
#[derive(Debug, Clone)]
pub struct ConfigShape {
    /// What the function is.
    pub identity: Identity,
    /// What it is to SR-IOV.
    pub role: Role,
    /// Its BARs; none for a VF.
    pub bars: Vec<(BarIndex, BarKind)>,
    /// Its vendor-specific capabilities.
    pub vendor: Vec<VendorCapability>,
    /// Its MSI-X.
    pub msix: MsixShape,
}

/// Why a configuration space cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// The BARs cannot be.
    #[error(transparent)]
    Bar(#[from] BarError),
    /// A VF has BARs of its own.
    #[error("a VF has no BARs: they are in its PF")]
    VfBars,
    /// The SR-IOV capability cannot be.
    #[error(transparent)]
    Sriov(#[from] SriovError),
    /// Too many capabilities.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// MSI-X with no or more than 2048 vectors.
    #[error("{0} MSI-X vectors; there must be 1 to 2048")]
    Vectors(u16),
}

/// What software may write to Command: a VF has nothing but Bus Master Enable, the rest is its PF's (`§9.3.4.1.3`).
const COMMAND_WRITABLE: u16 = command::MEMORY_SPACE
    | command::BUS_MASTER
    | command::PARITY_ERROR_RESPONSE
    | command::SERR
    | command::INTERRUPT_DISABLE;
const VF_COMMAND_WRITABLE: u16 = command::BUS_MASTER;

/// The registers of a function. They are the only state: what the function decodes and whether it may send follows from them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSpace {
    identity: Identity,
    is_vf: bool,
    command: u16,
    cache_line_size: u8,
    bars: BarSet,
    chain: Chain,
    pcie: Pcie,
    msix: Msix,
    /// A VF has none: it follows its PF (`§9.6`).
    power: Option<Power>,
    vendor: Vec<VendorCapability>,
    /// The vendor capabilities as they are after a reset.
    vendor_reset: Vec<VendorCapability>,
    sriov: Option<Sriov>,
}

impl ConfigSpace {
    /// Bytes from the start of configuration space beyond which every function reads 0.
    pub const EXTENT: u16 = SRIOV_BASE + spec::sriov::LEN;

    /// The state of power-on.
    ///
    /// # Errors
    ///
    /// When a function cannot look so.
    pub fn new(shape: ConfigShape) -> Result<Self, ShapeError> {
        let ConfigShape { identity, role, bars, vendor, msix } = shape;
        let is_vf = role == Role::Vf;
        if is_vf && !bars.is_empty() {
            return Err(ShapeError::VfBars);
        }
        if msix.vectors == 0 || msix.vectors > spec::msix::MAX_VECTORS {
            return Err(ShapeError::Vectors(msix.vectors));
        }
        let sriov = match role {
            Role::Pf(shape) => Some(Sriov::new(shape)?),
            Role::Plain | Role::Vf => None,
        };
        Ok(Self {
            identity,
            is_vf,
            command: 0,
            cache_line_size: 0,
            bars: BarSet::new(&bars)?,
            chain: Chain::new(!is_vf, &vendor)?,
            pcie: Pcie::new(is_vf),
            msix: Msix::new(msix),
            power: (!is_vf).then(Power::default),
            vendor_reset: vendor.clone(),
            vendor,
            sriov,
        })
    }

    /// MSI-X.
    pub fn msix(&self) -> &Msix {
        &self.msix
    }

    /// MSI-X, to access its table.
    pub fn msix_mut(&mut self) -> &mut Msix {
        &mut self.msix
    }

    /// The SR-IOV capability of a PF.
    pub fn sriov(&self) -> Option<&Sriov> {
        self.sriov.as_ref()
    }

    pub(crate) fn sriov_mut(&mut self) -> Option<&mut Sriov> {
        self.sriov.as_mut()
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

    pub(crate) fn msix_offset(&self) -> u16 {
        self.chain.offset(Kind::Msix).unwrap_or(0)
    }

    pub(crate) fn power_offset(&self) -> Option<u16> {
        self.chain.offset(Kind::Power)
    }

    /// The offset of the n-th vendor-specific capability; 0 if there are not so many.
    pub fn vendor_offset(&self, n: usize) -> u16 {
        self.chain.offset(Kind::Vendor(n)).unwrap_or(0)
    }

    /// Whether the function may access memory and send messages: Bus Master Enable is set and it is in D0. For a VF, which
    /// follows its PF, this does not know the PF's power state.
    pub fn bus_master(&self) -> bool {
        self.command & command::BUS_MASTER != 0 && self.is_d0()
    }

    /// Whether the function is in D0; a VF, which follows its PF, answers true.
    pub fn is_d0(&self) -> bool {
        self.power.as_ref().is_none_or(Power::is_d0)
    }

    /// Appends the windows that the function decodes, a PF with those of its VFs.
    ///
    /// The PF's own BARs decode with its Memory Space Enable, the VF BARs with VF Enable and VF MSE (`§9.3.3.3.4`), and none
    /// of them outside of D0.
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
                Kind::Msix => self.msix.read(inner),
                Kind::Power => self.power.as_ref().map_or(0, |power| power.read(inner)),
                Kind::Vendor(n) => self.vendor.get(n).map_or(0, |vendor| vendor.read(inner)),
            };
            return value | u32::from(next) << 8;
        }
        match (reg.offset(), &self.sriov) {
            (offset, Some(sriov)) if is_sriov(offset) => sriov.read(from_sriov(offset)),
            (offset, _) => self.read_header(offset),
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

    /// Writes a dword. A function level reset that it initiates is done when this returns, as far as registers go.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        if let Some((kind, inner, _)) = self.chain.locate(reg) {
            return match kind {
                Kind::Pcie if self.pcie.write(inner, write) => self.reset(ResetKind::Flr),
                Kind::Pcie => Effects::NONE,
                Kind::Msix => self.msix.write(inner, write),
                Kind::Power => {
                    let changed = self.power.as_mut().is_some_and(|power| power.write(inner, write));
                    Effects { windows: changed, messages: changed, queues: changed, ..Effects::NONE }
                }
                Kind::Vendor(n) => {
                    if let Some(vendor) = self.vendor.get_mut(n) {
                        vendor.write(inner, write);
                    }
                    Effects::NONE
                }
            };
        }
        match (reg.offset(), &mut self.sriov) {
            (offset, Some(sriov)) if is_sriov(offset) => sriov.write(from_sriov(offset), write),
            (header::COMMAND_STATUS, _) => self.write_command(write),
            (header::CACHE_LINE_HEADER_TYPE, _) if !self.is_vf => {
                let [cache_line_size, ..] = write.apply(u32::from(self.cache_line_size), 0xff).to_le_bytes();
                self.cache_line_size = cache_line_size;
                Effects::NONE
            }
            (offset @ header::BAR0..=header::BAR5, _) => {
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
        } = self;
        *command = 0;
        *cache_line_size = 0;
        bars.reset();
        pcie.reset();
        msix.reset();
        if let Some(power) = power {
            power.reset();
        }
        vendor.clone_from(vendor_reset);
        let vfs = sriov.as_mut().map_or(Effects::NONE, Sriov::reset);
        vfs.and(Effects { windows: true, messages: true, queues: true, vfs: None, reset: Some(kind) })
    }
}

/// Where the SR-IOV capability is: the first and only extended capability of a PF.
const SRIOV_BASE: u16 = header::FIRST_EXTENDED_CAPABILITY;

fn is_sriov(offset: u16) -> bool {
    (SRIOV_BASE..SRIOV_BASE + spec::sriov::LEN).contains(&offset)
}

fn from_sriov(offset: u16) -> Dword {
    Dword::containing(offset - SRIOV_BASE)
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
