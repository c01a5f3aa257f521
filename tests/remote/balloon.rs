//! A VM with a balloon, whose guest does not drive it.

use serde_json::{Value, json};

use crate::vmm::Vmm;

#[test]
fn a_balloon_is_resized_and_keeps_its_size_for_the_next_boot() {
    let vmm = Vmm::start(&[]);
    vmm.done(&["create", "--kernel", "k", "--memory", "size=1G", "--balloon", "size=0,deflate_on_oom=on"]);
    let info = || serde_json::from_str::<Value>(&vmm.done(&["info"])).unwrap();
    vmm.done(&["resize", "--balloon", "512M"]);
    let balloon = json!({
        "id": "__balloon", "size": 512 << 20, "deflate_on_oom": true, "free_page_reporting": false, "pci_segment": 0,
        "iommu": false,
    });
    assert_eq!(info()["config"]["balloon"], balloon);
    assert_eq!(info()["memory_actual_size"], json!(1 << 30), "the guest has returned nothing yet");
    let said = vmm.refused(&["resize", "--balloon", "1G"]);
    assert!(said.contains("desired_balloon=1073741824: the guest has 1G of memory"), "{said}");
    assert!(vmm.refused(&["remove-device", "__balloon"]).contains("stays as long as its VM"));
    let vdpa = vmm.refused(&["add-vdpa", "path=/dev/vhost-vdpa-0,id=v"]);
    assert!(vdpa.contains("--vdpa id=v may have pinned the memory that a balloon returns"), "{vdpa}");
    assert_eq!(info()["config"]["balloon"], balloon);
}

#[test]
fn a_vm_without_a_balloon_cannot_be_asked_for_memory() {
    let vmm = Vmm::start(&[]);
    vmm.done(&["create", "--kernel", "k"]);
    vmm.done(&["resize", "--balloon", "0"]);
    let said = vmm.refused(&["resize", "--balloon", "1M"]);
    assert!(said.contains("create it with one (--balloon size=0)") && said.ends_with("(status 400)"), "{said}");
}
