//! KVM's part of Hyper-V's interface of a hypervisor.

use kvm_bindings::{KVM_CAP_HYPERV_SYNIC, KVM_EXIT_HYPERV_HCALL, kvm_enable_cap, kvm_run};

use super::{Kvm, KvmError, Vcpu, failed};

/// The result of a hypercall for which the guest lacks the privilege (TLFS, HV_STATUS_ACCESS_DENIED).
const ACCESS_DENIED: u64 = 6;

impl Kvm {
    /// True if guests can have Hyper-V's interface, with its interrupt controller and timers.
    pub fn has_hyperv(&self) -> bool {
        self.kvm.check_extension_raw(KVM_CAP_HYPERV_SYNIC.into()) > 0
    }
}

impl Vcpu {
    /// Gives the vCPU Hyper-V's interrupt controller, which is off until the guest turns it on. It must be there before
    /// its registers are set, and stays.
    ///
    /// # Errors
    ///
    /// When the ioctl fails.
    pub fn enable_synic(&self) -> Result<(), KvmError> {
        let capability = kvm_enable_cap { cap: KVM_CAP_HYPERV_SYNIC, ..Default::default() };
        self.fd.enable_cap(&capability).map_err(failed("give a vCPU Hyper-V's interrupt controller"))
    }
}

/// Answers what KVM leaves to this program of Hyper-V's interface.
///
/// The guest has set a register of its interrupt controller: KVM has done everything. Or it posts a message, or signals
/// an event, to a device of the host: there are none, and CPUID gives no privilege for it.
pub(super) fn answer(run: &mut kvm_run) {
    // SAFETY: the exit's reason says that KVM has filled in this member; any bytes are valid for it.
    let exit = unsafe { &mut run.__bindgen_anon_1.hyperv };
    if exit.type_ == KVM_EXIT_HYPERV_HCALL {
        // A write of a union's member, which is plain data.
        exit.u.hcall.result = ACCESS_DENIED;
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::KVM_EXIT_HYPERV_SYNIC;

    use super::*;

    /// The number in place of a hypercall's result after an exit of this kind.
    fn result_of(kind: u32) -> u64 {
        let mut run = kvm_run::default();
        run.__bindgen_anon_1.hyperv.type_ = kind;
        run.__bindgen_anon_1.hyperv.u.hcall.result = 0x1234;
        answer(&mut run);
        // SAFETY: the number was written above.
        unsafe { run.__bindgen_anon_1.hyperv.u.hcall.result }
    }

    #[test]
    fn hypercalls_to_devices_of_the_host_are_denied() {
        assert_eq!(result_of(KVM_EXIT_HYPERV_HCALL), ACCESS_DENIED);
        for kind in [0, KVM_EXIT_HYPERV_SYNIC, 3, u32::MAX] {
            assert_eq!(result_of(kind), 0x1234, "{kind}: nothing is to be answered");
        }
    }
}
