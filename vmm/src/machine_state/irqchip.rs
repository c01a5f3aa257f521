//! KVM's interrupt controllers: two PICs and the IOAPIC. Local APICs belong to their vCPUs.

use serde::{Deserialize, Serialize};

use crate::kvm::{KvmError, Vm};
use crate::machine_state::blob::Blob;
use crate::machine_state::error::RestoreError;

/// State of the interrupt controllers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IrqchipState {
    /// First PIC, second PIC and IOAPIC (`struct kvm_irqchip` each).
    pub chips: [Blob; 3],
}

impl IrqchipState {
    /// Saves the interrupt controllers of `vm`.
    ///
    /// # Errors
    ///
    /// Fails if an ioctl fails.
    pub(crate) fn save(vm: &Vm) -> Result<Self, KvmError> {
        let [first, second, ioapic] = [0, 1, 2].map(|chip| vm.irqchip(chip).map(|chip| Blob::of(&chip)));
        Ok(Self { chips: [first?, second?, ioapic?] })
    }

    /// Restores the interrupt controllers of `vm`. Restore the local APICs first: the IOAPIC's pending interrupts go
    /// there.
    ///
    /// # Errors
    ///
    /// Fails if the state is malformed, or KVM rejects it.
    pub(crate) fn restore(&self, vm: &Vm) -> Result<(), RestoreError> {
        for (id, chip) in (0..).zip(&self.chips) {
            let mut chip: kvm_bindings::kvm_irqchip =
                chip.read().ok_or(RestoreError::Value("the interrupt controllers"))?;
            // The position determines the chip's id.
            if chip.chip_id != id {
                return Err(RestoreError::Value("the interrupt controllers"));
            }
            chip.pad = 0;
            vm.set_irqchip(&chip)?;
        }
        Ok(())
    }
}
