//! Cloud Hypervisor's own firmware, rust-hypervisor-firmware, if its file is present. It boots a kernel of this test:
//! the machine's own KVM may be too slow for Linux.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use fixtures::LoopDevice;
use serde_json::{Value, json};

use crate::files::Files;
use crate::rig::fat32::{self, Node};
use crate::rig::vmm::{BINARY, Kill, Vmm, reasons, wait_for};

/// The default path of the file, next to the workspace; overridden by this variable.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/firmware/hypervisor-fw");
const VARIABLE: &str = "CH_HYPERVISOR_FW";
/// The options of the kernel, which prints them.
pub(crate) const OPTIONS: &str = "a kernel prints its options";

/// The firmware. Prints a line if it is missing.
pub(crate) fn firmware() -> Option<String> {
    let path = std::env::var(VARIABLE).unwrap_or_else(|_| FILE.into());
    let there = Path::new(&path).exists();
    if !there {
        println!("not tested, because {path} is missing: hypervisor-fw; name it by {VARIABLE}");
    }
    there.then_some(path)
}

/// A bzImage with a 64-bit entry (Linux's boot protocol 2.15): it prints its command line and halts.
fn kernel() -> Vec<u8> {
    let mut image = vec![0; 4 * 512];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    // One sector of setup code after this one, and the signatures.
    put(0x1f1, &[1]);
    put(0x1fe, &[0x55, 0xaa, 0xeb, 0x66]);
    put(0x202, b"HdrS");
    put(0x206, &0x020fu16.to_le_bytes());
    // Loaded high; the highest address of an initramfs.
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffffu32.to_le_bytes());
    // Relocatable, in 64-bit mode, with a command line of up to 2,047 bytes.
    put(0x230, &0x20_0000u32.to_le_bytes());
    put(0x234, &[1, 21, 3]);
    put(0x238, &2047u32.to_le_bytes());
    put(0x258, &0x20_0000u64.to_le_bytes());
    put(0x260, &0x1000u32.to_le_bytes());
    // mov esi, [rsi + 0x228]; next: lodsb; test al, al; jz end; mov dx, 0x3f8; out dx, al; jmp next; end: hlt; jmp end
    put(0x400 + 0x200, &[0x8b, 0xb6, 0x28, 2, 0, 0, 0xac, 0x84, 0xc0, 0x74, 7, 0x66, 0xba, 0xf8, 3, 0xee, 0xeb, 0xf4]);
    put(0x400 + 0x212, &[0xf4, 0xeb, 0xfd]);
    image
}

/// A raw disk from which the firmware boots that kernel.
pub(crate) fn bootable(files: &Files, name: &str) -> PathBuf {
    let path = files.path(name);
    let entry = format!("title d\nlinux /vmlinuz\noptions {OPTIONS}\n");
    let entries = Node::Directory("entries", vec![Node::File("d.conf", entry.as_bytes())]);
    let loader = Node::Directory("loader", vec![entries, Node::File("loader.conf", b"default d.conf\n")]);
    fat32::create(&path, &[loader, Node::File("vmlinuz", &kernel())]);
    path
}

/// A VM that boots the firmware by `option`, with these disks and 256 MiB of memory.
fn config(vmm: &Vmm, option: &str, firmware: &str, disks: &Value) -> Value {
    let mut config = vmm.config(json!([]));
    config["payload"] = json!({option: firmware});
    config["memory"] = json!({"size": 256 << 20});
    config["serial"] = json!({"mode": "File", "file": vmm.files.path("serial")});
    config["disks"] = disks.clone();
    config
}

fn text(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// Waits until the firmware has booted the kernel for the nth time.
fn wait_for_kernel(serial: &Path, times: usize) {
    wait_for("the kernel", || {
        let text = text(serial);
        assert!(!text.contains("PANIC"), "{text}");
        text.matches(OPTIONS).count() >= times
    });
    let text = text(serial);
    for step in ["Found EFI partition", "Filesystem ready", "Jumping to kernel"] {
        assert_eq!(text.matches(step).count(), times, "{step}: {text}");
    }
}

#[test]
fn hypervisor_fw_boots_by_each_option_of_the_command_line() {
    let Some(firmware) = firmware() else { return };
    for option in ["--firmware", "--kernel"] {
        let files = Vmm::start();
        let (disk, serial) = (bootable(&files.files, "disk"), files.files.path("serial"));
        let mut command = Command::new(BINARY);
        command.args([option, &firmware, "--memory", "size=256M", "--console", "off"]);
        command.arg("--serial").arg(format!("file={}", serial.display()));
        command.arg("--disk").arg(format!("path={},image_type=raw", disk.display()));
        let _vmm = Vmm::of(command);
        wait_for_kernel(&serial, 1);
    }
}

#[test]
fn hypervisor_fw_boots_each_disk_and_again_after_a_reboot() {
    let Some(firmware) = firmware() else { return };
    for (kind, option) in [("raw", "firmware"), ("kept", "kernel"), ("direct", "firmware"), ("qcow2", "kernel")] {
        let vmm = Vmm::start();
        let mut path = bootable(&vmm.files, "disk");
        if kind == "qcow2" {
            let converted = vmm.files.path("converted");
            let mut command = Command::new("qemu-img");
            command.args(["convert", "-f", "raw", "-O", "qcow2"]).args([&path, &converted]);
            assert!(command.status().is_ok_and(|status| status.success()), "qemu-img: apt-get install qemu-utils");
            path = converted;
        }
        let image_type = if kind == "qcow2" { "Qcow2" } else { "Raw" };
        // Two disks without a partition table before it, and one on another segment.
        let empty = |name| json!({"path": vmm.files.sparse(name, 1 << 20), "image_type": "Raw"});
        let mut far = empty("far");
        far["pci_segment"] = json!(1);
        let disk = json!({
            "path": path, "image_type": image_type, "readonly": kind == "kept", "direct": kind == "direct",
        });
        let mut config = config(&vmm, option, &firmware, &json!([empty("first"), empty("second"), disk, far]));
        config["net"] = json!([{"id": "pf", "tap": "hypfw0", "sriov_vfs": 8}]);
        config["platform"] = json!({"num_pci_segments": 2});
        let mut client = vmm.boot_config(&config);
        let serial = vmm.files.path("serial");
        wait_for_kernel(&serial, 1);
        client.put("vm.reboot").expect(204);
        wait_for_kernel(&serial, 2);
    }
}

/// The firmware reads single sectors of 512 bytes, the unit of the image's partition table, too.
#[test]
fn hypervisor_fw_boots_a_block_device_of_4096_byte_blocks() {
    let Some(firmware) = firmware() else { return };
    for direct in [true, false] {
        let vmm = Vmm::start();
        let device =
            LoopDevice::new(&bootable(&vmm.files, "disk"), 4096).expect("this test needs root and a loop device");
        let disk = json!({"path": device.path(), "image_type": "Raw", "direct": direct});
        let mut client = vmm.boot_config(&config(&vmm, "firmware", &firmware, &json!([disk])));
        wait_for_kernel(&vmm.files.path("serial"), 1);
        client.put("vm.delete").expect(204);
    }
}

#[test]
fn hypervisor_fw_prints_that_it_finds_nothing_to_boot() {
    let Some(firmware) = firmware() else { return };
    let vmm = Vmm::start();
    let disk = json!({"path": vmm.files.sparse("empty", 1 << 20), "image_type": "Raw"});
    vmm.boot_config(&config(&vmm, "firmware", &firmware, &json!([disk])));
    let text = || text(&vmm.files.path("serial"));
    wait_for("the end of the firmware", || text().contains("Unable to boot from any virtio-blk device"));
    assert!(text().contains("Failed to find EFI partition"), "{}", text());
}

#[test]
fn hypervisor_fw_boots_with_little_and_with_much_memory() {
    let Some(firmware) = firmware() else { return };
    for size in [64u64 << 20, 6 << 30] {
        let vmm = Vmm::start();
        let disk = json!({"path": bootable(&vmm.files, "disk"), "image_type": "Raw"});
        let mut config = config(&vmm, "firmware", &firmware, &json!([disk]));
        config["memory"] = json!({"size": size});
        vmm.boot_config(&config);
        wait_for_kernel(&vmm.files.path("serial"), 1);
    }
}

#[test]
fn hypervisor_fw_that_is_cut_off_is_refused_in_one_line() {
    let Some(firmware) = firmware() else { return };
    let whole = fs::read(&firmware).unwrap();
    let vmm = Vmm::start();
    let mut client = vmm.client();
    for (len, problem) in [(3, "neither a bzImage nor an ELF file"), (40, "cut off"), (whole.len() / 2, "cut off")] {
        let cut = vmm.files.write("cut", &whole[..len]);
        client.put_json("vm.create", &config(&vmm, "kernel", &cut, &json!([]))).expect(204);
        let answer = client.put("vm.boot");
        assert!(reasons(&answer).concat().contains(problem), "{len}: {answer:?}");
        client.put("vm.delete").expect(204);
        let [output, log] = ["out", "err"].map(|name| File::create(vmm.files.path(name)).unwrap());
        let mut command = Command::new(BINARY);
        command.args(["--kernel", &cut, "--serial", "null", "--console", "off"]).stdout(output).stderr(log);
        let mut process = Kill(command.spawn().unwrap());
        let mut code = None;
        wait_for("the refusal", || {
            code = process.0.try_wait().unwrap();
            code.is_some()
        });
        let error = text(&vmm.files.path("err"));
        assert_eq!((code.unwrap().code(), error.lines().count()), (Some(1), 1), "{len}: {error}");
        assert!(error.contains(&format!("--kernel {cut}: ")) && error.contains(problem), "{len}: {error}");
    }
}
