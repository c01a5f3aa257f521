//! Faults of a function that the host asks for.

use pci::Effects;

use super::VirtioFunction;
use crate::{Fault, FaultError, Outcome, Status, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// Makes or arms `fault` in this function; see [`pci::Function`] for `powered`.
    pub(crate) fn inject(&mut self, fault: Fault, powered: bool) -> Result<Outcome, FaultError> {
        match fault {
            Fault::NeedsReset if !self.status().contains(Status::DRIVER_OK) => Err(FaultError::NoDriver),
            Fault::NeedsReset => Ok(self.change(powered, |this| {
                this.transport.interrupts().ask_for_reset();
                // The queues stop.
                Effects::QUEUES.into()
            })),
            // The kernel or another process signals the driver.
            Fault::LoseInterrupts { .. } if self.device.memory_user().is_some() => Err(FaultError::Backend),
            Fault::LoseInterrupts { name, vector, count } => {
                let last = self.layout.msix().vectors.saturating_sub(1);
                if let Some(vector) = vector.filter(|vector| *vector > last) {
                    return Err(FaultError::NoVector { vector, last });
                }
                self.transport.interrupts().lose(name, vector, count);
                Ok(Outcome::none())
            }
            Fault::RefuseVfEnable { .. } => Err(FaultError::NotPf),
            Fault::Removal => Err(FaultError::NoVf),
        }
    }
}
