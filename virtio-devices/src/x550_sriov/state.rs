//! The saved state of an X550 and its VFs.
//!
//! Configuration spaces and pending bits are those of each function. The NIC's registers, which the functions share,
//! are in the PF's. There is no virtio transport: its part of a function's state holds the pending vectors alone.

use pci::{Device, Function, ResetKind, VfIndex};
use x550::{Owner, RestoreError};

use super::X550Sriov;
use super::function::X550Function;
use crate::state::{
    DeviceSpecific, DeviceState, FunctionState, STATE_VERSION, StateError, ToldState, TransportState, VectorState,
    VfState, VfsState,
};

fn in_vf(index: u16, error: StateError) -> StateError {
    StateError::Vf { index: VfIndex(index), error: Box::new(error) }
}

impl X550Function {
    /// The state of the function, with `device` behind it.
    fn save(&self, device: DeviceSpecific, told: Option<ToldState>) -> FunctionState {
        let count = self.vectors().map_or(0, |vectors| vectors.count());
        let is_pending = |vector: &u16| self.vectors().is_some_and(|vectors| vectors.is_signalled(*vector));
        let vectors = (0..count).filter(is_pending).map(|vector| VectorState { vector, signalled: true }).collect();
        let transport = TransportState { vectors, ..TransportState::unused() };
        FunctionState { config: self.config().save(), transport, positions: None, device, told }
    }

    /// True if the function is as at power-on, apart from the NIC.
    fn is_power_on(&self) -> bool {
        self.is_untouched() && self.save(DeviceSpecific::PowerOn, None).transport == TransportState::unused()
    }

    /// Restores the function, which is in its power-on state, to `state`, apart from the NIC. After an error its state
    /// is undefined.
    fn restore(&mut self, state: &FunctionState) -> Result<(), StateError> {
        let FunctionState { config, transport, positions, device: _, told: _ } = state;
        let unused = TransportState { vectors: transport.vectors.clone(), ..TransportState::unused() };
        if positions.is_some() || *transport != unused {
            return Err(StateError::Shape("kinds of device"));
        }
        if !transport.vectors.is_sorted_by(|a, b| a.vector < b.vector) {
            return Err(StateError::Value("the order of interrupt vectors"));
        }
        self.config_mut().restore(config)?;
        for vector in &transport.vectors {
            let vectors = self.vectors().filter(|vectors| vector.vector < vectors.count());
            let vectors = vectors.ok_or(StateError::Shape("numbers of interrupt vectors"))?;
            vectors.set_pending(vector.vector, vector.signalled);
        }
        Ok(())
    }
}

impl X550Sriov {
    /// The state of all functions. The configuration space of a VF in its power-on state takes no space in it.
    pub(super) fn save_all(&self) -> Result<DeviceState, StateError> {
        if self.path.is_running() {
            return Err(StateError::Running);
        }
        // The queues' are sent by now, and others may wait for an interval.
        self.nic().flush(None);
        let vfs = (0..).zip(self.functions.vfs()).filter(|(_, vf)| !vf.is_power_on());
        let changed = vfs.map(|(index, vf)| VfState { index, function: vf.save(DeviceSpecific::PowerOn, None) });
        let changed = changed.collect();
        let nic = self.nic().lock().save();
        let pf = self.functions.pf();
        Ok(DeviceState {
            version: STATE_VERSION,
            rid: pf.rid().to_bits(),
            device_type: self.device_type(),
            function: pf.save(DeviceSpecific::X550(Box::new(nic)), Some(self.told())),
            vfs: self.place().map(|place| VfsState { changed, ..place }),
        })
    }

    /// The Device ID of the PF, in place of a virtio device type. None of those is as high.
    fn device_type(&self) -> u16 {
        self.nic().lock().model().devices()[0]
    }

    /// The permanent address, which a driver reads once.
    fn told(&self) -> ToldState {
        let mac = self.mac.0.map(|byte| format!("{byte:02x}")).join(":");
        ToldState { promises: vec![("mac".to_string(), mac)], ..ToldState::default() }
    }

    /// Number and addresses of the VFs, without their state.
    fn place(&self) -> Option<VfsState> {
        self.sriov().map(VfsState::of)
    }

    /// Restores `state` in all functions, which stay paused; if it is refused, all are in their power-on state.
    pub(super) fn restore_all(&mut self, state: &DeviceState) -> Result<(), StateError> {
        if self.path.is_running() {
            return Err(StateError::Running);
        }
        self.nic().pause(true);
        self.power_on();
        let restored = self.restore_functions(state).inspect_err(|_| self.power_on());
        let powered = self.functions.is_powered();
        self.functions.pf().settle_master(true);
        self.functions.vfs().iter().for_each(|vf| vf.settle_master(powered));
        self.owed.add(x550::Effects { queues: true, pools: true, ..x550::Effects::NONE });
        // All functions are paused, so nothing starts, and nothing ran that could stop.
        let _ = self.settle(crate::Outcome::none());
        restored
    }

    /// Resets everything. What the data path has to know of it is settled later.
    fn power_on(&mut self) {
        // VFs that were removed are back.
        let _ = self.functions.reset(ResetKind::Conventional);
        for function in self.functions.functions_mut() {
            let _ = function.config_mut().reset(ResetKind::Conventional);
        }
        let _ = self.nic().reset();
        let _ = self.nic().lock().set_num_vfs(0);
    }

    fn restore_functions(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let DeviceState { version, rid, device_type, function, vfs } = state;
        if *version != STATE_VERSION {
            return Err(StateError::Version(*version));
        }
        let DeviceSpecific::X550(nic) = &function.device else { return Err(StateError::Shape("device types")) };
        let model = self.nic().lock().model();
        if nic.model != model {
            return Err(RestoreError::Model(nic.model, model).into());
        }
        if *device_type != self.device_type() {
            return Err(StateError::Shape("device types"));
        }
        if *rid != self.functions.rid().to_bits() {
            return Err(StateError::Shape("addresses"));
        }
        self.check_told(function.told.as_ref())?;
        let place = vfs.as_ref().map(|vfs| VfsState { changed: Vec::new(), ..*vfs });
        if place != self.place() {
            return Err(StateError::Shape("VFs"));
        }
        let changed = vfs.as_ref().map_or(&[][..], |vfs| &vfs.changed);
        if !changed.is_sorted_by(|a, b| a.index < b.index) {
            return Err(StateError::Value("the order of VFs"));
        }
        // VF Enable is restored with the PF's registers and has no effect on the VFs: they are restored, not reset.
        self.functions.pf_mut().restore(function)?;
        let visible = self.functions.num_visible();
        for VfState { index, function } in changed {
            let vf = self.functions.vf_mut(VfIndex(*index)).ok_or(StateError::Shape("VFs"))?;
            if function.device != DeviceSpecific::PowerOn || function.told.is_some() {
                return Err(in_vf(*index, StateError::Shape("kinds of device")));
            }
            vf.restore(function).map_err(|error| in_vf(*index, error))?;
            // A disabled VF is in its reset state: enabling needs no work.
            if *index >= visible && !vf.is_power_on() {
                return Err(in_vf(*index, StateError::Value("what is reset while no driver can see it")));
            }
        }
        let hidden = (0..).zip(&nic.vfs).skip(visible.into());
        if let Some((index, _)) = hidden.into_iter().find(|(_, vf)| !is_reset(vf)) {
            return Err(in_vf(index, StateError::Value("what is reset while no driver can see it")));
        }
        let mut to = self.nic().lock();
        let _ = to.set_num_vfs(visible);
        Ok(to.restore(nic)?)
    }

    /// Compares the address that the PF's driver has read with the present one.
    fn check_told(&self, told: Option<&ToldState>) -> Result<(), StateError> {
        let here = self.told();
        let told = told.ok_or(StateError::Shape("promises"))?;
        let [(what, now)] = here.promises.as_slice() else { return Ok(()) };
        let then = told.promises.iter().find(|(name, _)| name == what).map(|(_, then)| then);
        match then {
            Some(then) if then != now => {
                Err(StateError::Told { what: what.clone(), then: then.clone(), now: now.clone() })
            }
            _ if *told == here => Ok(()),
            _ => Err(StateError::Shape("promises")),
        }
    }
}

/// True if a VF that a driver cannot see may be so. What its PF writes to the mailbox stays.
fn is_reset(vf: &x550::VfState) -> bool {
    let x550::VfState { mailbox, vectors, allocation, throttle } = vf;
    let is_zero = *vectors == [0; 4] && *allocation == [0; 5] && *throttle == [0; 3];
    is_zero && mailbox.owner != Some(Owner::Vf)
}
