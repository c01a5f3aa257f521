//! Exits of Hyper-V's hypervisor interface.

use kvm_bindings::{KVM_EXIT_HYPERV_HCALL, kvm_run};

/// The result of a hypercall for which the guest lacks the privilege (TLFS, HV_STATUS_ACCESS_DENIED).
const ACCESS_DENIED: u64 = 6;

/// Answers the exits that KVM leaves to this program.
///
/// Either the guest has set a register of its interrupt controller, and KVM has handled it. Or it posts a message, or
/// signals an event, to a host device: there are none, and CPUID gives no privilege for it.
pub(super) fn answer(run: &mut kvm_run) {
    // SAFETY: the exit's reason guarantees that KVM has filled in this member; any bytes are valid for it.
    let exit = unsafe { &mut run.__bindgen_anon_1.hyperv };
    if exit.type_ == KVM_EXIT_HYPERV_HCALL {
        // Writing a member of a union of plain data is safe.
        exit.u.hcall.result = ACCESS_DENIED;
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::KVM_EXIT_HYPERV_SYNIC;

    use super::*;

    /// The result of a hypercall after an exit of this kind.
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
            assert_eq!(result_of(kind), 0x1234, "{kind}: it has no reply");
        }
    }
}
