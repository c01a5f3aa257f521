//! The TPM of a VM, through the API.

use std::os::unix::net::UnixListener;

use serde_json::json;

use crate::rig::vmm::{Vmm, reasons};

#[test]
fn a_vm_with_a_tpm_needs_its_swtpm_to_boot() {
    let vmm = Vmm::start();
    let socket = vmm.files.path("tpm");
    let mut config = vmm.config(json!([]));
    let mut client = vmm.client();
    config["tpm"] = json!({"socket": ""});
    assert_eq!(client.put_json("vm.create", &config).status, 400);
    config["tpm"] = json!({"socket": &socket});
    client.put_json("vm.create", &config).expect(204);
    assert_eq!(client.get("vm.info").expect(200)["config"]["tpm"], json!({"socket": &socket}));
    let mut is_refused = |status: u16, what: &str| {
        let refused = client.put("vm.boot");
        assert!(refused.status == status && reasons(&refused)[1].contains(what), "{refused:?}");
    };
    is_refused(400, "cannot be connected to: No such file or directory (os error 2); start swtpm first");
    // Accepts, and disconnects.
    let listener = UnixListener::bind(&socket).unwrap();
    let other = std::thread::spawn(move || drop(listener.accept().unwrap()));
    is_refused(500, "cannot ask swtpm what it can do: ");
    other.join().unwrap();
    client.put("vm.delete").expect(204);
}
