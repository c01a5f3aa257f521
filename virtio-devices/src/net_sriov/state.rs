//! The saved state of a PF with its VFs.

use pci::VfIndex;

use super::NetSriov;
use crate::VirtioDevice;
use crate::function::VirtioFunction;
use crate::state::{DeviceSpecific, DeviceState, StateError, VfState, VfsState};

impl<D: VirtioDevice> NetSriov<D> {
    /// Returns the state of all functions. A VF in its power-on state, as nearly every disabled VF is, takes no space
    /// in it.
    pub(super) fn save_all(&self) -> Result<DeviceState, StateError> {
        let mut changed = Vec::new();
        for (index, vf) in (0..).zip(self.functions.vfs()) {
            if !vf.is_untouched() || vf.device().save() != DeviceSpecific::PowerOn {
                let function = vf.save_function().map_err(|error| in_vf(index, error))?;
                changed.push(VfState { index, function });
            }
        }
        self.pf().save_device(self.place().map(|place| VfsState { changed, ..place }))
    }

    /// Number and addresses of the VFs, without their state.
    fn place(&self) -> Option<VfsState> {
        self.sriov().map(VfsState::of)
    }

    /// Restores `state` in all functions, whose queues must not run; if it is refused, all are in their power-on state.
    pub(super) fn restore_all(&mut self, state: &DeviceState) -> Result<(), StateError> {
        if self.functions.functions().any(VirtioFunction::is_running) {
            return Err(StateError::Running);
        }
        self.power_on();
        self.restore_functions(state).inspect_err(|_| self.power_on())
    }

    fn power_on(&mut self) {
        self.functions.functions_mut().for_each(VirtioFunction::power_on);
    }

    fn restore_functions(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.pf().check(state)?;
        let Some(vfs) = &state.vfs else { return Err(StateError::Shape("VFs")) };
        let VfsState { total_vfs, first_vf_offset, vf_stride, changed } = vfs;
        if self.place().is_none_or(|place| {
            (place.total_vfs, place.first_vf_offset, place.vf_stride) != (*total_vfs, *first_vf_offset, *vf_stride)
        }) {
            return Err(StateError::Shape("VFs"));
        }
        if !changed.is_sorted_by(|a, b| a.index < b.index) {
            return Err(StateError::Value("the order of VFs"));
        }
        // VF Enable is restored with the PF's registers and has no effect on the VFs: they are restored, not reset.
        self.pf_mut().restore_function(&state.function)?;
        for VfState { index, function } in changed {
            let visible = *index < self.functions.num_visible();
            let vf = self.vf_mut(VfIndex(*index)).ok_or(StateError::Shape("VFs"))?;
            vf.restore_function(function).map_err(|error| in_vf(*index, error))?;
            // A disabled VF is in its reset state: enabling needs no work.
            let is_reset = vf.is_untouched() && function.device.is_reset();
            if !visible && !is_reset {
                return Err(in_vf(*index, StateError::Value("what is reset while no driver can see it")));
            }
        }
        Ok(())
    }
}

fn in_vf(index: u16, error: StateError) -> StateError {
    StateError::Vf { index: VfIndex(index), error: Box::new(error) }
}
