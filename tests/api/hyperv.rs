//! Hyper-V's interface of a hypervisor, on a host whose KVM has it or has not.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;

use serde_json::{Value, json};

use crate::client::Answer;
use crate::snapshot::{folder, restore, said, snapshot};
use crate::vmm::Vmm;

/// `KVM_CHECK_EXTENSION`, and `KVM_CAP_HYPERV_SYNIC` (`linux/kvm.h`).
const CHECK: (libc::c_ulong, libc::c_ulong) = (0xae03, 123);
/// The leaf with the kind of a hypervisor's interface.
const LEAF: u32 = 0x4000_0001;
const LACKING: &str = "--cpus kvm_hyperv=on: the KVM of this host has no Hyper-V enlightenments \
    (KVM_CAP_HYPERV_SYNIC); choose a host whose kernel has them (CONFIG_KVM_HYPERV), or boot the guest without";

fn host_has_it() -> bool {
    let kvm = File::open("/dev/kvm").unwrap();
    // SAFETY: the call passes two numbers, and answers with one.
    unsafe { libc::ioctl(kvm.as_raw_fd(), CHECK.0, CHECK.1) > 0 }
}

/// Checks the answer to a request for a VM with this interface. Returns whether there is one now.
#[track_caller]
fn check(answer: &Answer) -> bool {
    let has = host_has_it();
    match has {
        true => assert_eq!(answer.status, 204, "{answer:?}"),
        false => assert_eq!((answer.status, &said(answer)[..]), (500, LACKING)),
    }
    has
}

#[test]
fn hyperv_is_given_to_a_guest_or_refused_in_one_line() {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    let mut config = vmm.config(json!([]));
    config["cpus"]["kvm_hyperv"] = json!(true);
    client.put_json("vm.create", &config).expect(204);
    let has = check(&client.put("vm.boot"));
    let info = client.get("vm.info").expect(200);
    assert_eq!(info["config"]["cpus"]["kvm_hyperv"], true);
    assert_eq!(info["state"], if has { "Running" } else { "Created" });
    client.put("vm.delete").expect(204);
    config["cpus"]["kvm_hyperv"] = json!(false);
    client.put_json("vm.create", &config).expect(204);
    client.put("vm.boot").expect(204);
    assert_eq!(client.get("vm.info").expect(200)["config"]["cpus"]["kvm_hyperv"], false);
}

/// Edits a JSON file of a snapshot.
fn edit(path: &std::path::Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn a_saved_guest_of_hyperv_needs_a_host_that_has_it() {
    let source = Vmm::start();
    let mut client = source.boot(json!([]));
    client.put("vm.pause").expect(204);
    let (path, url) = folder(&source, "saved");
    snapshot(&mut client, &url).expect(204);
    client.put("vm.delete").expect(204);
    edit(&path.join("config.json"), |config| config["cpus"]["kvm_hyperv"] = json!(true));
    let told = "cpus.kvm_hyperv: true in the configuration, and the guest was told false, which has to stay; give that";
    let refused = restore(&mut client, &url, "Copy");
    assert_eq!((refused.status, said(&refused).ends_with(told)), (400, true), "{refused:?}");
    // The guest has found the other interface.
    edit(&path.join("state.json"), |state| {
        let leaves = state["state"]["machine"]["cpuid"].as_array_mut().unwrap();
        let leaf = leaves.iter_mut().find(|leaf| leaf["leaf"] == LEAF).unwrap();
        leaf["registers"][0] = json!(u32::from_le_bytes(*b"Hv#1"));
    });
    let answer = restore(&mut client, &url, "Copy");
    if !check_restored(&answer) {
        client.get("vmm.ping").expect(200);
        assert_eq!(client.get("vm.info").status, 404);
    }
    edit(&path.join("config.json"), |config| config["cpus"]["kvm_hyperv"] = json!(false));
    let target = Vmm::start();
    let refused = restore(&mut target.client(), &url, "Copy");
    let told = "cpus.kvm_hyperv: false in the configuration, and the guest was told true, which has to stay; give that";
    assert_eq!((refused.status, said(&refused).ends_with(told)), (400, true), "{refused:?}");
}

/// As [`check`]; what was said before says which file it is about.
#[track_caller]
fn check_restored(answer: &Answer) -> bool {
    if host_has_it() {
        return check(answer);
    }
    assert_eq!((answer.status, said(answer).ends_with(LACKING)), (500, true), "{answer:?}");
    false
}
