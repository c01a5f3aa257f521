//! Parses requests into actions, without a socket.

use std::os::fd::{AsRawFd, OwnedFd};

use proptest::prelude::*;
use serde_json::{Value, json};
use vmm::ErrorKind;
use vmm::api::{Action, Failure, NewDevice, ROUTES, Refusal, Request};
use vmm::config::{LinkPolicy, VmConfig};

fn ask(method: &str, name: &str, body: &[u8]) -> Result<Action, Refusal> {
    Request { method, path: &format!("/api/v1/{name}"), body, fds: Vec::new() }.action()
}

fn put(name: &str, body: &Value) -> Result<Action, Failure> {
    ask("PUT", name, body.to_string().as_bytes()).map_err(|refusal| match refusal {
        Refusal::Failure(failure) => failure,
        Refusal::Method { allow } => panic!("{name} has the method {allow}"),
    })
}

/// The reason for the refusal of a request.
fn problem(name: &str, body: &Value) -> String {
    let failure = put(name, body).unwrap_err();
    assert_eq!(failure.kind, ErrorKind::Invalid);
    assert_eq!(failure.chain[0], format!("{name}: the request is not valid"));
    assert_eq!(failure.chain.len(), 2);
    failure.chain[1].clone()
}

#[test]
fn each_endpoint_without_a_body_is_its_action() {
    for (method, name, action) in [
        ("GET", "vmm.ping", "Ping"),
        ("PUT", "vmm.shutdown", "ShutdownVmm"),
        ("PUT", "vmm.nmi", "Nmi"),
        ("PUT", "vm.nmi", "Nmi"),
        ("PUT", "vm.boot", "Boot"),
        ("PUT", "vm.delete", "Delete"),
        ("GET", "vm.info", "Info"),
        ("GET", "vm.counters", "Counters"),
        ("PUT", "vm.pause", "Pause"),
        ("PUT", "vm.shutdown", "Shutdown"),
        ("PUT", "vm.reboot", "Reboot"),
        ("PUT", "vm.power-button", "PowerButton"),
    ] {
        assert_eq!(format!("{:?}", ask(method, name, b"").unwrap()), action);
        let Err(Refusal::Failure(failure)) = ask(method, name, b"{}") else { panic!("{name} accepted a body") };
        assert_eq!(failure.chain[1], format!("{name} takes no body; send none"));
    }
}

#[test]
fn vm_resume_accepts_a_body_that_forces_the_resume() {
    for (body, expected) in [(&b""[..], false), (b"{}", false), (br#"{"force": true}"#, true)] {
        let Ok(Action::Resume(options)) = ask("PUT", "vm.resume", body) else { panic!("{body:?}") };
        assert_eq!(options.force, expected);
    }
    assert!(ask("PUT", "vm.resume", br#"{"forced": true}"#).is_err());
}

/// A VM with the device that an action adds.
fn with_added(action: Result<Action, Failure>) -> VmConfig {
    let Ok(Action::Add(device)) = action else { panic!("{action:?}") };
    let mut config = VmConfig::default();
    device.push(&mut config).unwrap();
    config
}

#[test]
fn a_body_becomes_its_endpoints_action() {
    let Ok(Action::Create(config)) = put("vm.create", &json!({"payload": {}, "net": [{"id": "pf0", "sriov_vfs": 8}]}))
    else {
        panic!()
    };
    assert_eq!(config.net[0].sriov_vfs, 8);
    let net = put("vm.add-net", &json!({"tap": "t", "vfs": [{"index": 1}]}));
    let Ok(Action::Add(NewDevice::Net(net, fds))) = net else { panic!() };
    assert_eq!((net.backend.tap.as_deref(), net.vfs[0].index.one(), fds.len()), (Some("t"), Some(1), 0));
    let disk = put("vm.add-disk", &json!({"path": "/d", "image_type": "Raw"}));
    assert_eq!(with_added(disk).disks[0].path, Some("/d".into()));
    let vdpa = put("vm.add-vdpa", &json!({"path": "/dev/vhost-vdpa-0"}));
    assert_eq!(with_added(vdpa).vdpa[0].num_queues, 1);
    let Ok(Action::Resize(resize)) = put("vm.resize", &json!({"desired_vcpus": 2})) else { panic!() };
    assert_eq!((resize.desired_vcpus, resize.desired_ram), (Some(2), None));
    let Ok(Action::SetVf(vf, _)) = put("vm.set-vf", &json!({"pf": "pf0", "index": 3, "link": "down"})) else {
        panic!()
    };
    assert_eq!(
        (&*vf.pf, vf.index.and_then(vmm::config::VfRange::one), vf.policy.link),
        ("pf0", Some(3), Some(LinkPolicy::Down))
    );
}

#[test]
fn an_empty_payload_is_a_vm_with_all_defaults() {
    let Ok(Action::Create(config)) = put("vm.create", &json!({"payload": {}})) else { panic!() };
    assert_eq!(*config, VmConfig::default());
    for body in [json!({}), json!({"payload": null, "cpus": {}})] {
        let said = "payload: is required; give what the VM boots, such as {\"kernel\": \"/boot/vmlinux\"}";
        assert_eq!(problem("vm.create", &body), said);
    }
}

#[test]
fn a_body_that_may_be_left_out_may_be_null() {
    for body in [&b""[..], b"null", b" null\r\n", b"{}", b"{\"force\": null}"] {
        let Ok(Action::Resume(options)) = ask("PUT", "vm.resume", body) else { panic!("{body:?}") };
        assert!(!options.force);
        let is_empty = !body.contains(&b'{');
        assert_eq!(ask("PUT", "vm.boot", body).is_ok(), is_empty, "{body:?}");
    }
    assert_eq!(problem("vm.resume", &json!("null")), "the body is JSON, but not an object");
}

#[test]
fn an_unknown_field_that_asks_for_nothing_is_taken() {
    for nothing in [json!(null), json!(false), json!(0), json!(""), json!([]), json!({})] {
        let body = json!({"payload": {"new": nothing}, "net": [{"new": nothing}], "new": nothing});
        let Ok(Action::Create(config)) = put("vm.create", &body) else { panic!("{nothing}") };
        assert_eq!(config.net.len(), 1);
        for (name, mut body) in [
            ("vm.add-net", json!({"tap": "t"})),
            ("vm.add-disk", json!({"path": "/d"})),
            ("vm.resize", json!({"desired_vcpus": 2})),
            ("vm.set-vf", json!({"pf": "p", "index": 0})),
            ("vm.remove-device", json!({"id": "x"})),
            ("vm.snapshot", json!({"destination_url": "file:///s"})),
            ("vm.send-migration", json!({"destination_url": "unix:/s"})),
            ("vm.resume", json!({})),
        ] {
            body["new"] = nothing.clone();
            assert!(put(name, &body).is_ok(), "{name}: {body}");
            body["new"] = json!([nothing]);
            let said = problem(name, &body);
            assert!(nothing.is_null() || said.starts_with("new: unknown field `new`"), "{said}");
        }
    }
}

#[test]
fn an_unknown_field_is_named_with_its_path() {
    for (name, body, what) in [
        (
            "vm.create",
            json!({"net": [{}, {"sriov_vf": 1}]}),
            "net[1].sriov_vf: unknown field `sriov_vf`; did you mean `sriov_vfs`?",
        ),
        ("vm.create", json!({"colour": 1}), "colour: unknown field `colour`, expected one of `cpus`"),
        ("vm.create", json!({"cpus": {"boot": 1}}), "cpus.boot: unknown field `boot`"),
        ("vm.add-net", json!({"vfs": [{"index": 0, "id": "x"}]}), "vfs[0].id: unknown field `id`"),
        ("vm.remove-device", json!({"id": "x", "force": true}), "force: unknown field `force`, expected `id`"),
        ("vm.set-vf", json!({"pf": "x", "index": 0, "speed": 10}), "speed: unknown field `speed`"),
        ("vm.resize", json!({"vcpus": 3}), "vcpus: unknown field `vcpus`"),
    ] {
        let problem = problem(name, &body);
        assert!(problem.starts_with(what), "{problem}");
    }
}

#[test]
fn an_invalid_value_is_named_with_its_path() {
    for (name, body, what) in [
        (
            "vm.create",
            json!({"net": [{"mac": "x"}]}),
            "net[0].mac: \"x\": not a MAC address; write it as 52:54:00:12:34:56",
        ),
        ("vm.create", json!({"cpus": 3}), "cpus: invalid type: integer `3`, expected an object"),
        ("vm.create", json!({"net": {}}), "net: invalid type: map, expected an array"),
        (
            "vm.create",
            json!({"cpus": {"boot_vcpus": -1}}),
            "cpus.boot_vcpus: invalid value: integer `-1`, expected a whole number from 1 to 254",
        ),
        (
            "vm.add-net",
            json!({"num_queues": 70_000}),
            "num_queues: invalid value: integer `70000`, expected a whole number from 2 to 509",
        ),
        ("vm.remove-device", json!({}), "missing field `id`"),
        (
            "vm.set-vf",
            json!({"pf": "p", "index": 0, "link": "sideways"}),
            "link: unknown variant `sideways`, expected one of `auto`, `up`, `down`",
        ),
        ("vm.add-vdpa", json!({}), "--vdpa: path is required; add it"),
        ("vm.resize", json!([]), "the body is JSON, but not an object"),
        ("vm.resize", json!(null), "the body is JSON, but not an object"),
        ("vm.create", json!("{}"), "the body is JSON, but not an object"),
    ] {
        assert_eq!(problem(name, &body), what);
    }
}

#[test]
fn invalid_json_is_refused_with_its_position() {
    let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
    for (body, what) in [
        (&b"{"[..], "the body is not JSON: EOF while parsing an object at line 1 column 1"),
        (b"{}x", "the body is not JSON: trailing characters at line 1 column 3"),
        (b"{\"id\": \"\xff\"}", "the body is not JSON: invalid unicode code point at line 1 column 9"),
        (&deep, "the body is not JSON: recursion limit exceeded at line 1 column 128"),
        (b"", "vm.resize takes a JSON object as its body; send one"),
    ] {
        let Err(Refusal::Failure(failure)) = ask("PUT", "vm.resize", body) else { panic!() };
        assert_eq!((failure.kind, &*failure.chain[1]), (ErrorKind::Invalid, what));
    }
}

#[test]
fn a_key_that_is_given_twice_is_named() {
    for (name, body, path) in [
        ("vm.create", r#"{"cpus": {"boot_vcpus": 1, "max_vcpus": 2, "boot_vcpus": 2}}"#, "cpus.boot_vcpus"),
        ("vm.add-net", r#"{"id": "a", "tap": "t", "id": "a"}"#, "id"),
        ("vm.resize", r#"{"desired_vcpus": 1, "desired_vcpus": 2}"#, "desired_vcpus"),
    ] {
        let Err(Refusal::Failure(failure)) = ask("PUT", name, body.as_bytes()) else { panic!() };
        let what = format!("{path}: the key is given twice; give it once");
        assert_eq!((failure.kind, &failure.chain[1]), (ErrorKind::Invalid, &what));
    }
}

#[test]
fn no_array_is_longer_than_a_vm_can_have_devices_for() {
    for (body, path, most) in [
        (json!({"net": vec![json!({}); 100_000]}), "net", 1024),
        (json!({"disks": vec![json!({}); 100_000]}), "disks", 1024),
        (json!({"vdpa": vec![json!({}); 100_000]}), "vdpa", 1024),
        (json!({"net": [{"fds": vec![3; 100_000]}]}), "net[0].fds", 1024),
        (json!({"net": [{"vfs": vec![json!({}); 100_000]}]}), "net[0].vfs", 32_512),
    ] {
        assert_eq!(problem("vm.create", &body), format!("{path}: more than {most} elements; give fewer"));
    }
}

#[test]
fn endpoints_of_cloud_hypervisor_that_are_missing_here_are_501() {
    let names = ["add-user-device", "coredump"];
    for name in names.map(|name| format!("vm.{name}")) {
        let failure = put(&name, &json!({"destination_url": "file:///tmp"})).unwrap_err();
        assert_eq!(failure.kind, ErrorKind::Unsupported);
        let [line] = &failure.chain[..] else { panic!("{failure:?}") };
        assert!(line.starts_with(&format!("{name}: ")) && line.ends_with(" not supported yet"), "{line}");
        assert_eq!(ask("GET", &name, b"").unwrap_err(), Refusal::Method { allow: "PUT" });
    }
}

#[test]
fn descriptor_numbers_in_a_configuration_are_refused() {
    assert_eq!(
        problem("vm.create", &json!({"net": [{"tap": "t", "fds": null}, {"fds": [3]}]})),
        "net[1].fds: a client's descriptor numbers mean nothing in this process; add the NIC with vm.add-net, and \
         send its \
         descriptors"
    );
    assert_eq!(
        problem("vm.add-net", &json!({"sriov_vfs": 1, "vfs": [{"index": 0, "fds": [3]}]})),
        "vfs[0].fds: a client's descriptor numbers mean nothing in this process; name the VF's tap instead"
    );
    assert!(put("vm.create", &json!({"payload": {}, "net": [{"fds": []}]})).is_ok());
}

/// Request of libvirt 11.3, without disks and host devices.
#[test]
fn libvirts_configuration_is_accepted() {
    let config = json!({
        "serial": {"mode": "Pty"}, "console": {"mode": "Pty"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "memory": {"size": 1_073_741_824_u64}, "platform": {},
        "payload": {"kernel": "/boot/vmlinuz", "cmdline": "console=ttyS0", "initramfs": "/boot/initrd"},
    });
    put("vm.create", &config).unwrap();
    let net = json!({
        "id": "net_0", "mac": "52:54:00:12:34:56", "iommu": false, "num_queues": 2, "queue_size": 256, "mtu": 1500,
    });
    put("vm.add-net", &net).unwrap();
}

/// Requests of Kata 4.1 and generated clients, including fields that they leave at their defaults.
#[test]
fn configurations_of_generated_clients_are_accepted() {
    let config = json!({
        "cpus": {
            "boot_vcpus": 1, "max_vcpus": 4, "kvm_hyperv": false, "max_phys_bits": 46, "nested": true, "affinity": null,
            "features": {},
            "topology": {"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1},
        },
        "memory": {
            "size": 536_870_912, "mergeable": false, "hotplug_method": "Acpi", "shared": true, "hugepages": false,
            "prefault": false, "thp": true, "zones": null, "hotplug_size": 17_179_869_184_u64,
        },
        "payload": {"kernel": "/vmlinux", "firmware": null, "cmdline": "quiet"},
        "net": [{
            "id": "eth0", "tap": "tap0_kata", "mac": "52:54:00:12:34:56", "iommu": false, "num_queues": 2,
            "queue_size": 256, "vhost_user": false, "vhost_mode": "Client", "pci_segment": 0, "offload_tso": true,
            "offload_ufo": true, "offload_csum": true, "rate_limiter_config": null,
        }],
        "serial": {"mode": "Off", "iommu": false}, "console": {"mode": "Off", "iommu": false, "file": null},
        "rng": {"src": "/dev/urandom"}, "balloon": null, "fs": null, "pmem": null, "devices": null, "user_devices": [],
        "vdpa": null, "vsock": null, "numa": null, "iommu": false, "watchdog": false, "pvpanic": false,
        "debug_console": {"mode": "Off", "iobase": 233}, "pci_segments": null, "tpm": null, "landlock_enable": false,
        "platform": {
            "num_pci_segments": 2, "iommu_segments": null, "iommu_address_width_bits": 64, "iommufd": false,
            "vfio_p2p_dma": true, "tdx": false, "sev_snp": false,
        },
    });
    let Ok(Action::Create(config)) = put("vm.create", &config) else { panic!() };
    assert_eq!((config.memory.shared, config.memory.hotplug_size, config.net.len()), (true, Some(16 << 30), 1));
}

#[test]
fn only_requests_that_give_taps_or_devices_accept_descriptors() {
    let fds = || vec![OwnedFd::from(std::fs::File::open("/dev/null").unwrap())];
    for route in ROUTES.iter() {
        let restore = br#"{"source_url": "/s", "backends": [{"id": "a", "vf": 1, "num_fds": 1}]}"#;
        let receive = br#"{"receiver_url": "unix:/s", "backends": [{"id": "a", "vf": 1, "num_fds": 1}]}"#;
        let body = match route.path {
            "/api/v1/vm.restore" => &restore[..],
            "/api/v1/vm.receive-migration" => receive,
            "/api/v1/vm.set-vf" => br#"{"pf": "a", "index": 1, "num_fds": 1}"#,
            _ => b"{}",
        };
        let asked = Request { method: route.method, path: route.path, body, fds: fds() }.action();
        match (route.path, asked) {
            ("/api/v1/vm.add-net", Ok(Action::Add(NewDevice::Net(_, fds)))) => assert_eq!(fds.len(), 1),
            ("/api/v1/vm.add-device", Ok(Action::Add(NewDevice::Host(device, fds)))) => {
                assert_eq!((fds.len(), device.path, device.fd), (1, None, Some(fds[0].as_raw_fd())));
            }
            ("/api/v1/vm.set-vf", Ok(Action::SetVf(change, fds))) => {
                assert_eq!(change.num_fds, Some(fds.len()));
            }
            ("/api/v1/vm.restore", Ok(Action::Restore(config, fds))) => {
                assert_eq!(config.backends[0].fds, fds.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>());
            }
            ("/api/v1/vm.receive-migration", Ok(Action::ReceiveMigration(config, fds))) => {
                assert_eq!(config.backends[0].fds, fds.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>());
            }
            (path, Err(Refusal::Failure(failure))) => match failure.kind {
                ErrorKind::Unsupported => {}
                _ => assert!(failure.chain[1].starts_with("it came with file descriptors"), "{path}: {failure:?}"),
            },
            (path, other) => panic!("{path}: {other:?}"),
        }
    }
}

#[test]
fn device_takes_one_sent_descriptor_and_refuses_client_numbers() {
    let asked = |body: Value, count: usize| {
        let (body, null) = (body.to_string(), || OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let fds = std::iter::repeat_with(null).take(count).collect();
        match (Request { method: "PUT", path: "/api/v1/vm.add-device", body: body.as_bytes(), fds }.action()) {
            Ok(Action::Add(NewDevice::Host(device, fds))) => {
                let own = fds.first().map(AsRawFd::as_raw_fd);
                Ok((device.fd.is_some(), device.fd == own, fds.len()))
            }
            Err(Refusal::Failure(failure)) => Err(failure.chain[1].clone()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(asked(json!({"id": "d", "fd": -1}), 1), Ok((true, true, 1)));
    assert_eq!(asked(json!({"path": "/d"}), 0), Ok((false, true, 0)));
    let error = asked(json!({"fd": 7}), 0).unwrap_err();
    assert!(error.starts_with("fd: a client's descriptor numbers mean nothing in this process; send"), "{error}");
    let error = asked(json!({}), 2).unwrap_err();
    assert_eq!(error, "2 descriptors came with it (SCM_RIGHTS), and a device has one file; send one");
    let create = json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}, {"fd": 7}]});
    let Err(failure) = put("vm.create", &create) else { panic!() };
    assert!(failure.chain[1].starts_with("devices[1].fd: a client's descriptor numbers mean nothing"), "{failure:?}");
}

/// Any JSON value, sometimes in the shape of a configuration.
fn any_json() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec![
        "net", "cpus", "memory", "vfs", "index", "fds", "platform", "rng", "serial", "mode", "id", "disks", "x",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|x| json!(x)),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone().prop_map(str::to_string), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_request_is_an_action_or_a_refusal(
        route in 0..ROUTES.len(),
        method in "[A-Z]{1,7}|PUT|GET",
        body in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let route = &ROUTES[route];
        let outcome = Request { method: &method, path: route.path, body: &body, fds: Vec::new() }.action();
        if method != route.method {
            prop_assert_eq!(outcome.unwrap_err(), Refusal::Method { allow: route.method });
        }
    }

    #[test]
    fn a_refusal_of_any_json_has_one_line_per_reason(route in 0..ROUTES.len(), body in any_json()) {
        let route = &ROUTES[route];
        let body = body.to_string();
        let request = Request { method: route.method, path: route.path, body: body.as_bytes(), fds: Vec::new() };
        let outcome = request.action();
        if let Err(Refusal::Failure(failure)) = outcome {
            prop_assert!(!failure.chain.is_empty());
            prop_assert!(failure.chain.iter().all(|line| !line.is_empty() && !line.contains('\n')), "{:?}", failure);
        }
    }
}
