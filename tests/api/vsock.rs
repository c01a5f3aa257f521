//! The vsock device of a VM, through the API.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use serde_json::json;

use crate::rig::vmm::{Vmm, reasons, wait_for};

#[test]
fn a_vm_has_one_vsock_device_which_can_be_added_and_removed() {
    let vmm = Vmm::start();
    let socket = vmm.files.path("vsock");
    let mut client = vmm.boot(json!([]));
    let add = json!({"cid": 3, "socket": &socket, "iommu": false, "id": null});
    assert_eq!(client.put_json("vm.add-vsock", &add).expect(200)["id"], "_vsock0");
    let config = client.get("vm.info").expect(200)["config"]["vsock"].clone();
    assert_eq!((&config["cid"], &config["socket"], &config["id"]), (&json!(3), &json!(socket), &json!("_vsock0")));
    let second = client.put_json("vm.add-vsock", &json!({"cid": 4, "socket": vmm.files.path("other")}));
    let said = "--vsock: the place of the only socket device of a VM is already in use by _vsock0; use that, or remove \
                it first";
    assert_eq!((second.status, reasons(&second)), (409, vec!["the vsock device cannot be added", said]));
    // No driver runs, so a client waits, and may disconnect.
    let mut waiting = UnixStream::connect(&socket).unwrap();
    waiting.write_all(b"CONNECT 5\n").unwrap();
    drop(waiting);
    client.put_json("vm.remove-device", &json!({"id": "_vsock0"})).expect(204);
    client.put("vm.reboot").expect(204);
    assert!(!socket.exists());
    client.put_json("vm.add-vsock", &add).expect(200);
    let mut waiting = UnixStream::connect(&socket).unwrap();
    client.put("vm.delete").expect(204);
    assert!(!matches!(waiting.read(&mut [0]), Ok(1)));
    assert!(!socket.exists());
}

#[test]
fn a_socket_in_use_is_refused_and_leaves_the_vm_unchanged() {
    let vmm = Vmm::start();
    let socket = vmm.files.path("taken");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut client = vmm.boot(json!([]));
    let add = json!({"cid": 3, "socket": &socket});
    let files = vmm.open_files();
    for _ in 0..3 {
        let refused = client.put_json("vm.add-vsock", &add);
        assert_eq!((refused.status, reasons(&refused)[0]), (409, "the vsock device cannot be added"));
        assert!(reasons(&refused)[1].contains("another program is listening there"), "{refused:?}");
    }
    assert_eq!(vmm.open_files(), files);
    assert!(client.get("vm.info").expect(200)["config"]["vsock"].is_null());
    // Left over, as after a program was killed.
    drop(listener);
    // A child that another test has just forked may have the socket until it executes its program.
    wait_for("the socket", || client.put_json("vm.add-vsock", &add).status == 200);
}

#[test]
fn a_configured_vsock_device_listens_once_the_vm_is_booted() {
    let vmm = Vmm::start();
    let socket = vmm.files.path("vsock");
    let mut client = vmm.client();
    let mut config = vmm.config(json!([]));
    config["vsock"] = json!({"cid": 3, "iommu": false, "socket": &socket});
    client.put_json("vm.create", &config).expect(204);
    assert!(!socket.exists());
    client.put("vm.boot").expect(204);
    UnixStream::connect(&socket).unwrap();
    client.put("vm.shutdown").expect(204);
    assert!(!socket.exists());
    client.put("vm.boot").expect(204);
    assert!(socket.exists());
    for cid in [json!(2), json!(u32::MAX), json!(u64::MAX), json!(-1)] {
        let refused = client.put_json("vm.add-vsock", &json!({"cid": cid, "socket": "x"}));
        assert!(matches!(refused.status, 400 | 409), "{refused:?}");
    }
}
