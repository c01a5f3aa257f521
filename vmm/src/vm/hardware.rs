//! The hardware of older PCs that a machine has, depending on its payload.

use crate::arch::x86_64::legacy::LegacyHardware;
use crate::arch::x86_64::mp_table;
use crate::firmware::FirmwarePorts;
use crate::vm::boot::Payload;
use crate::vm::{Vm, VmError};

impl Vm {
    /// Opens the payload if that was not possible when the VM was restored, and adds the hardware that it needs. Until
    /// then a restored guest has the hardware of its state.
    pub(super) fn open_payload(&mut self) -> Result<(), VmError> {
        let payload = match self.payload.take() {
            Some(payload) => payload,
            None => Payload::open(&self.payload_config, &self.layout)?,
        };
        self.is_firmware = payload.is_firmware();
        self.legacy = if self.has_all_legacy { LegacyHardware::ALL } else { payload.legacy() };
        if self.cpus.kvm_hyperv {
            // Linux finds no KVM clock then.
            self.legacy = LegacyHardware { pm_timer: true, clock: true, ..self.legacy };
        }
        self.payload = Some(payload);
        Ok(())
    }

    /// The vCPUs as the MP table lists them.
    pub(super) fn processors(&self) -> mp_table::Processors {
        let leaf = self.cpuid.entries().iter().find(|leaf| leaf.function == 1);
        let (signature, features) = leaf.map_or((0, 0), |leaf| (leaf.eax, leaf.edx));
        let apic_ids = (0..u32::from(self.vcpus)).map(|id| self.cpuid.apic_id(id) as u8).collect();
        mp_table::Processors { apic_ids, signature, features }
    }

    /// The ports of older PCs that the guest has, in their state of power-on.
    pub(super) fn firmware_ports(&self) -> Option<FirmwarePorts> {
        (self.legacy != LegacyHardware::NONE).then(|| FirmwarePorts::new(self.devices.bus(), self.legacy))
    }
}
