//! The host's operations on an X550.

use pci::{Reach, VfIndex};

use super::{X550Function, X550Sriov, place};
use crate::function::host::queues_changed;
use crate::{DeviceState, Fault, FaultError, Lifecycle, NotResumed, Outcome, StateError};

impl X550Sriov {
    /// Holds a function, or releases it.
    fn hold(&self, vf: Option<VfIndex>, held: bool) -> Outcome {
        let Some(function) = self.function(vf) else { return Outcome::none() };
        self.nic().hold(place(vf), held);
        queues_changed(Reach::Function(function.rid()), self.path.queues_changed(self.nic()))
    }

    /// Loses interrupts of a function.
    fn lose(&self, function: &X550Function, fault: Fault) -> Result<Outcome, FaultError> {
        let (Fault::LoseInterrupts { name, vector, count }, Some(vectors)) = (fault, function.vectors()) else {
            return Err(FaultError::NotVirtio);
        };
        let last = vectors.count().saturating_sub(1);
        if let Some(vector) = vector.filter(|vector| *vector > last) {
            return Err(FaultError::NoVector { vector, last });
        }
        vectors.lose(name, vector, count);
        Ok(Outcome::none())
    }
}

impl Lifecycle for X550Sriov {
    fn pause(&mut self) -> Outcome {
        self.nic().pause(true);
        queues_changed(Reach::Device, self.path.pause(self.nic()))
    }

    fn resume(&mut self) -> Outcome {
        self.nic().pause(false);
        self.not_resumed = self.path.resume(self.nic()).err();
        let mut stopping = Vec::new();
        if self.not_resumed.is_some() {
            // The drivers are not at fault: the host may try again.
            self.nic().pause(true);
            stopping = self.path.pause(self.nic());
        }
        queues_changed(Reach::Device, stopping)
    }

    fn pause_function(&mut self, vf: Option<VfIndex>) -> Outcome {
        self.hold(vf, true)
    }

    fn resume_function(&mut self, vf: Option<VfIndex>) -> Outcome {
        self.hold(vf, false)
    }

    fn inject(&mut self, vf: Option<VfIndex>, fault: Fault) -> Result<Outcome, FaultError> {
        match (vf, fault) {
            (None, Fault::RefuseVfEnable { count }) if self.sriov().is_some() => {
                self.functions.fail_enables(count);
                Ok(Outcome::none())
            }
            (_, Fault::RefuseVfEnable { .. }) => Err(FaultError::NotPf),
            (Some(index), Fault::Removal) => {
                let outcome = self.functions.remove_vf(index).ok_or(FaultError::NoVf)?;
                Ok(self.settle(outcome))
            }
            (None, Fault::Removal) => Err(FaultError::NoVf),
            (vf, fault) => self.lose(self.function(vf).ok_or(FaultError::NoVf)?, fault),
        }
    }

    fn take_not_resumed(&mut self) -> Option<NotResumed> {
        self.not_resumed.take().map(|error| NotResumed { vf: None, error })
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        self.save_all().map(Some)
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.restore_all(state)
    }
}
