//! Saved state: versioned plain data, untrusted when restored.
//!
//! A state holds only the bits that software can change; the shape of a function comes from its configuration. A state
//! is restored through the write masks of software's own writes, and a value that does not survive them unchanged is
//! refused. So any input results in a state that software could have produced. A restore has no effects: VFs that were
//! enabled are enabled again, in their saved state.

use crate::spec::{aer, header, msix, pcie, power, sriov};
use crate::{ConfigSpace, Dword, DwordWrite, ResetKind, Sriov};

/// The version of the states that this crate saves.
pub const STATE_VERSION: u16 = 1;

/// Reason why a state cannot be restored. The function is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// This crate does not support the version of the state.
    #[error("saved state of version {0}; this is version {STATE_VERSION}")]
    Version(u16),
    /// The state belongs to a function of another shape.
    #[error("saved state of a function with different {0}")]
    Shape(&'static str),
    /// The state holds a value that software could not have written.
    #[error("saved state with an impossible value in {0}")]
    Value(&'static str),
}

/// The SR-IOV capability.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct SriovState {
    /// SR-IOV Control.
    pub control: u16,
    /// NumVFs.
    pub num_vfs: u16,
    /// The System Page Size register.
    pub system_page_size: u32,
    /// The VF BARs, as they read.
    pub bars: [u32; 6],
}

/// MSI-X.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct MsixState {
    /// Message Control.
    pub control: u16,
    /// The table: address, upper address, data and vector control of each vector.
    pub table: Vec<[u32; 4]>,
}

/// The registers specific to an Endpoint behind a port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct EndpointState {
    /// Device Control 2.
    pub device_control_2: u16,
    /// Link Control.
    pub link_control: u16,
    /// Link Control 2.
    pub link_control_2: u16,
}

/// Advanced Error Reporting of a function that is not a VF.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct AerState {
    /// Uncorrectable Error Mask.
    pub uncorrectable_mask: u32,
    /// Uncorrectable Error Severity.
    pub uncorrectable_severity: u32,
    /// Correctable Error Mask.
    pub correctable_mask: u32,
}

/// A function's configuration space.
///
/// With the `serde` feature, `endpoint` and `aer` are omitted if they are `None`, so write states in a format with
/// field names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ConfigState {
    /// [`STATE_VERSION`] when it was saved.
    pub version: u16,
    /// Command.
    pub command: u16,
    /// Cache Line Size.
    pub cache_line_size: u8,
    /// The BARs, as they read.
    pub bars: [u32; 6],
    /// Device Control of the PCI Express capability.
    pub device_control: u16,
    /// PowerState of the power management capability; 0 without one.
    pub power_state: u8,
    /// MSI-X, if the function has it.
    pub msix: Option<MsixState>,
    /// The vendor-specific capabilities, from their length byte on.
    pub vendor: Vec<Vec<u8>>,
    /// SR-IOV, of a PF.
    pub sriov: Option<SriovState>,
    /// State that only an Endpoint has.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub endpoint: Option<EndpointState>,
    /// Advanced Error Reporting, if the function has it and is no VF.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub aer: Option<AerState>,
}

fn low(value: u32) -> u16 {
    let [a, b, ..] = value.to_le_bytes();
    u16::from_le_bytes([a, b])
}

impl Sriov {
    /// The registers that software can change.
    pub fn save(&self) -> SriovState {
        let read = |offset| self.read(Dword::containing(offset));
        let mut bars = [0; 6];
        for (offset, bar) in (sriov::VF_BAR0..).step_by(4).zip(&mut bars) {
            *bar = read(offset);
        }
        SriovState {
            control: low(read(sriov::CONTROL_STATUS)),
            num_vfs: low(read(sriov::NUM_VFS_FDL)),
            system_page_size: read(sriov::SYSTEM_PAGE_SIZE),
            bars,
        }
    }

    /// Sets the registers to `state`.
    ///
    /// # Errors
    ///
    /// Fails if software could not have set the registers so.
    pub fn restore(&mut self, state: &SriovState) -> Result<(), RestoreError> {
        let mut new = self.clone();
        let _ = new.reset(ResetKind::Conventional);
        new.fail_enables(0);
        let mut write = |offset, value| {
            // The caller queries the device's needs after restoring all of it.
            let _ = new.write(Dword::containing(offset), DwordWrite::full(value));
        };
        write(sriov::SYSTEM_PAGE_SIZE, state.system_page_size);
        for (offset, bar) in (sriov::VF_BAR0..).step_by(4).zip(state.bars) {
            write(offset, bar);
        }
        write(sriov::NUM_VFS_FDL, state.num_vfs.into());
        write(sriov::CONTROL_STATUS, state.control.into());
        if new.save() != *state {
            return Err(RestoreError::Value("SR-IOV"));
        }
        *self = new;
        Ok(())
    }
}

impl ConfigSpace {
    /// The registers that software can change.
    pub fn save(&self) -> ConfigState {
        let read = |offset| self.read(Dword::containing(offset));
        let mut bars = [0; 6];
        for (offset, bar) in (header::BAR0..).step_by(4).zip(&mut bars) {
            *bar = read(offset);
        }
        let [cache_line_size, ..] = read(header::CACHE_LINE_HEADER_TYPE).to_le_bytes();
        let power_state = self.power_offset().map_or(0, |offset| read(offset + power::CONTROL_STATUS) & power::STATE);
        ConfigState {
            version: STATE_VERSION,
            command: low(read(header::COMMAND_STATUS)),
            cache_line_size,
            bars,
            device_control: low(read(self.pcie_offset() + pcie::DEVICE_CONTROL)),
            power_state: power_state.to_le_bytes()[0],
            msix: self.save_msix(),
            vendor: self.vendor().iter().map(|vendor| vendor.body.clone()).collect(),
            sriov: self.sriov().map(Sriov::save),
            endpoint: self.save_endpoint(),
            aer: self.save_aer(),
        }
    }

    fn save_msix(&self) -> Option<MsixState> {
        let (msix, offset) = self.msix().zip(self.msix_offset())?;
        let [_, _, a, b] = self.read(Dword::containing(offset)).to_le_bytes();
        let mut table = vec![[0; 4]; msix.vectors().into()];
        for (offset, dword) in (0..).step_by(4).zip(table.iter_mut().flatten()) {
            let mut data = [0; 4];
            msix.table_read(offset, &mut data);
            *dword = u32::from_le_bytes(data);
        }
        Some(MsixState { control: u16::from_le_bytes([a, b]), table })
    }

    fn save_endpoint(&self) -> Option<EndpointState> {
        let read = |offset| low(self.read(Dword::containing(self.pcie_offset() + offset)));
        self.port().endpoint().map(|_| EndpointState {
            device_control_2: read(pcie::DEVICE_CONTROL_2),
            link_control: read(pcie::LINK_CONTROL),
            link_control_2: read(pcie::LINK_CONTROL_2),
        })
    }

    fn save_aer(&self) -> Option<AerState> {
        let aer = self.aer().filter(|_| !self.is_vf())?;
        let read = |offset| aer.read(Dword::containing(offset));
        Some(AerState {
            uncorrectable_mask: read(aer::UNCORRECTABLE_MASK),
            uncorrectable_severity: read(aer::UNCORRECTABLE_SEVERITY),
            correctable_mask: read(aer::CORRECTABLE_MASK),
        })
    }

    fn restore_aer(&mut self, state: Option<&AerState>) -> Result<(), RestoreError> {
        let is_vf = self.is_vf();
        let (aer, state) = match (self.aer_mut().filter(|_| !is_vf), state) {
            (Some(aer), Some(state)) => (aer, state),
            (None, None) => return Ok(()),
            _ => return Err(RestoreError::Shape("Advanced Error Reporting")),
        };
        for (offset, value) in [
            (aer::UNCORRECTABLE_MASK, state.uncorrectable_mask),
            (aer::UNCORRECTABLE_SEVERITY, state.uncorrectable_severity),
            (aer::CORRECTABLE_MASK, state.correctable_mask),
        ] {
            aer.write(Dword::containing(offset), DwordWrite::full(value));
        }
        Ok(())
    }

    /// Sets the registers to `state`, without effects: VFs that are enabled in it are not reset.
    ///
    /// # Errors
    ///
    /// Fails if the state belongs to another function, or software could not have set the registers so. The function is
    /// unchanged then.
    pub fn restore(&mut self, state: &ConfigState) -> Result<(), RestoreError> {
        if state.version != STATE_VERSION {
            return Err(RestoreError::Version(state.version));
        }
        let mut new = self.clone();
        let _ = new.reset(ResetKind::Conventional);
        match (new.sriov_mut(), &state.sriov) {
            (Some(sriov), Some(state)) => sriov.restore(state)?,
            (None, None) => {}
            _ => return Err(RestoreError::Shape("SR-IOV")),
        }
        new.restore_msix(state.msix.as_ref())?;
        new.restore_vendor(&state.vendor)?;
        new.restore_endpoint(state.endpoint.as_ref())?;
        new.restore_aer(state.aer.as_ref())?;
        let mut write = |offset, value| {
            let _ = new.write(Dword::containing(offset), DwordWrite::full(value));
        };
        for (offset, bar) in (header::BAR0..).step_by(4).zip(state.bars) {
            write(offset, bar);
        }
        write(header::CACHE_LINE_HEADER_TYPE, state.cache_line_size.into());
        write(header::COMMAND_STATUS, state.command.into());
        // Initiate FLR would reset everything. It always reads 0, so no saved state has it.
        write(self.pcie_offset() + pcie::DEVICE_CONTROL, u32::from(state.device_control) & !pcie::INITIATE_FLR);
        if let Some(offset) = self.power_offset() {
            write(offset + power::CONTROL_STATUS, state.power_state.into());
        }
        if new.save() != *state {
            return Err(RestoreError::Value("configuration space"));
        }
        *self = new;
        Ok(())
    }

    fn restore_msix(&mut self, state: Option<&MsixState>) -> Result<(), RestoreError> {
        let offset = self.msix_offset();
        let (msix, state) = match (self.msix_mut(), state) {
            (Some(msix), Some(state)) if state.table.len() == usize::from(msix.vectors()) => (msix, state),
            (None, None) => return Ok(()),
            _ => return Err(RestoreError::Shape("MSI-X vectors")),
        };
        for (entry, offset) in state.table.iter().zip((0..).step_by(16)) {
            for (dword, offset) in entry.iter().zip((offset..).step_by(4)) {
                let _ = msix.table_write(offset, &dword.to_le_bytes());
            }
        }
        let control = Dword::containing(offset.unwrap_or(0) + msix::CONTROL);
        let _ = self.write(control, DwordWrite::full(u32::from(state.control) << 16));
        Ok(())
    }

    fn restore_endpoint(&mut self, state: Option<&EndpointState>) -> Result<(), RestoreError> {
        let (Some(_), Some(state)) = (self.port().endpoint(), state) else {
            let alike = self.port().endpoint().is_none() && state.is_none();
            return if alike { Ok(()) } else { Err(RestoreError::Shape("port type")) };
        };
        let pcie = self.pcie_offset();
        for (offset, value) in [
            (pcie::DEVICE_CONTROL_2, state.device_control_2),
            (pcie::LINK_CONTROL, state.link_control),
            (pcie::LINK_CONTROL_2, state.link_control_2),
        ] {
            let _ = self.write(Dword::containing(pcie + offset), DwordWrite::full(value.into()));
        }
        Ok(())
    }

    fn restore_vendor(&mut self, state: &[Vec<u8>]) -> Result<(), RestoreError> {
        let bodies = self.vendor_mut();
        let alike = bodies.len() == state.len() && bodies.iter().zip(state).all(|(a, b)| a.body.len() == b.len());
        if !alike {
            return Err(RestoreError::Shape("vendor-specific capabilities"));
        }
        for (capability, saved) in bodies.iter_mut().zip(state) {
            capability.restore(saved);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
