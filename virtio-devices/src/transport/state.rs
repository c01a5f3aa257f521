//! The transport's saved state.

use std::sync::Arc;

use super::{Area, Half, QueueRegisters, Register, Status, Transport, queue_count};
use crate::Interrupts;
use crate::state::{QueueState, StateError, TransportState};

/// The status bits that a driver sets, without the device's.
const DRIVERS: Status = Status::DEVICE_NEEDS_RESET.complement();

impl Transport {
    /// The registers, and the vectors in use. Nothing may signal during the call.
    pub(crate) fn save(&self) -> TransportState {
        let Self {
            offered: _,
            required: _,
            requirements: _,
            vectors: _,
            interrupts,
            queues,
            status: _,
            device_feature_select,
            driver_feature_select,
            driver_features,
            queue_select,
        } = self;
        TransportState {
            status: self.status().bits(),
            device_feature_select: *device_feature_select,
            driver_feature_select: *driver_feature_select,
            driver_features: [0, 1, 2, 3].map(|select| super::word(*driver_features, select)),
            config_vector: interrupts.config_vector(),
            queue_select: *queue_select,
            queues: (0..).zip(queues).map(|(n, queue)| queue.save(interrupts.queue_vector(n))).collect(),
            isr: interrupts.isr(),
            vectors: interrupts.save(),
        }
    }

    /// True if it is in its power-on state.
    pub(crate) fn is_power_on(&self) -> bool {
        self.save() == self.power_on().save()
    }

    /// The same transport in its power-on state.
    fn power_on(&self) -> Self {
        Self {
            offered: self.offered,
            required: self.required,
            requirements: self.requirements,
            vectors: self.vectors,
            interrupts: Arc::new(
                Interrupts::new(queue_count(&self.queues), self.vectors).observed_as(&self.interrupts),
            ),
            queues: self.queues.iter().map(|queue| QueueRegisters::new(queue.max_size)).collect(),
            status: Status::empty(),
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            queue_select: 0,
        }
    }

    /// Sets the registers to `state` as a driver's writes would.
    ///
    /// # Errors
    ///
    /// Fails if the state is of another device, or no driver could have set the registers so, or there are no eventfds.
    /// Nothing has changed then.
    pub(crate) fn restore(&mut self, state: &TransportState) -> Result<(), StateError> {
        if state.queues.len() != self.queues.len() {
            return Err(StateError::Shape("numbers of virtqueues"));
        }
        let status = Status::from_bits_retain(state.status);
        let mut new = self.power_on();
        new.interrupts.restore(&state.vectors, state.isr)?;
        for (select, features) in (0..).zip(state.driver_features) {
            new.write_32(Register::DriverFeatureSelect, select);
            new.write_32(Register::DriverFeature, features);
        }
        let missing = super::lower(new.driver_features) & !new.offered;
        if status.contains(Status::FEATURES_OK) && missing != 0 {
            return Err(StateError::Features(missing));
        }
        if status.contains(Status::FEATURES_OK) && !new.acceptable() {
            return Err(StateError::Shape("virtio features"));
        }
        for (n, queue) in (0..).zip(&state.queues) {
            let _ = new.write_16(Register::QueueSelect, n);
            new.restore_queue(queue);
        }
        let _ = new.write_16(Register::ConfigMsixVector, state.config_vector);
        let drivers = status & DRIVERS;
        if !drivers.is_empty() {
            let _ = new.write_status(drivers.bits());
        }
        // A device does not ask for a reset before it runs.
        if status.contains(Status::DRIVER_OK | Status::DEVICE_NEEDS_RESET) {
            new.interrupts.set_needs_reset();
        }
        new.write_32(Register::DeviceFeatureSelect, state.device_feature_select);
        new.write_32(Register::DriverFeatureSelect, state.driver_feature_select);
        let _ = new.write_16(Register::QueueSelect, state.queue_select);
        if new.save() != *state {
            return Err(StateError::Value("the virtio registers"));
        }
        *self = new;
        Ok(())
    }

    /// Sets the registers of the selected queue.
    fn restore_queue(&mut self, state: &QueueState) {
        let _ = self.write_16(Register::QueueSize, state.size);
        let _ = self.write_16(Register::QueueMsixVector, state.vector);
        let QueueState { descriptor, driver, device, .. } = *state;
        for (area, address) in [(Area::Descriptor, descriptor), (Area::Driver, driver), (Area::Device, device)] {
            for half in [Half::Low, Half::High] {
                self.write_32(Register::QueueAddress(area, half), half.of(address));
            }
        }
        let _ = self.write_16(Register::QueueEnable, state.enabled.into());
    }
}

impl QueueRegisters {
    fn save(&self, vector: u16) -> QueueState {
        let Self { max_size: _, size, enabled, descriptor, driver, device } = *self;
        QueueState { size, vector, enabled, descriptor, driver, device }
    }
}
