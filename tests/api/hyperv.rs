//! Hyper-V's hypervisor interface, with and without support in the host's KVM.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use serde_json::json;

use crate::rig::vmm::{Vmm, reasons};

/// `KVM_CHECK_EXTENSION`, and `KVM_CAP_HYPERV_SYNIC` (`linux/kvm.h`).
const CHECK: (libc::c_ulong, libc::c_ulong) = (0xae03, 123);
const LACKING: &str = "the VM cannot be booted: --cpus kvm_hyperv=on: the KVM of this host has no Hyper-V \
    enlightenments (KVM_CAP_HYPERV_SYNIC); choose a host whose kernel has them (CONFIG_KVM_HYPERV), \
    or boot the guest without";

fn host_has_it() -> bool {
    let kvm = File::open("/dev/kvm").unwrap();
    // SAFETY: the call passes two numbers, and returns one.
    unsafe { libc::ioctl(kvm.as_raw_fd(), CHECK.0, CHECK.1) > 0 }
}

#[test]
fn hyperv_is_given_to_a_guest_or_refused_in_one_line() {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    let mut config = vmm.config(json!([]));
    config["cpus"]["kvm_hyperv"] = json!(true);
    client.put_json("vm.create", &config).expect(204);
    let (answer, has) = (client.put("vm.boot"), host_has_it());
    assert_eq!(answer.status, if has { 204 } else { 500 }, "{answer:?}");
    assert!(has || reasons(&answer).join(": ") == LACKING, "{answer:?}");
    let info = client.get("vm.info").expect(200);
    assert_eq!(info["config"]["cpus"]["kvm_hyperv"], true);
    assert_eq!(info["state"], if has { "Running" } else { "Created" });
    client.put("vm.delete").expect(204);
    config["cpus"]["kvm_hyperv"] = json!(false);
    client.put_json("vm.create", &config).expect(204);
    client.put("vm.boot").expect(204);
    assert_eq!(client.get("vm.info").expect(200)["config"]["cpus"]["kvm_hyperv"], false);
}
