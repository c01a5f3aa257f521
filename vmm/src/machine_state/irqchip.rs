//! The interrupt controllers in the kernel: two PICs and the IOAPIC. Local APICs belong to their vCPUs.

use serde::{Deserialize, Serialize};

use crate::kvm::{KvmError, Vm};
use crate::machine_state::blob::Blob;
use crate::machine_state::error::RestoreError;

/// The interrupt controllers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IrqchipState {
    /// The first PIC, the second and the IOAPIC, as KVM describes each (`struct kvm_irqchip`).
    pub chips: [Blob; 3],
}

impl IrqchipState {
    /// State of the interrupt controllers of `vm`.
    ///
    /// # Errors
    ///
    /// An ioctl fails.
    pub(crate) fn save(vm: &Vm) -> Result<Self, KvmError> {
        let [first, second, ioapic] = [0, 1, 2].map(|chip| vm.irqchip(chip).map(|chip| Blob::of(&chip)));
        Ok(Self { chips: [first?, second?, ioapic?] })
    }

    /// Brings those of `vm` to this state. Interrupts that wait in the IOAPIC go to the local APICs, which are to be in
    /// their state already.
    ///
    /// # Errors
    ///
    /// The state is of something else, or KVM refuses it.
    pub(crate) fn restore(&self, vm: &Vm) -> Result<(), RestoreError> {
        for (id, chip) in (0..).zip(&self.chips) {
            let mut chip: kvm_bindings::kvm_irqchip =
                chip.read().ok_or(RestoreError::Value("the interrupt controllers"))?;
            // Which one it is follows from its place.
            if chip.chip_id != id {
                return Err(RestoreError::Value("the interrupt controllers"));
            }
            chip.pad = 0;
            vm.set_irqchip(&chip)?;
        }
        Ok(())
    }
}
