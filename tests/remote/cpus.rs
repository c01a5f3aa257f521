//! vCPUs added to and removed from a running guest. These tests need /dev/kvm.

use std::fs;
use std::os::fd::AsRawFd;

use serde_json::{Value, json};

use crate::files::Files;
use crate::vmm::{Vmm, wait_for};

/// The registers for vCPU hotplug, as in the ACPI tables: added vCPUs, vCPUs to release, and released vCPUs.
const ADDED: u16 = 0xb020;
const LEAVING: u16 = 0xb040;
const EJECT: u16 = 0xb060;

const INTERRUPT_COMMAND: u32 = 0xfee0_0300;
const SPURIOUS_INTERRUPT: u32 = 0xfee0_00f0;
const ALL_OTHERS: u32 = 3 << 18;

/// AMX's tiles, as a component of the XSAVE area (Intel SDM, volume 1, §13.1).
const TILE_DATA: u64 = 1 << 18;

/// `mov dword [address], value`
fn store(address: u32, value: u32) -> Vec<u8> {
    [&[0xc7, 0x05][..], &address.to_le_bytes(), &value.to_le_bytes()].concat()
}

/// `mov dx, port; in al, dx; test al, al; jz jump`
fn unless_zero(port: u16, jump: i8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xec, 0x84, 0xc0, 0x74, jump as u8]
}

/// A guest that wakes all other vCPUs when one is added, and releases one at once on request. A vCPU that wakes up
/// writes its APIC ID to the serial port.
fn guest() -> Vec<u8> {
    // In real mode at 0x8000: mov eax, 1; cpuid; shr ebx, 24; add bl, '0'; mov dx, 0x3f8; mov al, bl; out dx, al;
    // again: hlt; jmp again
    let awake = b"\x66\xb8\x01\0\0\0\x0f\xa2\x66\xc1\xeb\x18\x80\xc3\x30\xba\xf8\x03\x88\xd8\xee\xf4\xeb\xfd";
    let mut code = store(SPURIOUS_INTERRUPT, 0x1ff);
    for (n, dword) in (0u32..).zip(awake.as_chunks().0) {
        code.extend(store(0x8000 + 4 * n, u32::from_le_bytes(*dword)));
    }
    let wake = [0x4500, 0x4608, 0x4608].map(|message| store(INTERRUPT_COMMAND, ALL_OTHERS | message)).concat();
    let mut again = [unless_zero(ADDED, wake.len() as i8), wake].concat();
    let back = |len: usize| -(len as i8);
    again.extend(unless_zero(LEAVING, back(again.len() + 9)));
    // mov dx, EJECT; out dx, al; jmp again
    let [low, high] = EJECT.to_le_bytes();
    again.extend([0x66, 0xba, low, high, 0xee, 0xeb]);
    again.push(back(again.len() + 1) as u8);
    [code, again].concat()
}

/// The names of the vCPU threads.
fn running(vmm: &Vmm) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", vmm.process.id())).unwrap();
    let name = |path: std::path::PathBuf| fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_string();
    let mut names: Vec<_> = threads.map(|thread| name(thread.unwrap().path())).collect();
    names.retain(|name| name.starts_with("vcpu"));
    names.sort();
    names
}

fn cpus(vmm: &Vmm) -> Value {
    let info: Value = serde_json::from_str(&vmm.done(&["info"])).unwrap();
    let cpus = &info["config"]["cpus"];
    json!({ "boot_vcpus": cpus["boot_vcpus"], "max_vcpus": cpus["max_vcpus"] })
}

#[test]
fn vcpus_are_added_to_a_running_guest_and_removed() {
    let files = Files::new();
    let (kernel, serial) = (files.kernel(&guest()), files.path("serial"));
    let serial_file = format!("file={}", serial.display());
    let options = ["--kernel", &kernel, "--memory", "size=64M", "--cpus", "boot=1,max=4", "--serial", &serial_file];
    let vmm = Vmm::start(&options);
    let woken = |id: char| fs::read_to_string(&serial).unwrap_or_default().matches(id).count();
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 1, "max_vcpus": 4 }));
    wait_for("its vCPU", || running(&vmm) == ["vcpu0"]);

    vmm.done(&["resize", "--cpus", "3"]);
    wait_for("three vCPUs", || running(&vmm) == ["vcpu0", "vcpu1", "vcpu2"]);
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 3, "max_vcpus": 4 }));
    wait_for("both", || woken('1') > 0 && woken('2') > 0);
    assert!(vmm.done(&["info", "--text"]).contains("cpus    3 of at most 4\n"));

    let said = vmm.refused(&["resize", "--cpus", "5"]);
    assert!(said.contains("desired_vcpus=5") && said.contains("max=4") && said.ends_with("(status 400)"), "{said}");
    assert!(vmm.refused(&["resize", "--cpus", "0"]).ends_with("(status 400)"));

    // A paused guest does not respond.
    vmm.done(&["pause"]);
    vmm.done(&["resize", "--cpus", "1"]);
    for count in ["1", "2", "3", "4"] {
        let said = vmm.refused(&["resize", "--cpus", count]);
        assert!(said.contains("vCPU 1") && said.ends_with("(status 429)"), "{said}");
    }
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 1, "max_vcpus": 4 }));
    wait_for("three vCPUs", || running(&vmm).len() == 3);
    vmm.done(&["resume"]);
    wait_for("the removal", || running(&vmm) == ["vcpu0"]);
    vmm.done(&["nmi"]);
    vmm.done(&["shutdown"]);

    // After the reboot it has the number of vCPUs that was requested last.
    fs::remove_file(&serial).unwrap();
    vmm.done(&["boot"]);
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 1, "max_vcpus": 4 }));
    // A thread sets its name shortly after it has started.
    wait_for("its vCPU", || running(&vmm) == ["vcpu0"]);
    vmm.done(&["resize", "--cpus", "4"]);
    wait_for("the last vCPU", || woken('3') > 0);
    vmm.done(&["resize", "--cpus", "2"]);
    wait_for("the removal", || running(&vmm) == ["vcpu0", "vcpu1"]);
    // A removed vCPU can be added again, even to a paused guest.
    let before = woken('2');
    vmm.done(&["pause"]);
    vmm.done(&["resize", "--cpus", "3"]);
    wait_for("three vCPUs", || running(&vmm).len() == 3);
    vmm.done(&["resume"]);
    wait_for("the vCPU that was added again", || woken('2') > before);
    vmm.done(&["reboot"]);
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 3, "max_vcpus": 4 }));
    wait_for("three vCPUs", || running(&vmm).len() == 3);
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
}

/// The host CPUs that each thread may run on, from `/proc`.
fn allowed(vmm: &Vmm) -> Vec<(String, String)> {
    let threads = fs::read_dir(format!("/proc/{}/task", vmm.process.id())).unwrap();
    let read = |thread: std::io::Result<fs::DirEntry>| {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap_or_default();
        let line = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
            line.trim().to_string()
        };
        (line("Name:"), line("Cpus_allowed_list:"))
    };
    // A thread that has ended in the meantime has neither.
    threads.map(read).filter(|(name, _)| !name.is_empty()).collect()
}

#[test]
fn vcpus_have_their_configured_places_also_when_added_later() {
    let files = Files::new();
    let (kernel, serial) = (files.kernel(&guest()), files.path("serial"));
    let serial_file = format!("file={}", serial.display());
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let own = own.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let cpu = own.split(['-', ',']).next().unwrap();
    let cpus = format!("boot=1,max=6,topology=1:3:1:2,affinity=[0@[{cpu}],4@[{cpu}]],nested=off,max_phys_bits=40");
    let options = ["--kernel", &kernel, "--memory", "size=64M", "--cpus", &cpus, "--serial", &serial_file];
    let vmm = Vmm::start(&options);
    wait_for("its vCPU", || running(&vmm) == ["vcpu0"]);
    vmm.done(&["resize", "--cpus", "6"]);
    // The second package begins at the next power of two, so no vCPU has the APIC ID 3 or 7.
    let said = || fs::read_to_string(&serial).unwrap_or_default();
    wait_for("all vCPUs", || "12456".chars().all(|id| said().contains(id)));
    assert!(said().chars().all(|id| "12456".contains(id)), "{}", said());
    for (name, list) in allowed(&vmm) {
        // The kernel's threads are started by a vCPU, and stay on its CPUs.
        if name.starts_with("kvm-") {
            continue;
        }
        let is_bound = ["vcpu0", "vcpu4"].contains(&name.as_str());
        assert_eq!(list, if is_bound { cpu } else { own }, "{name}");
    }
    let info: Value = serde_json::from_str(&vmm.done(&["info"])).unwrap();
    let expected = json!({"threads_per_core": 1, "cores_per_die": 3, "dies_per_package": 1, "packages": 2});
    assert_eq!(info["config"]["cpus"]["topology"], expected);
    assert_eq!(info["config"]["cpus"]["affinity"][1], json!({"vcpu": 4, "host_cpus": [cpu.parse::<u32>().unwrap()]}));
    vmm.done(&["shutdown-vmm"]);
    assert_eq!(vmm.end(), Some(0));
}

#[test]
fn a_vcpu_that_cannot_be_placed_is_refused_and_the_vm_stays() {
    let files = Files::new();
    let vmm = Vmm::start(&[]);
    let kernel = files.kernel(&guest());
    vmm.done(&["create", "--kernel", &kernel, "--cpus", "boot=1,max=2,affinity=[1@[1023]]", "--console", "off"]);
    vmm.done(&["boot"]);
    let said = vmm.refused(&["resize", "--cpus", "2"]);
    assert!(said.contains("vCPU 1: --cpus affinity: this process can run on none of the CPUs given"), "{said}");
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 1, "max_vcpus": 2 }));
    // A joined thread may be listed for a moment longer.
    wait_for("one vCPU", || running(&vmm) == ["vcpu0"]);
}

/// The components of the XSAVE area that KVM supports in guests. A host's CPU may have more.
fn guest_components() -> u64 {
    /// `linux/kvm.h`: `KVM_GET_DEVICE_ATTR`, whose group 0 has `KVM_X86_XCOMP_GUEST_SUPP` as attribute 0 for the whole
    /// system.
    const KVM_GET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee2;
    let kvm = fs::File::open("/dev/kvm").unwrap();
    let mut components = 0u64;
    // `struct kvm_device_attr`: flags and group, the attribute, and the address of its value.
    let attribute = [0, 0, &raw mut components as u64];
    // SAFETY: the kernel reads `attribute`, and writes 8 bytes at the address in it, where `components` is.
    let result = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_GET_DEVICE_ATTR, attribute.as_ptr()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    components
}

#[test]
fn amx_is_there_where_the_host_has_it_and_refused_elsewhere() {
    let has_amx = guest_components() & TILE_DATA != 0;
    let files = Files::new();
    let vmm = Vmm::start(&[]);
    let kernel = files.idle_kernel();
    vmm.done(&["create", "--kernel", &kernel, "--cpus", "boot=1,features=amx", "--console", "off"]);
    if has_amx {
        vmm.done(&["boot"]);
    } else {
        let said = vmm.refused(&["boot"]);
        assert!(said.contains("--cpus features=amx: the host cannot give guests AMX"), "{said}");
    }
}

#[test]
fn a_vm_that_is_not_running_is_resized_for_its_boot() {
    let vmm = Vmm::start(&[]);
    vmm.done(&["create", "--kernel", "k", "--cpus", "boot=1,max=4"]);
    vmm.done(&["resize", "--cpus", "2"]);
    assert_eq!(cpus(&vmm), json!({ "boot_vcpus": 2, "max_vcpus": 4 }));
    assert!(vmm.refused(&["resize", "--cpus", "5"]).contains("max=4"));
}
