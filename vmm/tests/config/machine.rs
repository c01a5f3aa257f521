//! Every rule that the rest of the machine can break.

use vmm::config::{ConsoleConfig, ConsoleMode, PayloadConfig, VmPlan};

use crate::{vm, with};

#[test]
fn a_vm_without_vcpus_memory_or_kernel_is_refused() {
    assert_eq!(with(|vm| vm.cpus.boot_vcpus = 0), "--cpus boot=0: a VM needs a vCPU; give 1 or more");
    assert_eq!(with(|vm| vm.cpus.boot_vcpus = 255), "--cpus boot=255: a VM has at most 254 vCPUs; give fewer");
    assert_eq!(
        with(|vm| vm.cpus.max_vcpus = 3),
        "--cpus boot=4,max=3: max is less than boot; give max=4 or more, or leave max out"
    );
    assert_eq!(with(|vm| vm.cpus.max_vcpus = 255), "--cpus max=255: a VM has at most 254 vCPUs; give fewer");
    let mut most = vm(&[], &[]).unwrap();
    most.cpus.max_vcpus = 254;
    assert!(VmPlan::of(&most).is_ok());
    assert_eq!(with(|vm| vm.memory.size = 0), "--memory size=0: a VM needs memory; give a size, such as 512M");
    assert_eq!(
        with(|vm| vm.memory.size = 1 << 46),
        "--memory size=65536G: more than a guest can address; give at most 32768G"
    );
    assert_eq!(
        with(|vm| vm.memory.size += 1),
        "--memory size=536870913: not a multiple of the page size, 4K; round it up"
    );
    let nothing = PayloadConfig::default().check_present().unwrap_err().to_string();
    assert_eq!(nothing, "--kernel: is required; give the path of a bzImage or a vmlinux, or --firmware");
    assert_eq!(
        with(|vm| vm.payload.cmdline = Some("a\0b".to_string())),
        "--cmdline a\\u{0}b: a kernel command line ends at a NUL character; remove it"
    );
}

#[test]
fn wrong_huge_pages_are_refused() {
    let page = |size: u64| with(|vm| (vm.memory.hugepages, vm.memory.hugepage_size) = (true, Some(size)));
    assert_eq!(
        with(|vm| vm.memory.hugepage_size = Some(2 << 20)),
        "--memory hugepage_size=2M: needs hugepages=on; add it"
    );
    assert_eq!(page(3 << 20), "--memory hugepage_size=3M: not a huge page size; give 2M or 1G");
    assert_eq!(page(0), "--memory hugepage_size=0: not a huge page size; give 2M or 1G");
    assert_eq!(page(1 << 30), "--memory size=512M: not a multiple of the page size, 1G; round it up");
}

#[test]
fn segments_are_1_to_96() {
    let platform = |segments: u16| Some(format!("num_pci_segments={segments}").parse().unwrap());
    for segments in [0, 97] {
        assert_eq!(
            with(|vm| vm.platform = platform(segments)),
            format!("--platform num_pci_segments={segments}: a VM has 1 to 96 PCI segments; give one of these numbers")
        );
    }
    for segments in [1, 2, 96] {
        let mut config = vm(&[], &[]).unwrap();
        config.platform = platform(segments);
        assert!(VmPlan::of(&config).is_ok());
    }
}

#[test]
fn a_console_that_cannot_be_is_refused() {
    assert_eq!(
        with(|vm| vm.serial = "null,id=c".parse().unwrap()),
        "--serial null,id=c: the serial port is not a PCI device; leave id out"
    );
    assert_eq!(
        with(|vm| vm.console = "null,iommu=on".parse().unwrap()),
        "--console iommu=on: virtual IOMMUs are not supported yet; leave iommu out"
    );
    let both = |text: &str| (text.parse::<ConsoleConfig>().unwrap(), text.parse().unwrap());
    assert_eq!(
        with(|vm| (vm.console, vm.serial) = both("file=/tmp/f")),
        "--console file=/tmp/f: the serial port has this file (--serial file=/tmp/f); give one of them another path"
    );
    assert_eq!(
        with(|vm| (vm.console, vm.serial) = both("socket=/tmp/s")),
        "--console socket=/tmp/s: the serial port has this socket (--serial socket=/tmp/s); give one of them another \
         path"
    );
    assert_eq!(
        with(|vm| vm.serial.file = Some("x".into())),
        "--serial null: only mode File has a file; leave file out"
    );
    let json = |text: &str| serde_json::from_str(text).unwrap();
    assert_eq!(with(|vm| vm.serial = json(r#"{"mode":"File"}"#)), "--serial file=: mode File needs a file; give one");
    assert_eq!(
        with(|vm| vm.serial = json(r#"{"mode":"Pty","socket":"/tmp/s"}"#)),
        "--serial pty: only mode Socket has a socket; leave socket out"
    );
}

#[test]
fn two_consoles_may_be_the_same_where_neither_takes_anything_from_the_other() {
    let each = [
        ("file=/dev/null", "file=/dev/null"),
        ("null", "null"),
        ("tty", "tty"),
        ("off,id=c,iommu=on", "off"),
        ("pty", "pty"),
        ("file=/tmp/x", "socket=/tmp/x"),
    ];
    for (console, serial) in
        each.into_iter().chain([("file=/tmp/f", "file=/tmp/g"), ("socket=/tmp/s", "socket=/tmp/t")])
    {
        let mut config = vm(&[], &[]).unwrap();
        (config.console, config.serial) = (console.parse().unwrap(), serial.parse().unwrap());
        assert!(VmPlan::of(&config).is_ok(), "{console} {serial}");
    }
}

#[test]
fn a_serial_port_may_be_any_console() {
    for mode in ["off", "null", "tty", "pty", "file=/tmp/f", "socket=/tmp/s"] {
        let mut config = vm(&[], &[]).unwrap();
        config.serial = mode.parse().unwrap();
        assert!(VmPlan::of(&config).is_ok(), "{mode}");
    }
    // A client gives back what it was told: where the pseudo-terminal was.
    let mut config = vm(&[], &[]).unwrap();
    config.serial = ConsoleConfig { file: Some("/dev/pts/7".into()), ..ConsoleConfig::new(ConsoleMode::Pty) };
    assert!(VmPlan::of(&config).is_ok());
}
