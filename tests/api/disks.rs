//! Disks of a running VM.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::rig::vmm::{Vmm, reasons};

#[test]
fn a_disk_resizes_live_or_keeps_its_size_with_a_reason() {
    let vmm = Vmm::start();
    let path = vmm.files.path("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let len = || fs::metadata(&path).unwrap().len();
    let disk = |path, id, readonly| json!({"path": path, "id": id, "readonly": readonly});
    let mut config = vmm.config(json!([{"id": "nic", "tap": "apiresize0"}]));
    let kept = vmm.files.path("kept");
    File::create(&kept).unwrap().set_len(1 << 20).unwrap();
    config["disks"] = json!([disk(&path, "a", false), disk(&kept, "kept", true)]);
    let mut client = vmm.client();
    client.put_json("vm.create", &config).expect(204);
    let mut resize = |id: &str, size: u64| client.put_json("vm.resize-disk", &json!({"id": id, "desired_size": size}));
    let answer = resize("a", 2 << 20);
    assert!(reasons(&answer).concat().contains("the VM is not booted"), "{answer:?}");
    answer.expect(409);
    vmm.client().put("vm.boot").expect(204);
    for size in [4 << 20, 4 << 20, 512, 1 << 20] {
        resize("a", size).expect(204);
        assert_eq!(len(), size);
    }
    for (id, size, status, why) in [
        ("a", 1000, 400, "must be a multiple of 512"),
        ("a", 0, 400, "must be a multiple of 512"),
        ("a", u64::MAX - 511, 400, "ask for less"),
        ("kept", 2 << 20, 400, "read-only"),
        ("nic", 512, 400, "is not a disk"),
        ("none", 512, 404, "there is no device none"),
    ] {
        let answer = resize(id, size);
        assert!(reasons(&answer).concat().contains(why), "{answer:?}");
        answer.expect(status);
    }
    assert_eq!(len(), 1 << 20);
    // A paused VM's disk, too; and at the next start its size is that of the image.
    vmm.client().put("vm.pause").expect(204);
    resize("a", 512).expect(204);
    vmm.client().put("vm.resume").expect(204);
    assert_eq!(len(), 512);
}

fn qemu_img(folder: &Path, arguments: &[&str]) -> String {
    let run = Command::new("qemu-img").args(arguments).current_dir(folder).output();
    let run = run.unwrap_or_else(|error| panic!("{error}: apt-get install qemu-utils"));
    assert!(run.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

#[test]
fn an_untyped_qcow2_disk_grows_and_one_over_another_is_refused() {
    let vmm = Vmm::start();
    let path = vmm.files.path("disk");
    let folder = path.parent().unwrap();
    // A table of clusters of 512 bytes moves when the disk grows; the other stays in place.
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "disk", "1M"]);
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "larger", "1M"]);
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "-b", "larger", "-F", "qcow2", "over", "1M"]);
    let mut config = vmm.config(json!([{"id": "nic"}]));
    config["disks"] = json!([{"path": folder.join("over"), "id": "over"}]);
    let mut client = vmm.client();
    client.put_json("vm.create", &config).expect(204);
    let answer = client.put("vm.boot");
    assert!(reasons(&answer).concat().contains("add image_type=qcow2,backing_files=on"), "{answer:?}");
    answer.expect(400);
    client.put("vm.delete").expect(204);
    config["disks"] = json!([
        {"path": path, "id": "small", "image_type": "Unknown"},
        {"path": folder.join("larger"), "id": "large"},
    ]);
    client.put_json("vm.create", &config).expect(204);
    client.put("vm.boot").expect(204);
    let mut resize = |id: &str, size: u64| client.put_json("vm.resize-disk", &json!({"id": id, "desired_size": size}));
    for id in ["small", "large"] {
        resize(id, 64 << 20).expect(204);
        let answer = resize(id, 1 << 20);
        assert!(reasons(&answer).concat().contains("only grows while the VM runs"), "{answer:?}");
        answer.expect(400);
    }
    client.put("vm.delete").expect(204);
    for name in ["disk", "larger"] {
        qemu_img(folder, &["check", "-q", name]);
        assert!(qemu_img(folder, &["info", "--output=json", name]).contains("\"virtual-size\": 67108864"));
    }
}

#[test]
fn disk_settings_are_kept_and_a_nonsparse_disk_is_allocated() {
    let vmm = Vmm::start();
    let path = vmm.files.path("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let mut config = vmm.config(json!([]));
    config["rate_limit_groups"] =
        json!([{"id": "slow", "rate_limiter_config": {"ops": {"size": 10, "refill_time": 1000}}}]);
    let disk = json!({
        "path": path, "id": "a", "rate_limit_group": "slow", "sparse": false, "lock_granularity": "Full",
        "disable_io_uring": true, "disable_aio": true,
    });
    config["disks"] = json!([disk]);
    let mut client = vmm.boot_config(&config);
    let info = client.get("vm.info").expect(200);
    assert_eq!(info["config"]["rate_limit_groups"], config["rate_limit_groups"]);
    for (key, value) in disk.as_object().unwrap() {
        assert_eq!(info["config"]["disks"][0].get(key), Some(value), "{key}");
    }
    assert!(fs::metadata(&path).unwrap().blocks() >= 2048);
    // The guest has no driver, so there are no latencies.
    let counters = client.get("vm.counters").expect(200);
    assert_eq!(counters["a"]["read_ops"], 0);
    assert!(counters["a"].get("read_latency_avg").is_none());
    let other = json!({"path": vmm.files.path("other"), "rate_limit_group": "fast"});
    let answer = client.put_json("vm.add-disk", &other);
    assert!(reasons(&answer).concat().contains("there is no such group"), "{answer:?}");
    answer.expect(400);
}
