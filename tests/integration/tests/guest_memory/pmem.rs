//! Files of the host that a guest has as persistent memory.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

use std::fs::{self, File};
use std::path::PathBuf;

use integration::{Api, Guest, GuestSpec, Kernel};
use rstest::rstest;
use serde_json::json;

const MIB: u64 = 1 << 20;
/// Time that a command with many writes may take.
const WRITES: std::time::Duration = std::time::Duration::from_secs(180);

/// A file that is removed when this is dropped.
struct Image(PathBuf);

impl Image {
    fn new(name: &str, kernel: Kernel, len: u64) -> Image {
        let path = std::env::temp_dir().join(format!("{name}-{}-{kernel:?}", std::process::id()));
        File::create(&path).unwrap().set_len(len).unwrap();
        Image(path)
    }

    /// True if the file contains this text.
    fn has(&self, text: &str) -> bool {
        let bytes = fs::read(&self.0).unwrap();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn load(guest: &mut Guest) {
    for module in ["virtio_pmem", "nd_pmem"] {
        guest.load(module);
    }
}

fn flushes(api: &Api, id: &str) -> u64 {
    api.get("vm.counters").body[id]["flushes"].as_u64().unwrap()
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn a_synced_file_system_on_pmem_is_in_the_file(#[case] kernel: Kernel) {
    let api = Api::new("pmem");
    let image = Image::new("pmem", kernel, 64 * MIB);
    let pmem = format!("file={}", image.0.display());
    let spec = GuestSpec::new(kernel).with_modules().memory("size=512M");
    let mut guest = Guest::boot(spec.arguments(&["--pmem", &pmem, "--api-socket", &api.argument()]));
    load(&mut guest);
    guest.wait_for("[ -b /dev/pmem0 ]");
    assert_eq!(guest.ok("cat /sys/block/pmem0/size"), (64 * MIB / 512).to_string());
    guest.ok("mkdir -p /mnt && mke2fs -b 4096 /dev/pmem0 > /dev/null && mount -t ext4 -o dax /dev/pmem0 /mnt");
    guest.ok("echo kept-by-the-host > /mnt/note");
    let before = flushes(&api, "_pmem0");
    guest.ok("sync /mnt/note || sync");
    assert!(flushes(&api, "_pmem0") > before);
    assert!(image.has("kept-by-the-host"));
    // More than fits into caches, to be read again after a restart.
    guest.ok_within("dd if=/dev/urandom of=/mnt/data bs=1M count=32 && sync", WRITES);
    let digest = guest.ok_within("sha256sum < /mnt/data", WRITES);
    guest.ok("umount /mnt");
    guest.reboot();
    load(&mut guest);
    guest.wait_for("[ -b /dev/pmem0 ]");
    guest.ok("mkdir -p /mnt && mount -t ext4 -o dax /dev/pmem0 /mnt");
    assert_eq!(guest.ok("cat /mnt/note"), "kept-by-the-host");
    assert_eq!(guest.ok_within("sha256sum < /mnt/data", WRITES), digest);
    guest.ok("umount /mnt");
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}

#[rstest]
#[ignore = "a longer test: a second kernel"]
#[case::linux_6_1(Kernel::V6_1)]
#[case::linux_6_12(Kernel::V6_12)]
fn persistent_memory_is_added_to_a_running_guest_and_taken_away(#[case] kernel: Kernel) {
    let api = Api::new("pmem-hotplug");
    let image = Image::new("pmem-hotplug", kernel, 16 * MIB);
    let spec = GuestSpec::new(kernel).with_modules().memory("size=512M");
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    load(&mut guest);
    for (round, discard_writes) in [(0, false), (1, true)] {
        let body = json!({"id": "p", "file": &image.0, "discard_writes": discard_writes});
        let added = api.put_json("vm.add-pmem", &body);
        assert_eq!(added.status, 200, "{}", added.body);
        guest.wait_for("ls /dev/pmem*");
        guest.ok(&format!("printf round-{round} | dd of=$(ls /dev/pmem* | head -n 1) conv=fsync"));
        assert!(image.has(&format!("round-{round}")) != discard_writes);
        assert_eq!(api.put_json("vm.remove-device", &json!({"id": "p"})).status, 204);
        guest.wait_for("! ls /dev/pmem*");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while api.info()["config"]["pmem"].as_array().is_some_and(|all| !all.is_empty()) {
            assert!(std::time::Instant::now() < deadline, "the guest has not released the device");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.power_off().code, Some(0));
}
