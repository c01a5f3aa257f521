//! The saved state of devices in their places.

use std::collections::HashSet;

use crate::config::DevicePlan;
use crate::devices::kind;
use crate::devices::places::Place;
use crate::devices::{Devices, Plugged};
use crate::lazy_memory::discarded::Discarded;
use crate::machine_state::SavedDevice;
use crate::machine_state::error::{RestoreError, SaveError};

impl Devices {
    /// The state of all devices, which are paused, by segment and slot.
    ///
    /// # Errors
    ///
    /// Fails if a device cannot be saved.
    pub(crate) fn save(&self) -> Result<Vec<SavedDevice>, SaveError> {
        let mut saved = self.plugged.iter().map(Plugged::save).collect::<Result<Vec<_>, _>>()?;
        saved.sort_by_key(|device| (device.segment, device.slot));
        Ok(saved)
    }

    /// Persistent memory whose writes are discarded and are in no file.
    pub(crate) fn discarded(&self) -> Discarded {
        let discards = |plugged: &&Plugged| kind::discards_writes(&plugged.plan);
        let areas = |plugged: &Plugged| {
            let mut areas = Vec::new();
            plugged.slot.with(|device| device.memory(&mut areas));
            let option = plugged.plan.option();
            areas.into_iter().map(move |area| (option.clone(), area.memory))
        };
        Discarded(self.plugged.iter().filter(discards).flat_map(areas).collect())
    }

    /// All devices in their places, without their states, by segment and slot.
    pub(crate) fn outline(&self) -> Vec<SavedDevice> {
        let mut devices: Vec<_> = self.plugged.iter().map(Plugged::outline).collect();
        devices.sort_by_key(|device| (device.segment, device.slot));
        devices
    }

    /// Restores the states of all devices, which are at the places in `saved` and never ran, and pauses them.
    ///
    /// # Errors
    ///
    /// Fails if a device cannot be restored.
    pub(crate) fn restore(&mut self, saved: &[SavedDevice]) -> Result<(), RestoreError> {
        // Also those without a state.
        self.pause();
        for device in saved {
            let plugged = self.plugged.iter_mut().find(|plugged| plugged.plan.id == device.id);
            let plugged = plugged.ok_or(RestoreError::Value("the devices"))?;
            let option = plugged.plan.option();
            if let Some(state) = &device.state {
                plugged.slot.restore(state).map_err(|error| RestoreError::Device { option, error })?;
            }
            plugged.going = device.leaving;
        }
        Ok(())
    }
}

impl Plugged {
    fn save(&self) -> Result<SavedDevice, SaveError> {
        let option = || self.plan.option();
        if let Some(why) = self.lost() {
            return Err(SaveError::Refused { option: option(), why });
        }
        let state = self.slot.save().map_err(|error| SaveError::Device { option: option(), error })?;
        Ok(SavedDevice { state, ..self.outline() })
    }

    fn outline(&self) -> SavedDevice {
        SavedDevice {
            id: self.plan.id.clone(),
            segment: self.placement.segment,
            bus: self.placement.rid.bus(),
            slot: self.placement.rid.device(),
            first_vf_bus: self.placement.first_vf_bus(),
            leaving: self.going,
            state: None,
        }
    }

    /// Reason why the device cannot be saved, or moved to another host: a part of its state is neither in a file, nor
    /// in a register, nor in the guest's memory.
    pub(crate) fn lost(&self) -> Option<&'static str> {
        kind::unsaved(&self.plan, || self.is_driven())
    }

    /// True if its driver is up.
    fn is_driven(&self) -> bool {
        let status = self.slot.with(|device| device.function_status(None)).flatten();
        status.is_some_and(|status| !status.driver.is_empty())
    }
}

/// The places of the devices `plans`, which must be the saved ones.
///
/// # Errors
///
/// Fails if the devices differ.
pub(crate) fn places(plans: &[DevicePlan], saved: &[SavedDevice]) -> Result<Vec<Place>, RestoreError> {
    let names = |names: Vec<&str>| if names.is_empty() { "none".to_string() } else { names.join(", ") };
    let mut ids = HashSet::new();
    if !saved.iter().all(|device| ids.insert(&device.id)) {
        return Err(RestoreError::Value("the ids of devices"));
    }
    let surplus: Vec<_> = saved.iter().filter(|device| plans.iter().all(|plan| plan.id != device.id)).collect();
    let missing: Vec<_> = plans.iter().filter(|plan| !ids.contains(&plan.id)).collect();
    if !surplus.is_empty() || !missing.is_empty() {
        let state = format!("devices {}", names(surplus.iter().map(|device| device.id.as_str()).collect()));
        let config = format!("instead {}", names(missing.iter().map(|plan| plan.id.as_str()).collect()));
        return Err(RestoreError::Shape { state, config });
    }
    let place = |plan: &DevicePlan| {
        let device = saved.iter().find(|device| device.id == plan.id).ok_or(RestoreError::Value("the devices"))?;
        if device.segment != plan.pci_segment {
            let state = format!("{} on segment {}", plan.option(), device.segment);
            return Err(RestoreError::Shape { state, config: format!("pci_segment={}", plan.pci_segment) });
        }
        if device.bus != plan.root_bus() {
            let state = format!("{} on root bus {}", plan.option(), device.bus);
            return Err(RestoreError::Shape { state, config: format!("root bus {} (numa=)", plan.root_bus()) });
        }
        Ok(Place::At { slot: device.slot, first_vf_bus: device.first_vf_bus })
    };
    plans.iter().map(place).collect()
}
