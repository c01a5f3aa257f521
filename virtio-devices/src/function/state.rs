//! A function's saved state.

use pci::{Function, ResetKind};
use virtio_queue::QueueT;

use super::VirtioFunction;
use super::run::Run;
use crate::state::{DeviceState, FunctionState, PositionState, STATE_VERSION, StateError, VfsState};
use crate::{DeviceSpecific, Status, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// The state of this function's device, with its VFs.
    pub(crate) fn save_device(&self, vfs: Option<VfsState>) -> Result<DeviceState, StateError> {
        let (rid, device_type) = (self.rid.to_bits(), self.device.device_type());
        Ok(DeviceState { version: STATE_VERSION, rid, device_type, function: self.save_function()?, vfs })
    }

    /// The state of this function alone.
    pub(crate) fn save_function(&self) -> Result<FunctionState, StateError> {
        if self.is_running() {
            return Err(StateError::Running);
        }
        Ok(FunctionState {
            config: self.config.save(),
            positions: self.run.as_ref().map(Run::save).transpose()?,
            transport: self.transport.save(),
            device: self.device.save(),
            told: self.told(),
        })
    }

    /// True if no driver has changed anything of the function; ignores the device behind it.
    pub(crate) fn is_untouched(&self) -> bool {
        let mut config = self.config.clone();
        let _ = config.reset(ResetKind::Conventional);
        self.run.is_none() && config == self.config && self.transport.is_power_on()
    }

    /// Returns the function, whose queues do not run, and its device to the power-on state, paused.
    pub(crate) fn power_on(&mut self) {
        self.paused = true;
        self.generation = 0;
        // Nothing runs, so there are no threads to join.
        let _ = Function::reset(self, ResetKind::Conventional, true);
        // Every device defines its power-on state, which may differ from the state after a reset.
        let _ = self.device.restore(&DeviceSpecific::PowerOn, None);
    }

    /// Fails unless `state` is of a device of this type at this address.
    pub(crate) fn check(&self, state: &DeviceState) -> Result<(), StateError> {
        if state.version != STATE_VERSION {
            return Err(StateError::Version(state.version));
        }
        if state.device_type != self.device.device_type() {
            return Err(StateError::Shape("device types"));
        }
        if state.rid != self.rid.to_bits() {
            return Err(StateError::Shape("addresses"));
        }
        Ok(())
    }

    /// Restores the only function of a device.
    pub(crate) fn restore_alone(&mut self, state: &DeviceState) -> Result<(), StateError> {
        if self.is_running() {
            return Err(StateError::Running);
        }
        self.power_on();
        self.check(state)?;
        if state.vfs.is_some() {
            return Err(StateError::Shape("VFs"));
        }
        self.restore_function(&state.function).inspect_err(|_| self.power_on())
    }

    /// Restores the function, which is in its power-on state and paused, to `state`. After an error its state is
    /// undefined.
    pub(crate) fn restore_function(&mut self, state: &FunctionState) -> Result<(), StateError> {
        let FunctionState { config, transport, positions, device, told } = state;
        self.config.restore(config)?;
        if Status::from_bits_retain(transport.status).contains(Status::FEATURES_OK) {
            let [low, high, ..] = transport.driver_features;
            self.device.adopt(u64::from(high) << 32 | u64::from(low), device);
            self.transport.offer(self.device.features());
        }
        self.transport.restore(transport)?;
        self.run = positions.as_deref().map(|positions| self.restored_run(positions)).transpose()?;
        let started = self.run.as_ref().map(|_| self.transport.features());
        if let Some(told) = told {
            self.device.serve(&told.config.0, self.transport.agreed());
        }
        self.device.restore(device, started)?;
        told.as_ref().map_or(Ok(()), |told| self.keep_word(told))
    }

    /// The queues as the driver set them up, at `positions`.
    fn restored_run(&self, positions: &[PositionState]) -> Result<Run, StateError> {
        let queues = self.transport.queues();
        let alike = queues.iter().map(|(index, _)| *index).eq(positions.iter().map(|position| position.queue));
        // Queues have positions only after DRIVER_OK, which the driver does not clear without a reset.
        if !alike || !self.transport.status().contains(Status::DRIVER_OK) {
            return Err(StateError::Value("the positions of virtqueues"));
        }
        for ((_, queue), position) in queues.iter().zip(positions) {
            let mut queue = queue.lock();
            queue.set_next_avail(position.next_avail);
            queue.set_next_used(position.next_used);
        }
        Ok(Run::new(queues))
    }
}

impl Run {
    /// Positions of the queues.
    fn save(&self) -> Result<Vec<PositionState>, StateError> {
        let position = |(index, queue): &(u16, crate::SharedQueue)| {
            // A stopping worker may still be running.
            let queue = queue.try_lock().ok_or(StateError::Running)?;
            Ok(PositionState { queue: *index, next_avail: queue.next_avail(), next_used: queue.next_used() })
        };
        self.queues().iter().map(position).collect()
    }
}
