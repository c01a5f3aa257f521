//! Saved state: versioned plain data, which is not trusted when it comes back.
//!
//! A state holds what software can change and nothing else; the shape of a function comes from its configuration again. It comes
//! back through the same write masks as software's own writes, and what does not survive them unchanged is refused. So whatever
//! bytes a state is made of, what it is restored to is a state that software could have reached. Nothing is reset on the way, and
//! no effect comes of it: VFs that were enabled are enabled, as they were.

use crate::spec::{header, msix, pcie, power, sriov};
use crate::{ConfigSpace, Dword, DwordWrite, ResetKind, Sriov};

/// The version of the states that this crate saves.
pub const STATE_VERSION: u16 = 1;

/// Why a state cannot be restored. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The state is of a version that this crate does not know.
    #[error("saved state of version {0}; this is version {STATE_VERSION}")]
    Version(u16),
    /// The state is of a function with another shape.
    #[error("saved state of a function with other {0}")]
    Shape(&'static str),
    /// The state holds what software could not have written.
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
    /// System Page Size, as the register holds it.
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

/// A function's configuration space.
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
    /// MSI-X.
    pub msix: MsixState,
    /// The vendor-specific capabilities, from their length byte on.
    pub vendor: Vec<Vec<u8>>,
    /// SR-IOV, of a PF.
    pub sriov: Option<SriovState>,
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
    /// When software could not have brought them there.
    pub fn restore(&mut self, state: &SriovState) -> Result<(), RestoreError> {
        let mut new = self.clone();
        let _ = new.reset();
        let mut write = |offset, value| {
            // What changes is asked for by whoever restores the whole; nothing is to happen now.
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
        }
    }

    fn save_msix(&self) -> MsixState {
        let [_, _, a, b] = self.read(Dword::containing(self.msix_offset())).to_le_bytes();
        let mut table = vec![[0; 4]; self.msix().vectors().into()];
        for (offset, dword) in (0..).step_by(4).zip(table.iter_mut().flatten()) {
            let mut data = [0; 4];
            self.msix().table_read(offset, &mut data);
            *dword = u32::from_le_bytes(data);
        }
        MsixState { control: u16::from_le_bytes([a, b]), table }
    }

    /// Sets the registers to `state`, without effects: VFs that it says are enabled are not reset.
    ///
    /// # Errors
    ///
    /// When the state is of another function, or software could not have brought the registers there. Nothing has changed then.
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
        new.restore_msix(&state.msix)?;
        new.restore_vendor(&state.vendor)?;
        let mut write = |offset, value| {
            let _ = new.write(Dword::containing(offset), DwordWrite::full(value));
        };
        for (offset, bar) in (header::BAR0..).step_by(4).zip(state.bars) {
            write(offset, bar);
        }
        write(header::CACHE_LINE_HEADER_TYPE, state.cache_line_size.into());
        write(header::COMMAND_STATUS, state.command.into());
        // Initiate FLR would undo all of it; it is never saved, because it never reads as set.
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

    fn restore_msix(&mut self, state: &MsixState) -> Result<(), RestoreError> {
        if state.table.len() != usize::from(self.msix().vectors()) {
            return Err(RestoreError::Shape("MSI-X vectors"));
        }
        for (entry, offset) in state.table.iter().zip((0..).step_by(16)) {
            for (dword, offset) in entry.iter().zip((offset..).step_by(4)) {
                let _ = self.msix_mut().table_write(offset, &dword.to_le_bytes());
            }
        }
        let control = Dword::containing(self.msix_offset() + msix::CONTROL);
        let _ = self.write(control, DwordWrite::full(u32::from(state.control) << 16));
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
