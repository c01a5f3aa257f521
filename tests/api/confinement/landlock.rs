//! A VM with Landlock: the program can use only the files that it names. These tests need a kernel with Landlock.

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::files::Files;
use crate::net::tap::Kept;
use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, reasons, wait_for};

/// The configuration of a VM with Landlock, and with further settings.
fn confined(vmm: &Vmm, further: &Value) -> Value {
    let mut config = vmm.config(json!([]));
    config["landlock_enable"] = json!(true);
    for (key, value) in further.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn disk(vmm: &Vmm, name: &str) -> Value {
    json!({"id": name, "path": vmm.files.sparse(name, 1 << 20)})
}

/// Waits until the VMM has removed the device `id`: a guest without drivers releases it when it restarts.
fn removed(client: &mut Client, id: &str) {
    client.put_json("vm.remove-device", &json!({"id": id})).expect(204);
    client.put("vm.reboot").expect(204);
    let info = client.get("vm.info").expect(200);
    assert!(!info.to_string().contains(&format!("\"id\":\"{id}\"")), "{info}");
}

#[test]
fn a_confined_vm_reboots_boots_again_and_adds_what_rules_name() {
    let vmm = Vmm::start();
    let _tap = Kept::new("apill0");
    let folder = vmm.files.path("later");
    fs::create_dir(&folder).unwrap();
    let later = |name: &str| {
        let path = folder.join(name);
        File::create(&path).unwrap().set_len(2 << 20).unwrap();
        path
    };
    let config = confined(
        &vmm,
        &json!({
            "disks": [disk(&vmm, "a")],
            "pmem": [{"file": vmm.files.sparse("pmem", 2 << 20)}],
            "net": [{"id": "n", "tap": "apill0"}],
            "serial": {"mode": "File", "file": vmm.files.path("serial")},
            "console": {"mode": "Socket", "socket": vmm.files.path("console")},
            "debug_console": {"mode": "Pty"},
            "vsock": {"cid": 3, "socket": vmm.files.path("vsock")},
            "landlock_rules": [{"path": folder, "access": "rw"}],
        }),
    );
    let mut client = vmm.boot_config(&config);
    let printed = client.get("vm.info").expect(200)["config"].clone();
    assert_eq!((&printed["landlock_enable"], &printed["landlock_rules"]), (&json!(true), &config["landlock_rules"]));
    for (endpoint, device) in [
        ("vm.add-disk", json!({"id": "b", "path": later("b")})),
        ("vm.add-pmem", json!({"id": "p", "file": later("p")})),
        ("vm.add-net", json!({"id": "m", "tap": "apill1"})),
    ] {
        client.put_json(endpoint, &device).expect(200);
    }
    client.put("vm.reboot").expect(204);
    removed(&mut client, "b");
    client.put_json("vm.add-disk", &json!({"id": "b", "path": folder.join("b")})).expect(200);
    client.put_json("vm.resize-disk", &json!({"id": "b", "desired_size": 1 << 20})).expect(204);
    client.put("vm.shutdown").expect(204);
    assert!(!vmm.files.path("console").exists() && !vmm.files.path("vsock").exists());
    client.put("vm.boot").expect(204);
    UnixStream::connect(vmm.files.path("console")).unwrap();
    UnixStream::connect(vmm.files.path("vsock")).unwrap();
    client.put("vm.pause").expect(204);
    client.put("vm.resume").expect(204);
    client.put_json("vm.resize", &json!({"desired_vcpus": 1})).expect(204);
    client.put("vmm.shutdown").expect(200);
    for socket in ["socket", "console", "vsock"] {
        let path = vmm.files.path(socket);
        wait_for("sockets to be removed", || !path.exists());
    }
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn a_device_beyond_the_rules_is_refused_with_path_and_remedy() {
    let vmm = Vmm::start();
    let mut client = vmm.boot_config(&confined(&vmm, &json!({"disks": [disk(&vmm, "a")]})));
    // Not in the folder of the API's socket, where creating files is allowed.
    let other = Files::new();
    let folder = other.path("other");
    fs::create_dir(&folder).unwrap();
    let path = folder.join("b");
    File::create(&path).unwrap().set_len(2 << 20).unwrap();
    let _listener = UnixListener::bind(folder.join("peer")).unwrap();
    for (endpoint, device, option, path, access) in [
        ("vm.add-disk", json!({"id": "b", "path": path}), "--disk id=b", &*path, "rw"),
        ("vm.add-disk", json!({"id": "b", "path": path, "readonly": true}), "--disk id=b", &*path, "r"),
        ("vm.add-pmem", json!({"id": "b", "file": path}), "--pmem id=b", &*path, "rw"),
        ("vm.add-net", json!({"id": "b", "tap": "apillb"}), "--net id=b", Path::new("/dev/net/tun"), "rw"),
        ("vm.add-vsock", json!({"id": "b", "cid": 3, "socket": folder.join("s")}), "--vsock id=b", &*folder, "w"),
    ] {
        let answer = client.put_json(endpoint, &device);
        let path = path.display();
        let said = format!(
            "{option}: --landlock keeps this program from {path}; create the VM with --landlock-rules \
             path={path},access={access}, in a new process"
        );
        assert_eq!((answer.status, reasons(&answer).last().copied()), (409, Some(said.as_str())), "{answer:?}");
    }
    let info = client.get("vm.info").expect(200);
    assert_eq!(info["config"]["disks"].as_array().unwrap().len(), 1);
}

#[test]
fn a_file_that_is_missing_or_replaced_is_named() {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    let missing = vmm.files.path("missing");
    let path = missing.display();
    for (further, option) in [
        (json!({"disks": [{"id": "a", "path": missing}]}), "--disk id=a"),
        (json!({"landlock_rules": [{"path": missing, "access": "r"}]}), "--landlock-rules"),
        (json!({"payload": {"kernel": missing}}), "--kernel"),
    ] {
        let answer = client.put_json("vm.create", &confined(&vmm, &further));
        let said = format!(
            "{option}: {path}: No such file or directory (os error 2); with --landlock, it must be there when the VM \
             is created"
        );
        assert_eq!((answer.status, reasons(&answer).last().copied()), (400, Some(said.as_str())), "{answer:?}");
    }
    // These requests confined nothing.
    let config = confined(&vmm, &json!({"disks": [disk(&vmm, "a")]}));
    client.put_json("vm.create", &config).expect(204);
    let image = vmm.files.path("a");
    fs::rename(&image, vmm.files.path("moved")).unwrap();
    disk(&vmm, "a");
    let answer = client.put("vm.boot");
    assert!(reasons(&answer).concat().contains(&image.display().to_string()), "{answer:?}");
    answer.expect(409);
    fs::rename(vmm.files.path("moved"), &image).unwrap();
    client.put("vm.boot").expect(204);
}

#[test]
fn the_next_vm_of_a_confined_program_must_be_within_its_rules() {
    let vmm = Vmm::start();
    let mut client = vmm.boot_config(&confined(&vmm, &json!({"disks": [disk(&vmm, "a")]})));
    client.put("vm.delete").expect(204);
    for enable in [true, false] {
        let mut other = confined(&vmm, &json!({"disks": [disk(&vmm, "b")]}));
        other["landlock_enable"] = json!(enable);
        let answer = client.put_json("vm.create", &other);
        let said = reasons(&answer).concat();
        assert!(said.contains("--disk id=b: --landlock keeps this program from") && said.contains("new process"));
        answer.expect(409);
    }
    let mut same = confined(&vmm, &json!({"disks": [{"id": "other", "path": vmm.files.path("a")}]}));
    same["landlock_enable"] = json!(false);
    vmm.boot_config(&same);
}

/// Files that the program opens because an option's file names them, such as a backing file, are refused by the kernel,
/// not only by the check.
#[test]
fn an_image_may_open_its_backing_files_and_nothing_else() {
    let vmm = Vmm::start();
    let below = vmm.files.sparse("below.raw", 1 << 20);
    let image = vmm.files.path("image");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-b", "below.raw", "-F", "raw"])
        .arg(&image)
        .status()
        .expect("qemu-img is missing: apt-get install qemu-utils");
    assert!(made.success());
    let disk = json!([{"id": "a", "path": image, "image_type": "Qcow2", "backing_files": true}]);
    let mut client = vmm.boot_config(&confined(&vmm, &json!({"disks": disk})));
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    client.put("vm.shutdown").expect(204);
    // A copy is another file.
    fs::rename(&below, vmm.files.path("moved")).unwrap();
    vmm.files.sparse("below.raw", 1 << 20);
    let answer = client.put("vm.boot");
    assert!(reasons(&answer).concat().contains("below.raw"), "{answer:?}");
    answer.expect(409);
}
