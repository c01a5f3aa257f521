//! The socket for readers of a confined VM.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::process::Command;

use serde_json::json;

use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, reasons, wait_for};

#[test]
fn readers_see_a_confined_vm_and_cannot_change_it() {
    let mut command = Command::new(BINARY);
    command.args(["--read-only-socket", "readers"]);
    let vmm = Vmm::of(command);
    let socket = vmm.files.path("readers");
    wait_for("the socket", || socket.exists());
    let file = fs::metadata(&socket).unwrap();
    assert!(file.file_type().is_socket());
    assert_eq!(file.permissions().mode() & 0o077, 0, "of this user alone");
    let mut config = vmm.config(json!([{"id": "pf0", "switch": "veb", "sriov_vfs": 2}]));
    config["landlock_enable"] = json!(true);
    config["payload"]["cmdline"] = json!("secret");
    let mut client = vmm.boot_config(&config);

    let mut reader = Client::connect(&socket);
    let info = reader.get("vm.info").expect(200);
    assert_eq!((&info["state"], info["sriov"][0]["vfs"].as_array().unwrap().len()), (&json!("Running"), 2));
    assert_eq!(info["config"]["payload"].get("cmdline"), None);
    assert_eq!(client.get("vm.info").expect(200)["config"]["payload"]["cmdline"], "secret");
    assert!(reader.get("vm.counters").expect(200)["pf0v1"].is_object());
    for change in ["vm.pause", "vm.set-vf", "vm.delete", "vmm.shutdown"] {
        let refused = reader.put(change);
        assert_eq!(refused.status, 403);
        let expected = format!("{change}: this socket is read-only; use the socket of --api-socket");
        assert_eq!(reasons(&refused), [expected.as_str()]);
    }
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    client.put("vmm.shutdown").expect(200);
    assert_eq!(vmm.end(), Some(0));
    assert!(!socket.exists());
}
