//! The command line's text, JSON and help of the configuration types.

use std::net::IpAddr;
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use vmm::config::*;

fn problem<T: std::str::FromStr<Err = ConfigError>>(text: &str) -> String {
    text.parse::<T>().err().map(|error| error.to_string()).unwrap_or_else(|| format!("{text} is accepted"))
}

#[test]
fn the_defaults_are_cloud_hypervisors() {
    let net: NetConfig = "".parse().unwrap();
    assert_eq!((net.num_queues, net.queue_size, net.sriov_vfs, net.pci_segment), (2, 256, 0, 0));
    assert!(net.offload_tso && net.offload_ufo && net.offload_csum);
    assert_eq!(net, NetConfig::default());
    assert_eq!("".parse::<MemoryConfig>().unwrap().size, 512 << 20);
    assert!(MemoryConfig::default().thp);
    assert_eq!(
        "boot=3".parse::<CpusConfig>().unwrap(),
        CpusConfig { boot_vcpus: 3, max_vcpus: 3, ..CpusConfig::default() }
    );
    assert_eq!(VmConfig::default().serial.mode, ConsoleMode::Null);
    assert_eq!(VmConfig::default().console.mode, ConsoleMode::Tty);
}

#[test]
fn an_empty_value_leaves_a_key_unset() {
    assert_eq!("tap=,num_queues=,offload_tso=,fd=,mac=,ip=,mask=".parse::<NetConfig>().unwrap(), NetConfig::default());
}

#[test]
fn a_key_given_twice_is_refused() {
    assert_eq!(problem::<NetConfig>("tap=a,tap=b"), "--net tap=b: the key is given twice; give it once");
}

#[test]
fn toggles_and_sizes_are_read_as_cloud_hypervisor_does() {
    for (text, value) in [("on", true), ("TRUE", true), ("off", false), ("False", false)] {
        assert_eq!(format!("shared={text}").parse::<MemoryConfig>().unwrap().shared, value);
    }
    for (text, value) in [("4096", 4096), ("3K", 3 << 10), ("5M", 5 << 20), ("7G", 7 << 30)] {
        assert_eq!(format!("size={text}").parse::<MemoryConfig>().unwrap().size, value);
    }
    for text in ["1.5G", "1g", "-1", "+1", "K", "18446744073709551616", "17179869184G", "é"] {
        assert_eq!(
            problem::<MemoryConfig>(&format!("size={text}")),
            format!("--memory size={text}: give a number of bytes, with or without a unit K, M or G, such as 512M")
        );
    }
    assert_eq!(problem::<MemoryConfig>("shared=yes"), "--memory shared=yes: give on or off");
}

#[test]
fn lists_have_ascending_ranges() {
    let fds = |text: &str| format!("fd={text}").parse::<NetConfig>().map(|net| net.backend.fds);
    assert_eq!(fds("[3,5-7]").unwrap(), [3, 5, 6, 7]);
    assert_eq!(fds("4").unwrap(), [4]);
    assert_eq!(problem::<NetConfig>("fd=[5-5]"), "--net fd=[5-5]: a range must be ascending");
    assert_eq!(problem::<NetConfig>("fd=[3,x]"), "--net fd=[3,x]: give a list of numbers, such as [3,4] or [3-6]");
    assert_eq!(
        problem::<NetConfig>("fd=[0-2147483647]"),
        "--net fd=[0-2147483647]: the list is longer than 65536 numbers"
    );
}

#[test]
fn a_list_of_texts_has_quotes_where_it_needs_them() {
    let strings =
        |text: &str| format!("oem_strings={text}").parse::<PlatformConfig>().map(|platform| platform.oem_strings);
    assert_eq!(strings("[io.systemd.credential:a=b]").unwrap(), ["io.systemd.credential:a=b"]);
    assert_eq!(strings("[one,\"two, \"\"three\"\"\",four five]").unwrap(), ["one", "two, \"three\"", "four five"]);
    assert_eq!(problem::<PlatformConfig>("oem_strings=[a"), "--platform oem_strings=[a: a bracket is not closed");
}

#[test]
fn an_unknown_key_is_an_error() {
    assert_eq!(
        problem::<NetConfig>("tapp=x"),
        "--net tapp=x: unknown key; did you mean tap? --help lists those of --net"
    );
    assert_eq!(problem::<NetVf>("pf=a,index=0,id=x"), "--net-vf id=x: unknown key; --help lists those of --net-vf");
    assert_eq!(problem::<CpusConfig>("boot"), "--cpus boot: the key has no value; write boot=<number>");
    assert_eq!(problem::<CpusConfig>("boot=[1"), "--cpus boot=[1: a bracket is not closed");
}

#[test]
fn a_key_of_a_later_version_is_refused_by_name() {
    assert_eq!(
        problem::<CpusConfig>("boot=2,profile=skylake"),
        "--cpus profile=skylake: CPU profiles are not supported yet; leave profile out"
    );
    assert_eq!(
        problem::<MemoryConfig>("hotplug_method=balloon"),
        "--memory hotplug_method=balloon: give acpi or virtio-mem"
    );
}

#[test]
fn a_key_of_a_later_version_may_be_there_at_its_default() {
    let cpus = "boot=2,nested=on,core_scheduling=vm,kvm_hyperv=off,max_phys_bits=46,features=,affinity=[],profile=host";
    assert_eq!(cpus.parse::<CpusConfig>().unwrap(), "boot=2".parse().unwrap());
    assert_eq!("mergeable=off,hotplug_method=acpi".parse::<MemoryConfig>().unwrap(), MemoryConfig::default());
    assert_eq!(
        "sparse=on,backing_files=off,lock_granularity=byte-range".parse::<DiskConfig>().unwrap(),
        DiskConfig::default()
    );
    assert_eq!(
        "num_pci_segments=1,iommufd=off,vfio_p2p_dma=on".parse::<PlatformConfig>().unwrap(),
        PlatformConfig::default()
    );
    assert_eq!("off,id=c".parse::<ConsoleConfig>().unwrap().mode, ConsoleMode::Off);
}

#[test]
fn a_console_is_a_word_or_a_path() {
    let read = |text: &str| text.parse::<ConsoleConfig>();
    assert_eq!(read("tty").unwrap(), ConsoleConfig::new(ConsoleMode::Tty));
    let file = read("file=/tmp/a").unwrap();
    assert_eq!((file.mode, file.file, file.socket), (ConsoleMode::File, Some(PathBuf::from("/tmp/a")), None));
    for text in ["", "on", "file", "file=", "tty=1", "off,null", "file=\"a", "id=c", "tty,id", "tty,pci_device_id=x"] {
        assert!(read(text).is_err(), "{text}");
    }
    let text = "tty,id=c,pci_segment=1,pci_device_id=9,iommu=on";
    assert_eq!(read(text).unwrap().to_string(), text);
}

#[test]
fn json_has_cloud_hypervisors_names() {
    let json = r#"{
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2}, "memory": {"size": 1073741824, "shared": true},
        "payload": {"kernel": "/boot/vmlinuz", "cmdline": "console=ttyS0"},
        "net": [{"id": "pf0", "tap": "t", "mac": "52:54:00:00:00:01", "vhost_socket": null, "vhost_mode": "Client",
                 "fds": null, "sriov_vfs": 8, "vfs": [{"index": 3, "tap": "u"}]}],
        "serial": {"mode": "Tty"}, "console": {"mode": "Off"}
    }"#;
    let config: VmConfig = serde_json::from_str(json).unwrap();
    assert_eq!((config.cpus.boot_vcpus, config.memory.size, config.memory.shared), (2, 1 << 30, true));
    assert_eq!(config.net[0].mac, Some(MacAddress([0x52, 0x54, 0, 0, 0, 1]).into()));
    assert_eq!((config.net[0].vfs[0].index.one(), config.net[0].vfs[0].backend.tap.as_deref()), (Some(3), Some("u")));
    assert_eq!(config.serial.mode, ConsoleMode::Tty);
    assert_eq!(VmPlan::of(&config).unwrap().nets().next().unwrap().vfs.len(), 8);
    assert_eq!(serde_json::from_str::<VmConfig>(&serde_json::to_string(&config).unwrap()).unwrap(), config);
}

#[test]
fn json_leaves_out_what_is_unset() {
    let net = serde_json::to_value(NetConfig::default()).unwrap();
    for key in ["id", "tap", "ip", "mac", "mtu", "fds", "vhost_socket", "rate_limiter_config", "vfs"] {
        assert!(net.get(key).is_none(), "{key}");
    }
    assert_eq!((&net["pci_segment"], &net["num_queues"]), (&0.into(), &2.into()));
}

#[test]
fn json_with_an_unknown_or_a_missing_field_is_an_error() {
    for (json, what) in [
        (r#"{"net":[{"sriov_vf":1}]}"#, "unknown field `sriov_vf`"),
        (r#"{"net":[{"vfs":[{"tap":"u"}]}]}"#, "index is required"),
        (r#"{"serial":{}}"#, "missing field `mode`"),
        (r#"{"net":[{"mac":"x"}]}"#, "not a MAC address"),
        (r#"{"tpms":[1]}"#, "unknown field `tpms`"),
    ] {
        let error = serde_json::from_str::<VmConfig>(json).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn help_lists_every_key_with_its_grammar_and_default() {
    let text = help::<NetConfig>();
    for line in ["tap=<interface>\n", "fd=[<fd>,...]\n", "sriov_vfs=<number>\n", "offload_tso=on|off\n"] {
        assert!(text.contains(line), "{text}");
    }
    assert!(
        text.contains(
            "a power of two from 2 to 32768. Below 128 the guest receives no packets larger than the MTU. [default: \
             256]"
        ),
        "{text}"
    );
    assert!(help::<NetVf>().starts_with("pf=<id>\n"));
    // A value that follows from another key has no default.
    let (text, max) = (help::<CpusConfig>(), "By default the same as boot.");
    assert!(text.contains(max) && !text.contains(&format!("{max} [default")), "{text}");
    // An index has no default.
    assert!(!help::<NetVf>().contains("[default: 0]"));
    for key in NetConfig::keys() {
        assert!(!key.about.is_empty() && !key.syntax.is_empty(), "{}", key.name);
    }
}

fn text() -> impl Strategy<Value = String> {
    // Commas, quotes, brackets and blanks, which are part of the grammar, and anything else.
    prop_oneof![r#"[a-z,="\[\] ]{1,12}"#, any::<String>()].prop_filter("empty is unset", |text| !text.is_empty())
}

fn mac() -> impl Strategy<Value = MacAddress> {
    any::<[u8; 6]>().prop_map(MacAddress)
}

fn choice() -> impl Strategy<Value = MacChoice> {
    prop_oneof![mac().prop_map(MacChoice::Given), Just(MacChoice::Any)]
}

prop_compose! {
    fn net()(
        id in option::of(text()), tap in option::of(text()), ip: Option<IpAddr>, mask: Option<IpAddr>,
        (mac, host_mac) in (option::of(choice()), option::of(mac())), mtu: Option<u16>, num_queues: u16,
        queue_size: u16,
        fds in vec(0..i32::MAX, 0..5), offloads: [bool; 3], pci_segment: u16, sriov_vfs: u16,
    ) -> NetConfig {
        let [offload_tso, offload_ufo, offload_csum] = offloads;
        NetConfig {
            id, backend: BackendConfig { tap, ip, mask, host_mac, fds, ..BackendConfig::default() },
            mac, mtu, num_queues, queue_size, offload_tso, offload_ufo, offload_csum,
            pci_segment, sriov_vfs, ..NetConfig::default()
        }
    }
}

fn vhost() -> impl Strategy<Value = Vhost> {
    prop_oneof![Just(Vhost::Off), Just(Vhost::On), Just(Vhost::Auto)]
}

prop_compose! {
    fn vf()(
        index: u16, tap in option::of(text()), mac in option::of(choice()), num_queues: Option<u16>,
        offload_tso: Option<bool>, vhost in vhost(), vhost_user: bool, socket in option::of(text()),
        vdpa in option::of(text()),
    ) -> VfConfig {
        let backend = BackendConfig {
            tap, vhost: Some(vhost), vhost_user, vhost_mode: VhostMode::Server, vhost_socket: socket.map(PathBuf::from),
            vdpa: vdpa.map(PathBuf::from), ..BackendConfig::default()
        };
        VfConfig { index: index.into(), backend, mac, num_queues, offload_tso, ..VfConfig::default() }
    }
}

proptest! {
    #[test]
    fn a_net_reads_back_what_it_prints(net in net()) {
        prop_assert_eq!(net.to_string().parse::<NetConfig>().unwrap(), net.clone());
        let json = serde_json::to_string(&net).unwrap();
        prop_assert_eq!(serde_json::from_str::<NetConfig>(&json).unwrap(), net);
    }

    #[test]
    fn a_vf_reads_back_what_it_prints(vf in vf()) {
        let read: NetVf = format!("pf=pf0,{vf}").parse().unwrap();
        prop_assert_eq!(read, NetVf { pf: "pf0".to_string(), vf });
    }

    #[test]
    fn cpus_and_memory_read_back_what_they_print(
        boot_vcpus: u32, max_vcpus: u32, size: u64, page: Option<u64>, shared: bool, room: Option<u64>,
        mergeable: bool, reserve: bool,
    ) {
        let cpus = CpusConfig { boot_vcpus, max_vcpus, ..CpusConfig::default() };
        prop_assert_eq!(cpus.to_string().parse::<CpusConfig>().unwrap(), cpus);
        let memory = MemoryConfig {
            size, hugepage_size: page, shared, hotplug_size: room, mergeable, reserve, ..MemoryConfig::default()
        };
        prop_assert_eq!(memory.to_string().parse::<MemoryConfig>().unwrap(), memory);
    }

    #[test]
    fn a_platform_reads_back_what_it_prints(family in option::of(text()), oem_strings in vec(any::<String>(), 0..4)) {
        let platform = PlatformConfig { system_family: family, oem_strings, ..PlatformConfig::default() };
        prop_assert_eq!(platform.to_string().parse::<PlatformConfig>().unwrap(), platform.clone());
        let json = serde_json::to_string(&platform).unwrap();
        prop_assert_eq!(serde_json::from_str::<PlatformConfig>(&json).unwrap(), platform);
    }

    #[test]
    fn a_console_reads_back_what_it_prints(path in text()) {
        let console = ConsoleConfig { file: Some(path.into()), ..ConsoleConfig::new(ConsoleMode::File) };
        prop_assert_eq!(console.to_string().parse::<ConsoleConfig>().unwrap(), console);
    }

    #[test]
    fn no_text_panics_and_every_report_is_one_line(text in any::<String>()) {
        let tap = format!("tap={text}");
        for error in [text.parse::<NetConfig>().err(), text.parse::<NetVf>().err(), tap.parse::<NetConfig>().err()] {
            prop_assert!(!error.is_some_and(|error| error.to_string().contains(char::is_control)));
        }
    }

    #[test]
    fn no_configuration_panics_and_a_plan_has_no_two_equal(nets in vec(net(), 0..5), vfs in vec(vf(), 0..3)) {
        let mut config = VmConfig { net: nets, ..VmConfig::default() };
        config.payload.kernel = Some("k".into());
        if let Some(net) = config.net.first_mut() {
            net.vfs = vfs;
        }
        let _ = VmPlan::of(&config);
        // Corrects what is nearly always wrong in a random configuration.
        for (index, net) in config.net.iter_mut().enumerate() {
            let mac = net.mac.and_then(MacChoice::given).map(|mac| MacAddress::local(mac.0).into());
            *net = NetConfig { sriov_vfs: net.sriov_vfs % 300, mac, ..NetConfig::default() };
            net.backend.tap = Some(format!("t{index}"));
        }
        let plan = VmPlan::of(&config).unwrap();
        let functions: Vec<_> = plan.nets().flat_map(|device| std::iter::once(&device.pf).chain(&device.vfs)).collect();
        let macs: std::collections::HashSet<_> = functions.iter().map(|nic| nic.spec.mac).collect();
        let ids: std::collections::HashSet<_> = functions.iter().map(|nic| &nic.spec.id).collect();
        prop_assert_eq!((macs.len(), ids.len()), (functions.len(), functions.len()));
        // Values that were chosen stay, even when a device is added.
        let planned = PlannedVm::new(config).unwrap();
        let (mut config, plan) = (planned.config().clone(), planned.plan());
        prop_assert_eq!(&VmPlan::of(&config).unwrap(), plan);
        config.net.push(NetConfig::default());
        let grown = VmPlan::of(&config).unwrap();
        prop_assert!(plan.nets().all(|net| grown.nets().any(|grown| grown == net)));
    }
}
