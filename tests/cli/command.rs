//! The command line and the configuration: every error is found before anything is opened.

use crate::run::{Run, USAGE, WRONG};

/// Error for an invalid configuration of a VM whose kernel need not exist.
fn wrong(arguments: &[&str]) -> String {
    Run::new(&[&["--kernel", "/nonexistent/vmlinux"], arguments].concat()).refused(WRONG)
}

fn usage(arguments: &[&str]) -> String {
    Run::new(arguments).refused(USAGE)
}

/// Error for the text of an option of such a VM.
fn malformed(option: &str, text: &str) -> String {
    usage(&["--kernel", "/nonexistent/vmlinux", option, text])
}

/// Error for a `--net-vf` of a PF with 8 VFs.
fn wrong_vf(vf: &str) -> String {
    wrong(&["--cpus", "boot=2", "--net", "id=pf0,tap=clitest,sriov_vfs=8", "--net-vf", vf])
}

fn shown(arguments: &[&str]) -> String {
    let output = Run::new(arguments).command.output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    String::from_utf8(output.stdout).unwrap()
}

// Help and version.

#[test]
fn the_version_is_cloud_hypervisors_first_and_then_what_it_is() {
    for option in ["--version", "-V"] {
        let text = shown(&[option]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "cloud-hypervisor v53.0.0");
        assert_eq!(
            lines[1],
            "SR-IOV emulation 0.1.0; compatible with the command line of Cloud Hypervisor v53, but not a fork of it"
        );
        assert_eq!(lines.len(), 2);
    }
}

#[test]
fn help_has_every_option_and_every_key() {
    let text = shown(&["--help"]);
    for option in [
        "--kernel",
        "--initramfs",
        "--cmdline",
        "--cpus",
        "--memory",
        "--net",
        "--net-vf",
        "--serial",
        "--console",
        "--vdpa",
        "--balloon",
        "--log-file",
    ] {
        assert!(text.contains(&format!("{option} <")), "{option} in {text}");
    }
    assert!(text.contains("--watchdog\n") && text.contains("--pvpanic\n"), "{text}");
    for key in
        ["boot=<number>", "size=<bytes>[K|M|G]", "sriov_vfs=<number>", "pf=<id>", "index=<number>", "fd=[<fd>,...]"]
    {
        assert!(text.contains(key), "{key} in {text}");
    }
}

#[test]
fn nothing_at_all_is_answered_with_help() {
    let output = Run::new(&[]).command.output().unwrap();
    assert_eq!(output.status.code(), Some(USAGE));
    assert!(String::from_utf8(output.stderr).unwrap().contains("Usage: cloud-hypervisor"));
}

// The command line itself.

#[test]
fn an_unknown_option_is_a_usage_error() {
    assert_eq!(
        usage(&["--kernel", "k", "--netvf", "x"]),
        "unexpected argument '--netvf' found; tip: a similar argument exists: '--net-vf'; see --help"
    );
    assert_eq!(usage(&["--kernel", "k", "surplus"]), "unexpected argument 'surplus' found; see --help");
}

#[test]
fn an_option_that_comes_later_is_a_usage_error_by_name() {
    assert_eq!(
        usage(&["--kernel", "k", "--user-device", "socket=/x"]),
        "--user-device: vfio-user devices are not supported yet; leave it out"
    );
    assert_eq!(usage(&["--gdb", "path=/x"]), "--gdb: debugging with gdb is not supported yet; leave it out");
}

#[test]
fn a_kernel_has_to_be_given() {
    assert_eq!(
        usage(&["--memory", "size=1G"]),
        "the following required arguments were not provided: <--kernel <path>|--firmware <path>>; see --help"
    );
    assert_eq!(usage(&["--kernel"]), "a value is required for '--kernel <path>' but none was supplied; see --help");
}

// Keys and values.

#[test]
fn an_option_whose_text_cannot_be_read_is_a_usage_error() {
    assert_eq!(
        malformed("--net", "tapp=x"),
        "--net tapp=x: unknown key; did you mean tap? --help lists those of --net"
    );
    assert_eq!(malformed("--memory", "1G"), "--memory 1G: a value without its key; write size=1G");
    assert_eq!(malformed("--cpus", "boot=x"), "--cpus boot=x: give a whole number from 1 to 254");
    assert_eq!(malformed("--memory", "shared=maybe"), "--memory shared=maybe: give on or off");
    assert_eq!(malformed("--net", "mac=52:54"), "--net mac=52:54: not a MAC address; write it as 52:54:00:12:34:56");
    assert_eq!(malformed("--net", "fd=[3"), "--net fd=[3: a bracket is not closed");
    assert_eq!(
        malformed("--serial", "on"),
        "--serial on: not a console; give off, null, tty, pty, file=<path> or socket=<path>"
    );
    assert_eq!(malformed("--net-vf", "pf=a"), "--net-vf: index is required; add it");
    assert_eq!(malformed("--net-vf", "index=0"), "--net-vf index=0: pf= is required; add the id of the PF");
}

#[test]
fn a_rule_that_a_well_formed_option_breaks_is_no_usage_error() {
    assert_eq!(wrong(&["--net", "mtu=1"]), "--net mtu=1: not a valid MTU; give 1280 to 65521");
}

#[test]
fn a_vm_without_cpus_or_memory_is_refused() {
    assert_eq!(wrong(&["--cpus", "boot=0"]), "--cpus boot=0: a VM needs a vCPU; give 1 or more");
    assert_eq!(wrong(&["--memory", "size=0"]), "--memory size=0: a VM needs memory; give a size, such as 512M");
}

#[test]
fn a_key_at_its_default_is_no_error() {
    for (option, text) in [
        ("--cpus", "nested=on,core_scheduling=vm,kvm_hyperv=off,max_phys_bits=46"),
        ("--memory", "mergeable=off,hotplug_method=acpi"),
        ("--platform", "num_pci_segments=1"),
        ("--debug-console", "off"),
        ("--console", "off,id=c"),
        ("--disk", "path=/d,sparse=on,backing_files=off"),
    ] {
        shown(&["--kernel", "/nonexistent/vmlinux", option, text, "--print-config"]);
    }
    assert_eq!(
        wrong(&["--debug-console", "pty,iobase=0x3f8"]),
        "--debug-console pty,iobase=0x3f8: port 0x3f8 is of another device of the VM; give another, such as 0xe9"
    );
}

#[test]
fn an_error_is_the_same_with_any_filter_of_system_calls() {
    let said = |mode| {
        let output = Run::new(&["--kernel", "/nonexistent/vmlinux", "--seccomp", mode]).command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{mode}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(said("true").contains("/nonexistent/vmlinux"));
    for mode in ["false", "log", "errno"] {
        assert_eq!(said(mode), said("true"));
    }
    assert!(malformed("--seccomp", "maybe").contains("'maybe'"));
}

// SR-IOV. `vmm/tests/config/nics.rs` has every rule of a single NIC.

#[test]
fn a_vf_index_out_of_range_is_refused() {
    assert_eq!(
        wrong_vf("pf=pf0,index=9"),
        "--net-vf pf=pf0,index=9: pf0 reserves 8 VFs (sriov_vfs=8); index must be 0 to 7"
    );
}

#[test]
fn a_vf_index_used_twice_is_refused() {
    let arguments = ["--net", "id=pf0,sriov_vfs=8", "--net-vf", "pf=pf0,index=1", "pf=pf0,index=1"];
    assert_eq!(wrong(&arguments), "--net-vf pf=pf0,index=1: VF 1 of pf0 is given twice; put all its keys into one");
}

#[test]
fn a_vf_of_no_pf_is_refused() {
    assert_eq!(
        wrong_vf("pf=pf1,index=0"),
        "--net-vf pf=pf1,index=0: there is no NIC pf1; add --net id=pf1,sriov_vfs=<number>"
    );
}

#[test]
fn a_mac_used_twice_is_refused() {
    let mac = "mac=52:54:00:00:00:01";
    let arguments = ["--net", &format!("id=pf0,sriov_vfs=8,{mac}"), "--net-vf", &format!("pf=pf0,index=1,{mac}")];
    assert_eq!(
        wrong(&arguments),
        "--net-vf pf=pf0,index=1,mac=52:54:00:00:00:01: MAC address 52:54:00:00:00:01 is already in use by pf0; \
         give each NIC and each VF its own"
    );
}

#[test]
fn a_tap_used_twice_is_refused() {
    assert_eq!(
        wrong_vf("pf=pf0,index=1,tap=clitest"),
        "--net-vf pf=pf0,index=1,tap=clitest: tap clitest is already in use by pf0; give each NIC and each VF its own"
    );
}

#[test]
fn a_tap_name_longer_than_15_characters_is_refused() {
    assert_eq!(
        wrong_vf("pf=pf0,index=1,tap=clitest-of-a-tap"),
        "--net-vf pf=pf0,index=1,tap=clitest-of-a-tap: 16 characters; the name of an interface has at most 15, \
         take a shorter one"
    );
}

#[test]
fn a_wrong_model_of_a_nic_is_refused_with_those_there_are() {
    for wrong in ["x710", "igb", "X 550", "virtio-net"] {
        assert_eq!(
            malformed("--net", &format!("model={wrong}")),
            format!("--net model={wrong}: give virtio, x550 or x540")
        );
    }
    let said = malformed("--net-vf", "pf=n,index=0,model=x550");
    assert_eq!(said, "--net-vf model=x550: unknown key; --help lists those of --net-vf");
    assert_eq!(
        malformed("--net", "model=x550,sriov_vfs=-1"),
        "--net sriov_vfs=-1: give a whole number from 0 to 32512"
    );
}

#[test]
fn an_x550_is_refused_what_its_guest_decides() {
    assert_eq!(
        wrong(&["--net", "model=x550,sriov_vfs=64"]),
        "--net sriov_vfs=64: an X550 has at most 63 VFs; reserve fewer"
    );
    assert_eq!(
        wrong(&["--net", "model=x550,tap=t,trust=on"]),
        "--net trust=on: the guest owns the functions of an X550 and sets their policies; leave trust out, and \
         restrict the uplink's port on the host (docs/guide/x550.md)"
    );
    assert_eq!(
        wrong(&["--net", "id=x,model=x550,sriov_vfs=4", "--net-vf", "pf=x,index=0,tap=t"]),
        "--net-vf pf=x,index=0: the guest owns the VFs of an X550 and configures them (ip link set <PF> vf); leave \
         this out, or give the NIC model=virtio"
    );
}

#[test]
fn more_vfs_than_buses_are_refused() {
    assert_eq!(
        wrong(&["--net", "sriov_vfs=32513"]),
        "--net sriov_vfs=32513: a VM has buses for 32512 VFs; reserve fewer"
    );
    assert_eq!(
        wrong(&["--net", "id=a,sriov_vfs=32512", "id=b,sriov_vfs=1"]),
        "--net id=b,sriov_vfs=1: takes 1 of the VM's 127 buses for VFs, but 0 are free; reserve fewer"
    );
}

#[test]
fn vfs_of_different_shape_are_refused() {
    let vfs = ["pf=pf0,index=0,num_queues=2", "pf=pf0,index=1,num_queues=4"];
    assert_eq!(
        wrong(&["--cpus", "boot=2", "--net", "id=pf0,sriov_vfs=8", "--net-vf", vfs[0], vfs[1]]),
        "--net-vf pf=pf0,index=1,num_queues=4: all VFs of a PF have the same number of queues, and VF 0 has 2; \
         make them equal"
    );
}

#[test]
fn queue_counts_that_cannot_be_are_refused() {
    assert_eq!(
        wrong_vf("pf=pf0,index=0,num_queues=1"),
        "--net-vf pf=pf0,index=0,num_queues=1: a NIC has one pair of queues or more; give 2 or more"
    );
    assert_eq!(
        wrong_vf("pf=pf0,index=0,num_queues=6"),
        "--net-vf pf=pf0,index=0,num_queues=6: 3 queue pairs, but the VM was created with or resized to 2 vCPUs; \
         give at most 4, or more vCPUs"
    );
}

#[test]
fn backends_that_exclude_each_other_are_refused() {
    assert_eq!(
        wrong_vf("pf=pf0,index=2,vdpa=/dev/vhost-vdpa-2,tap=clitest2"),
        "--net-vf pf=pf0,index=2,vdpa=/dev/vhost-vdpa-2: tap cannot be combined with a vDPA device; leave tap out, \
         or vdpa"
    );
    assert_eq!(
        wrong(&["--net", "socket=/run/s", "--vdpa", "path=/dev/vhost-vdpa-0"]),
        "--net socket=/run/s: only a vhost-user backend has a socket; add vhost_user=on, or leave socket out"
    );
    assert_eq!(
        wrong(&["--vdpa", "path=/dev/vhost-vdpa-0", "path=/dev/vhost-vdpa-0,id=v"]),
        "--vdpa id=v,path=/dev/vhost-vdpa-0: this device is already in use by _vdpa0; give each NIC and each VF its own"
    );
    assert_eq!(malformed("--net", "vhost=perhaps"), "--net vhost=perhaps: give on, off or auto");
    assert_eq!(malformed("--vdpa", "num_queues=2"), "--vdpa: path is required; add it");
}

// The log.

#[test]
fn a_log_file_that_cannot_be_written_is_refused() {
    assert_eq!(
        wrong(&["--log-file", "/nonexistent/log"]),
        "--log-file /nonexistent/log: the folder /nonexistent does not exist; make it (mkdir -p), or give another path"
    );
}

#[test]
fn a_log_format_of_unknown_tokens_is_refused() {
    let said = usage(&["--kernel", "k", "--log-format", "{level} {x}"]);
    let expected = "invalid value '{level} {x}' for '--log-format <format>': {x} is not a token; --help lists them";
    assert!(said.starts_with(expected), "{said}");
}

#[test]
fn a_wrong_configuration_leaves_no_log_file() {
    assert_eq!(wrong(&["--log-file", "log", "--cpus", "boot=0"]), "--cpus boot=0: a VM needs a vCPU; give 1 or more");
}
