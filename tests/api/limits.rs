//! A VM stays within its limit of open files, even when its guest uses all its devices.

use serde_json::json;

use crate::client::Client;
use crate::vmm::{Vmm, reasons};

/// Descriptors per function: a tap, a doorbell and 4 interrupts.
const OF_FUNCTION: usize = 6;

/// 1024 is the usual limit of a login session.
#[test]
fn sixty_four_vfs_fit_into_1024_open_files() {
    let vmm = Vmm::limited(1024);
    vmm.boot(json!([{"id": "pf0", "tap": "alf", "sriov_vfs": 64}]));
    // So far each function has its tap. It gets the other descriptors when its driver is up.
    let open = vmm.open_files();
    assert!((65..120).contains(&open), "{open}");
    assert!(open + 65 * (OF_FUNCTION - 1) <= 1024 / 2, "{open}");
}

/// The descriptors that reserved VFs will need are kept for them.
#[test]
fn an_added_pf_does_not_take_the_files_that_other_vfs_may_need() {
    let vmm = Vmm::limited(1024);
    let mut client = vmm.boot(json!([{"id": "pf0", "tap": "alg", "sriov_vfs": 64}]));
    let mut add = |id, tap| client.put_json("vm.add-net", &json!({"id": id, "tap": tap, "sriov_vfs": 64}));
    add("pf1", "alh").expect(200);
    let refused = add("pf2", "ali");
    let said = reasons(&refused).join(": ");
    assert!(refused.status == 500 && said.contains("the limit is 1024"), "{said}");
}

/// accept(2) fails without a free descriptor, whether a client waits or not.
#[test]
fn idle_clients_leave_a_descriptor_for_the_next_one() {
    let vmm = Vmm::limited(40);
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..60 {
        let mut client = vmm.client();
        // The program has accepted this client, and waits for the next one.
        std::thread::sleep(std::time::Duration::from_millis(10));
        client.get("vmm.ping").expect(200);
        client.get("vmm.ping").expect(200);
        clients.push(client);
    }
}
