//! The report on a guest that does not answer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use integration::{Guest, GuestSpec, Kernel, record_exits};

#[test]
fn a_silent_guest_is_described_and_its_vcpus_entered_again() {
    record_exits();
    let mut guest = Guest::boot(GuestSpec::new(Kernel::V6_12));
    guest.vmm().signal(libc::SIGSTOP);
    let silent = catch_unwind(AssertUnwindSafe(|| guest.run_within("echo awake", Duration::from_secs(1))));
    let report = silent.expect_err("the guest is stopped");
    let report = report.downcast_ref::<String>().expect("a panic with a text");
    for part in ["vcpu0) T", "kvm_exit", "/exits: ", "interrupts", "kernel log:\n[", " 0 untouched"] {
        assert!(report.contains(part), "{part:?} is not in {report}");
    }
    assert!(!report.contains(" 0 after its vCPUs entered it again"), "{report}");
    assert_eq!(guest.ok("echo $((6 * 7))"), "42");
}
