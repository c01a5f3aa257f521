//! Hyper-V's hypervisor interface in KVM.

use kvm_bindings::{KVM_CAP_HYPERV_SYNIC, kvm_enable_cap};

use super::{Kvm, KvmError, Vcpu, failed};

impl Kvm {
    /// True if guests can have Hyper-V's interface, with its interrupt controller and timers.
    pub fn has_hyperv(&self) -> bool {
        self.kvm.check_extension_raw(KVM_CAP_HYPERV_SYNIC.into()) > 0
    }
}

impl Vcpu {
    /// Enables Hyper-V's interrupt controller (SynIC) and timers in the vCPU. The controller must exist before its
    /// registers are set, and stays.
    ///
    /// # Errors
    ///
    /// Fails if the ioctl fails.
    pub fn enable_synic(&self) -> Result<(), KvmError> {
        let capability = kvm_enable_cap { cap: KVM_CAP_HYPERV_SYNIC, ..Default::default() };
        self.fd.enable_cap(&capability).map_err(failed("give a vCPU Hyper-V's interrupt controller"))
    }
}
