//! Input that Cloud Hypervisor v53 accepts, in the form of its clients and tests: it is accepted, and differences for
//! the guest are logged.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use serde_json::{Value, json};

use crate::rig::driven::slot;
use crate::rig::vmm::{Vmm, reasons, wait_for};

/// The configuration of a VM without NICs and with these further fields.
fn config(vmm: &Vmm, fields: &Value) -> Value {
    let mut config = vmm.config(json!([]));
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

/// Boots a VM that causes exactly these warnings, in their order.
fn boots(fields: &Value, warnings: &[&str]) -> Vmm {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    client.put_json("vm.create", &config(&vmm, fields)).expect(204);
    let log = fs::read_to_string(vmm.files.path("log")).unwrap();
    let said: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(said.len(), warnings.len(), "{log}");
    for (line, warning) in said.iter().zip(warnings) {
        assert!(line.contains(warning), "{line}");
    }
    client.put("vm.boot").expect(204);
    vmm
}

fn image(path: &Path, len: u64) -> File {
    let file = File::create(path).unwrap();
    file.set_len(len).unwrap();
    file
}

#[test]
fn a_template_of_kata_with_shared_beside_its_zone_boots() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory");
    image(&file, 256 << 20);
    let zone = json!({"id": "mem0", "size": 268_435_456, "shared": true, "file": file});
    let vmm = boots(&json!({"memory": {"size": 0, "shared": true, "zones": [zone]}}), &[]);
    let memory = &vmm.client().get("vm.info").expect(200)["config"]["memory"];
    assert_eq!(
        (&memory["size"], &memory["shared"], &memory["zones"][0]["id"]),
        (&json!(0), &json!(true), &json!("mem0"))
    );
}

#[test]
fn landlock_rules_are_without_effect_without_landlock() {
    let rule = json!({"path": "/nonexistent/folder", "access": "rw"});
    boots(
        &json!({"landlock_rules": [rule]}),
        &["--landlock-rules path=/nonexistent/folder,access=rw: has no effect without --landlock"],
    );
}

#[test]
fn numa_nodes_are_given_what_the_vm_has() {
    let zones = json!([{"id": "a", "size": 64 << 20}, {"id": "b", "size": 64 << 20}, {"id": "c", "size": 64 << 20}]);
    boots(
        &json!({
            "memory": {"size": 0, "zones": zones},
            "numa": [
                {"guest_numa_id": 0, "cpus": [0, 7], "memory_zones": ["a"]},
                {"guest_numa_id": 1, "cpus": [0, 1], "memory_zones": ["b", "x"]},
            ],
        }),
        &[
            "--numa guest_numa_id=0,cpus=[7]: the VM has vCPUs 0 to 1",
            "--numa guest_numa_id=1,cpus=[0]: node 0 has it already",
            "--numa guest_numa_id=1,memory_zones=[x]: there is no such memory zone",
            "--memory-zone id=c: belongs to no NUMA node; node 0 gets it",
        ],
    );
}

#[test]
fn a_uuid_that_is_none_is_one_that_the_guest_does_not_see() {
    boots(&json!({"platform": {"uuid": "xyz"}}), &["--platform system_uuid=xyz: not a UUID"]);
}

#[test]
fn four_threads_of_a_core_boot() {
    let topology = json!({"threads_per_core": 4, "cores_per_die": 2, "dies_per_package": 1, "packages": 1});
    boots(&json!({"cpus": {"boot_vcpus": 8, "max_vcpus": 8, "topology": topology}}), &[]);
}

#[test]
fn slot_0_of_another_segment_takes_a_device_at_boot_or_later() {
    let vmm = boots(&json!({"platform": {"num_pci_segments": 3}, "rng": {"pci_segment": 1, "pci_device_id": 0}}), &[]);
    let mut client = vmm.client();
    let tree = &client.get("vm.info").expect(200)["device_tree"];
    assert_eq!(tree["_virtio-pci-__rng"]["pci_bdf"], "0001:00:00.0");
    let path = vmm.files.path("disk");
    image(&path, 1 << 20);
    let disk = |segment: u8| json!({"path": path, "pci_segment": segment, "pci_device_id": 0});
    assert_eq!(client.put_json("vm.add-disk", &disk(2)).expect(200)["bdf"], "0002:00:00.0");
    let answer = client.put_json("vm.add-disk", &disk(0));
    assert!(reasons(&answer).concat().contains("bus 0 has slots 1 to 31"), "{answer:?}");
}

#[test]
fn an_image_of_odd_size_and_queues_that_are_not_there_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    image(&path, (1 << 20) + 100);
    let affinity = json!([{"queue_index": 0, "host_cpus": [0]}, {"queue_index": 3, "host_cpus": [0]}]);
    let disk = json!({"path": path, "id": "d", "queue_affinity": affinity});
    let said = "--disk id=d,queue_affinity=[3@...]: the queues are 0 to 0; it has no effect";
    let vmm = boots(&json!({"disks": [disk]}), &[said]);
    let log = fs::read_to_string(vmm.files.path("log")).unwrap();
    assert!(log.contains("the guest does not see the last 100 bytes"), "{log}");
    assert_eq!(fs::metadata(&path).unwrap().len(), (1 << 20) + 100);
    // A disk added later causes a warning, too, and the first one is not repeated.
    let hot = json!({"path": vmm.files.path("hot"), "id": "e", "queue_affinity": affinity});
    image(&vmm.files.path("hot"), 1 << 20);
    vmm.client().put_json("vm.add-disk", &hot).expect(200);
    let log = fs::read_to_string(vmm.files.path("log")).unwrap();
    assert_eq!(["id=d,queue_affinity", "id=e,queue_affinity"].map(|key| log.matches(key).count()), [1, 1]);
}

#[test]
fn a_disk_that_another_program_has_locked_is_a_conflict() {
    let vmm = boots(&json!({}), &[]);
    let (mut client, path) = (vmm.client(), vmm.files.path("disk"));
    let file = image(&path, 1 << 20);
    lock(&file, libc::F_WRLCK);
    let disk = json!({"path": path, "id": "d"});
    let answer = client.put_json("vm.add-disk", &disk);
    assert!(reasons(&answer).concat().contains("is in use by another program"), "{answer:?}");
    answer.expect(409);
    // Closing the file is not enough if a child that another test has just forked has it, too.
    lock(&file, libc::F_UNLCK);
    client.put_json("vm.add-disk", &disk).expect(200);
    // The same when it is found at boot.
    let other = Vmm::start();
    let mut client = other.client();
    client.put_json("vm.create", &config(&other, &json!({"disks": [disk]}))).expect(204);
    client.put("vm.boot").expect(409);
}

/// Locks or unlocks all of `file`.
fn lock(file: &File, kind: libc::c_int) {
    let lock = libc::flock { l_type: kind as i16, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the kernel reads the lock's description, which lives through the call.
    let locked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_nic_behind_a_console_and_two_disks_is_in_slot_4() {
    let vmm = Vmm::start();
    let disks = ["a", "b"].map(|name| {
        image(&vmm.files.path(name), 1 << 20);
        json!({"path": vmm.files.path(name), "image_type": "Raw"})
    });
    let fields = json!({"disks": disks, "net": [{"tap": "slotfour"}], "console": {"mode": "Null"}});
    let mut client = vmm.boot_config(&config(&vmm, &fields));
    let tree = client.get("vm.info").expect(200)["device_tree"].clone();
    // Linux names the NIC enp0s4 or ens4 after its slot.
    let slots = ["__console", "_disk0", "_disk1", "_net2", "__rng"].map(|id| slot(&tree, id));
    assert_eq!(slots, [1, 2, 3, 4, 5]);
}

#[test]
fn a_body_of_null_is_as_none() {
    let vmm = boots(&json!({}), &[]);
    let mut client = vmm.client();
    client.put_json("vm.pause", &Value::Null).expect(204);
    client.put_json("vm.resume", &Value::Null).expect(204);
    assert_eq!(client.get("vm.info").expect(200)["state"], "Running");
    client.put_json("vm.resize", &Value::Null).expect(400);
}

#[test]
fn a_snapshot_has_a_folder_relative_to_the_programs_own() {
    let vmm = boots(&json!({}), &[]);
    let mut client = vmm.client();
    fs::create_dir(vmm.files.path("snap")).unwrap();
    client.put("vm.pause").expect(204);
    client.put_json("vm.snapshot", &json!({"destination_url": "file://./snap"})).expect(204);
    assert!(vmm.files.path("snap/state.json").exists());
    client.put("vm.delete").expect(204);
    client.put_json("vm.restore", &json!({"source_url": "file://snap", "resume": true})).expect(204);
    wait_for("the guest", || client.get("vm.info").expect(200)["state"] == "Running");
}

#[test]
fn an_error_about_json_names_the_path_in_the_document() {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    for (fields, said) in [
        (json!({"net": [{"tap": "adi0"}, {"queue_size": 100}]}), "net[1].queue_size=100: not a power of two"),
        (json!({"net": [{"id": "a", "vhost_socket": "/s"}]}), "net[0].vhost_socket=/s: only"),
        (json!({"net": [{"sriov_vfs": 2, "vfs": [{"index": 1, "vlan": 5000}]}]}), "net[0].vfs[0].vlan=5000: "),
        (json!({"cpus": {"boot_vcpus": 255, "max_vcpus": 255}}), "cpus.boot_vcpus=255: "),
        (
            json!({"memory": {"size": 0, "zones": [{"id": "a", "size": 4096}, {"id": "b", "size": 1}]}}),
            "memory.zones[1].size=1: ",
        ),
        (json!({"disks": [{"path": "/a"}, {"path": "/a"}]}), "disks[1].path=/a: this image is already in use"),
    ] {
        let answer = client.put_json("vm.create", &config(&vmm, &fields));
        assert!(reasons(&answer)[1].starts_with(said), "{answer:?}");
    }
    client.put_json("vm.create", &config(&vmm, &json!({}))).expect(204);
    let answer = client.put_json("vm.add-net", &json!({"queue_size": 100}));
    assert!(reasons(&answer)[1].starts_with("queue_size=100: not a power of two"), "{answer:?}");
    let answer = client.put_json("vm.add-vsock", &json!({"cid": 1, "socket": "/s"}));
    assert!(reasons(&answer)[1].starts_with("cid=1: "), "{answer:?}");
}
