//! Every option and key that `--help` lists is used by a test. A new one fails here until it is added.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::run::BINARY;

/// The key whose only supported value is the default. Any other is refused by name.
const ONLY_DEFAULT: &str = "iommu";
/// Options of every VM here, for options that depend on others.
const AROUND: [(&str, &str); 7] = [
    ("--kernel", "/k"),
    ("--cpus", "boot=4"),
    ("--platform", "num_pci_segments=3,iommufd_fd=31"),
    ("--rate-limit-group", "id=around,bw_size=1,bw_refill_time=1"),
    ("--net", "id=n,mac=02:00:00:00:00:01,sriov_vfs=2"),
    ("--net", "id=m,mac=02:00:00:00:00:02,sriov_vfs=2"),
    ("--net", "id=s,mac=02:00:00:00:00:04,sriov_vfs=2,switch=veb,tap=s0,uplink_rate=100"),
];

/// The options of a help text, each with its keys. Options are indented by 6 characters, their keys by 10.
fn options(help: &str) -> Vec<(String, Vec<String>)> {
    let mut options: Vec<(String, Vec<String>)> = Vec::new();
    for line in help.lines() {
        let text = line.trim_start();
        match line.len() - text.len() {
            2 | 6 if text.starts_with('-') => {
                let long = text.split([' ', ',']).find(|word| word.starts_with("--")).unwrap_or("-v");
                options.push((long.to_owned(), Vec::new()));
            }
            10 => {
                let key = text.split_once('=').map_or("", |(key, _)| key);
                if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                    // Keys of an argument without a name belong to the other command's option.
                    options.iter_mut().last().into_iter().for_each(|(_, keys)| keys.push(key.to_owned()));
                }
            }
            _ => {}
        }
    }
    options
}

fn help(command: &str, arguments: &[&str]) -> String {
    let output = Command::new(command).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command} {arguments:?} --help");
    String::from_utf8(output.stdout).unwrap()
}

/// A value of `option` without `key`, or with another value for it, that is complete otherwise.
fn base(option: &str, key: &str) -> String {
    let limits = "bw_size=1,bw_refill_time=1,ops_size=1,ops_refill_time=1";
    let base = match (option, key) {
        ("--disk", "socket") => "vhost_user=on,socket=/s",
        ("--disk", "backing_files") => "path=/d,image_type=qcow2",
        ("--generic-vhost-user", "virtio_id") => "virtio_id=26,socket=/s,queue_sizes=[64]",
        ("--net-vf", "isolated" | "mirror" | "weight" | "min_tx_rate") => "pf=s,index=0",
        ("--net-vf", _) => "pf=n,index=0",
        ("--console", _) => "null",
        ("--pmem", _) => "file=/p,size=128M",
        ("--cpus", "topology") => "boot=4,max=4",
        ("--balloon", _) => "size=0",
        ("--device", _) => "path=/d",
        ("--disk", _) => "path=/d",
        ("--fs", _) => "tag=t,socket=/s",
        ("--generic-vhost-user", _) => "device_type=26,socket=/s,queue_sizes=[64]",
        ("--net", _) => "id=o,mac=02:00:00:00:00:03",
        ("--rate-limit-group", _) => "id=g",
        ("--rng", _) => "src=/dev/random",
        ("--rtc", _) => "id=c",
        ("--tpm", _) => "socket=/t",
        ("--landlock-rules", _) => "path=/p,access=r",
        ("--numa", "memory_zones") => "guest_numa_id=0,memory_zones=[z] guest_numa_id=1,memory_zones=[y]",
        ("--numa", _) => "guest_numa_id=0,memory_zones=[z,y]",
        ("--vdpa", _) => "path=/v",
        ("--vsock", _) => "cid=4,socket=/t",
        ("--cpus", _) => "boot=1",
        ("--memory", _) => "size=256M",
        ("--memory-zone", _) => "id=z,size=256M",
        ("--pci-segment", _) => "pci_segment=1",
        ("--platform", "iommu_address_width") => "num_pci_segments=2,iommu=on",
        ("--platform", _) => "num_pci_segments=2",
        _ => panic!("{option}: give it a line here"),
    };
    let more = match (option, key) {
        ("--net" | "--net-vf", "ip" | "mask") => "ip=10.0.0.1,mask=255.255.255.0",
        ("--net" | "--net-vf", "offload_csum") => "offload_tso=off,offload_ufo=off",
        ("--net" | "--net-vf", "socket" | "vhost_mode") => "vhost_user=on,socket=/s",
        ("--net" | "--net-vf", "vlan_qos" | "vlan_proto") => "vlan=5",
        ("--net", "isolated" | "mirror" | "weight" | "workers") => "switch=veb,sriov_vfs=2",
        ("--net", "uplink_rate") => "switch=veb,sriov_vfs=2,tap=o0",
        ("--net", "guest_control") => "sriov_vfs=2",
        ("--net", "min_tx_rate") => "switch=veb,sriov_vfs=2,tap=o0,uplink_rate=100",
        ("--memory" | "--memory-zone", "hugepage_size") => "hugepages=on",
        (_, key) if key.starts_with("bw_") || key.starts_with("ops_") => limits,
        ("--rate-limit-group", _) => limits,
        _ => return base.to_owned(),
    };
    format!("{base},{more}")
}

/// A value for `key` that is not its default, with other keys that it needs.
fn other(option: &str, key: &str) -> &'static str {
    match (option, key) {
        ("--cpus", "boot") => "2,max=2",
        ("--net" | "--net-vf", "num_queues") => "4",
        ("--net" | "--net-vf", "vhost_user") => "on,socket=/other",
        (_, "num_queues" | "num_pci_segments" | "mmio32_aperture_weight" | "mmio64_aperture_weight") => "3",
        (_, "boot" | "max") => "3",
        ("--pci-segment", "pci_segment") => "2",
        (_, "index" | "sriov_vfs" | "pci_segment") => "1",
        (_, "pci_device_id") => "9",
        (_, "pf") => "m",
        (_, "id") => "other",
        (_, "device_type" | "virtio_id") => "sound",
        (_, "queue_size") => "512",
        (_, "queue_sizes") => "[64,64]",
        (_, "affinity" | "queue_affinity") => "[0@[0]]",
        (_, "topology") => "2:2:1:1",
        (_, "features") => "amx",
        (_, "max_phys_bits") => "40",
        (_, "core_scheduling") => "off",
        ("--pmem", "size") => "256M",
        ("--memory", "hotplugged_size") => "128M,hotplug_method=virtio-mem,hotplug_size=1G",
        (_, "hotplugged_size") => "128M,hotplug_size=1G",
        (_, "size" | "hotplug_size") => "128M",
        (_, "hugepage_size") => "2M",
        (_, "host_numa_node" | "numa") => "0",
        (_, "hotplug_method") => "virtio-mem",
        (_, "access") => "rw",
        (_, "cid") => "7",
        (_, "x_exclude_mmap_bars") => "[2]",
        (_, "cpus") => "[0]",
        (_, "distances") => "[0@10]",
        (_, "pci_segments") => "[0]",
        (_, "device_id") => "n",
        (_, "mtu") => "1400",
        (_, "model") => "x550",
        (_, "vlan" | "vlan_qos" | "storm" | "max_tx_rate" | "min_tx_rate" | "uplink_rate") => "7",
        (_, "vlan_proto") => "802.1ad",
        (_, "trunk") => "[5]",
        (_, "guest_control") => "[vlan:5-9,mac]",
        (_, "switch") => "veb,sriov_vfs=1",
        (_, "mirror") => "1",
        (_, "weight") => "7",
        (_, "workers") => "2",
        (_, "link") => "down",
        (_, "ip") => "10.0.0.9",
        (_, "mask") => "255.255.0.0",
        (_, "mac" | "host_mac") => "02:00:00:00:00:09",
        (_, "tap") => "tap9",
        (_, "rate_limit_group") => "around",
        (_, "iommufd_fd") => "30",
        (_, "fd") => "[30]",
        (_, "vhost_mode") => "server",
        (_, "image_type") => "qcow2",
        (_, "lock_granularity") => "full",
        (_, "offload_tso" | "offload_ufo" | "offload_csum" | "sparse" | "thp" | "nested" | "trust") => "off",
        (_, "oem_strings") => "[a,b]",
        (_, "iommu_segments") => "[1]",
        (_, "iommu_address_width") => "48",
        (_, "system_uuid") => "12345678-1234-1234-1234-123456789abc",
        (_, key) if key.starts_with("system_") || key == "chassis_asset_tag" => "text",
        (_, key) if key.starts_with("bw_") || key.starts_with("ops_") => "77",
        (_, "path" | "socket" | "file" | "src" | "vdpa" | "tag" | "serial") => "/other",
        _ => "on",
    }
}

/// `value` with another value for `key`, or with this key at its end.
fn with(value: &str, key: &str, new: &str) -> String {
    let begin = format!("{key}=");
    let others: Vec<_> = value.split(',').filter(|pair| !pair.starts_with(&begin)).collect();
    format!("{},{begin}{new}", others.join(",")).trim_end_matches(',').trim_start_matches(',').to_owned()
}

/// Printed configuration of a VM with this option, or the error.
fn printed(option: &str, value: &str) -> Result<String, String> {
    let once = ["--cpus", "--platform"];
    let around = AROUND.iter().filter(|(other, _)| *other != option || !once.contains(other));
    let mut command = Command::new(BINARY);
    command.arg("--print-config").args(around.flat_map(|(option, value)| [option, value]));
    if option == "--memory-zone" {
        command.args(["--memory", "size=0,hotplug_method=virtio-mem"]);
    }
    if option == "--landlock-rules" {
        command.arg("--landlock");
    }
    if option == "--net" {
        command.args(["--numa", "guest_numa_id=0"]);
    }
    if option == "--numa" {
        command.args(["--memory", "size=0", "--memory-zone", "id=z,size=256M", "id=y,size=256M"]);
    }
    let output = command.arg(option).args(value.split(' ')).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn every_key_changes_the_vm_or_is_refused_by_name() {
    let mut keys = 0;
    for (option, key) in
        options(&help(BINARY, &[])).iter().flat_map(|(option, keys)| keys.iter().map(move |key| (option, key)))
    {
        if option == "--restore" {
            // It describes no VM to print.
            continue;
        }
        let base = base(option, key);
        let given = match (option.as_str(), key.as_str()) {
            // They take the place of `path`.
            ("--disk", "vhost_user") => "vhost_user=on,socket=/other".to_owned(),
            ("--device", "fd") => "fd=30".to_owned(),
            // Each zone has a node.
            ("--numa", "guest_numa_id") => "guest_numa_id=0,memory_zones=[z] guest_numa_id=1,memory_zones=[y]".into(),
            ("--numa", "memory_zones") => "guest_numa_id=0,memory_zones=[y] guest_numa_id=1,memory_zones=[z]".into(),
            _ => with(&base, key, other(option, key)),
        };
        let before = printed(option, &base).unwrap_or_else(|why| panic!("{option} {base}: {why}"));
        match printed(option, &given) {
            Ok(after) => assert_ne!(after, before, "{option} {given}: {key} has no effect"),
            Err(why) => {
                let named = why.contains(option.as_str()) && why.contains(&format!("{key}="));
                assert!(key == ONLY_DEFAULT && named, "{option} {given}: {why}");
            }
        }
        keys += 1;
    }
    assert!(keys > 100, "{keys} keys in the help");
}

/// The tests in all Rust files below `folder`: all of a file of tests, and a source file from its tests on.
fn tests(folder: &Path) -> String {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let text = paths.map(|path| match path.extension().and_then(|extension| extension.to_str()) {
        _ if path.is_dir() => tests(&path),
        Some("rs") if !path.ends_with("cli/keys.rs") => {
            let text = fs::read_to_string(&path).unwrap();
            let is_test = path.iter().any(|part| part == "tests" || part == "tests.rs");
            if is_test {
                text
            } else {
                text.split_once("#[cfg(test)]").map_or(<_>::default(), |(_, tests)| tests.into())
            }
        }
        _ => String::new(),
    });
    text.collect()
}

/// By text: an option is in a string of a test's source, alone or with its value. Options with keys are used above.
#[test]
fn every_option_and_subcommand_is_in_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text: String = ["tests", "src", "vmm"].map(|folder| tests(&root.join(folder))).concat();
    let is_used = |word: &str| {
        let after = |rest: &str| rest.starts_with(['"', ' ', '=', '\\']);
        text.match_indices(word).any(|(at, _)| text[..at].ends_with(['"', ' ']) && after(&text[at + word.len()..]))
    };
    let remote = env!("CARGO_BIN_EXE_ch-remote");
    let overview = help(remote, &[]);
    let commands = overview.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Continuation lines of a long description are indented more.
    let commands = commands.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let commands: Vec<_> = commands.map(|line| line.split_whitespace().next().unwrap()).collect();
    assert!(commands.len() > 30, "{commands:?}");
    let mut missing: Vec<String> = Vec::new();
    for command in commands.into_iter().filter(|command| *command != "help") {
        if !is_used(command) {
            missing.push(format!("ch-remote {command}"));
        }
        let of_command = options(&help(remote, &[command])).into_iter().map(|(option, _)| option);
        missing
            .extend(of_command.filter(|option| !is_used(option)).map(|option| format!("ch-remote {command} {option}")));
    }
    let of_program =
        options(&help(BINARY, &[])).into_iter().filter(|(option, keys)| keys.is_empty() && !is_used(option));
    missing.extend(of_program.map(|(option, _)| option));
    assert!(missing.is_empty(), "no test uses these: {missing:#?}");
}
