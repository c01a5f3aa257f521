//! Requests of the guest, on VMs that are not started: their guest's accesses are made here.

use pci::spec::{header, sriov};
use pci::{Access, ConfigTarget as _, VfIndex};
use serde_json::{Value, json};
use vm_api::channel::{Command, Hello, Refusal, RefusalCode, Request};

use super::super::guest_settings::put_governed;
use super::super::vf_settings::VfPlans;
use super::*;
use crate::control::guest_vfs;
use crate::control::info;
use crate::control::set_vf;
use crate::devices::Plugged;
use crate::telemetry::events::EventStream;
use crate::telemetry::monitor::EventMonitor;

const RIGHTS: &str = r#"["vlan:100-199","mac","max_tx_rate:1000","link","spoofchk"]"#;
const MAC: &str = "52:54:00:00:00:07";

/// A VM whose PF "pf" has a switch and `keys`, and a PF "other" that the guest may not govern.
fn with_vfs(keys: &str) -> Instance {
    let rest = r#""serial":{"mode":"Null"},"console":{"mode":"Null"},"memory":{"size":16777216}"#;
    let pf = format!(r#"{{"id":"pf","mac":"52:54:00:00:00:01","sriov_vfs":3,"switch":"veb"{keys}}}"#);
    let instance = opened(&format!(r#"{{{rest},"net":[{pf},{{"id":"other","sriov_vfs":1,"switch":"veb"}}]}}"#));
    enable(&instance, "pf", 2);
    enable(&instance, "other", 1);
    instance
}

fn governed() -> Instance {
    with_vfs(&format!(r#","guest_control":{RIGHTS}"#))
}

fn plugged<'i>(instance: &'i Instance, pf: &str) -> &'i Plugged {
    instance.vm().unwrap().devices().find(pf).unwrap()
}

/// Writes to the SR-IOV capability of `pf` as its driver does.
fn write(instance: &Instance, pf: &str, offset: u16, value: u16) {
    let plugged = plugged(instance, pf);
    let access = Access::decode(u64::from(header::FIRST_EXTENDED_CAPABILITY + offset), 2).unwrap();
    plugged.slot().config_write(plugged.placement().rid, access.dword(), access.write(&u16::to_le_bytes(value)));
}

fn enable(instance: &Instance, pf: &str, vfs: u16) {
    write(instance, pf, sriov::NUM_VFS_FDL, vfs);
    write(instance, pf, sriov::CONTROL_STATUS, sriov::VF_ENABLE);
}

fn address(instance: &Instance, pf: &str, index: u16) -> String {
    let placement = plugged(instance, pf).placement();
    placement.bdf(placement.vfs.unwrap().vf_rid(placement.rid, VfIndex(index))).to_string()
}

fn request(instance: &mut Instance, json: Value) -> Result<Value, Refusal> {
    let mut request = json;
    request["id"] = 1.into();
    let command = serde_json::from_value::<Request>(request).unwrap().command().unwrap();
    instance.guest_request(command)
}

/// Changes VF `index` of the PF "pf".
fn set(instance: &mut Instance, index: u16, mut keys: Value) -> Result<Value, Refusal> {
    keys["vf"] = address(instance, "pf", index).into();
    request(instance, json!({ "set": keys }))
}

fn set_by_host(instance: &mut Instance, keys: Value) -> Result<(), Failure> {
    let mut change = keys;
    change["pf"] = "pf".into();
    instance.set_vf(&serde_json::from_value::<SetVf>(change).unwrap(), Vec::new())
}

/// The VF as `vm.info` has it.
fn shown(instance: &Instance, index: usize) -> Value {
    let info = serde_json::to_value(info::info(instance)).unwrap();
    info["sriov"][0]["vfs"][index].clone()
}

#[test]
fn the_guest_finds_enabled_vfs_of_the_pfs_that_it_governs() {
    let mut instance = governed();
    let welcome = request(&mut instance, json!({"hello": {"version": 1}})).unwrap();
    let pf = plugged(&instance, "pf").address().to_string();
    let allowed: Value = serde_json::from_str(RIGHTS).unwrap();
    assert_eq!(welcome, json!({"version": 1, "pfs": [{"pf": pf, "vfs": 2, "allowed": allowed}]}));
    let refused = instance.guest_request(Command::Hello(Hello { version: 2 })).unwrap_err();
    assert_eq!(
        (refused.code, &*refused.message),
        (RefusalCode::Invalid, "version=2: only version 1 is spoken; give that")
    );
    let listed = request(&mut instance, json!({"list": {"pf": pf}})).unwrap();
    let names: Vec<_> = listed["vfs"].as_array().unwrap().iter().map(|vf| vf["vf"].clone()).collect();
    assert_eq!(
        (names, &listed["next"]),
        (vec![json!(address(&instance, "pf", 0)), json!(address(&instance, "pf", 1))], &Value::Null)
    );
    let second = address(&instance, "pf", 1);
    let vf = request(&mut instance, json!({"get": {"vf": second}})).unwrap();
    assert_eq!(
        (&vf["index"], &vf["mac"], &vf["spoofchk"], &vf["set"]),
        (&json!(1), &shown(&instance, 1)["mac"], &json!(true), &json!([]))
    );
    assert!(vf["counters"]["tx_frames"].is_u64(), "{vf}");
    let other = plugged(&instance, "other").address().to_string();
    let (disabled, foreign) = (address(&instance, "pf", 2), address(&instance, "other", 0));
    for vf in [&disabled, &foreign, &pf, "", "0000:00:00.0", "ffff:ff:1f.7", &"x".repeat(4000)] {
        for command in ["get", "reset", "set"] {
            let refused = request(&mut instance, json!({command: {"vf": vf}})).unwrap_err();
            assert_eq!(refused.code, RefusalCode::Missing, "{vf}");
            assert!(refused.message.len() < 120, "{}", refused.message);
        }
    }
    for pf in [&other, &disabled, ""] {
        assert_eq!(request(&mut instance, json!({"list": {"pf": pf}})).unwrap_err().code, RefusalCode::Missing);
    }
    assert_eq!(request(&mut instance, json!({"list": {"pf": pf, "from": 65535}})).unwrap(), json!({"vfs": []}));
    let mut none = with_vfs("");
    assert_eq!(request(&mut none, json!({"hello": {"version": 1}})).unwrap()["pfs"], json!([]));
    assert_eq!(set(&mut none, 0, json!({"link": "down"})).unwrap_err().code, RefusalCode::Missing);
}

#[test]
fn settings_of_the_guest_apply_until_it_resets_them() {
    let mut instance = governed();
    let (config, before) = (instance.config().clone(), shown(&instance, 0));
    let state = set(&mut instance, 0, json!({"vlan": 120, "mac": MAC, "max_tx_rate": 200, "link": "down"})).unwrap();
    assert_eq!((&state["vlan"], &state["mac"], &state["max_tx_rate"]), (&json!(120), &json!(MAC), &json!(200)));
    assert_eq!((&state["link"], &state["link_up"]), (&json!("down"), &json!(false)));
    assert_eq!(state["set"], json!(["vlan", "mac", "max_tx_rate", "link"]));
    let now = shown(&instance, 0);
    assert_eq!((&now["mac"], &now["policy"]["vlan"], &now["link"]), (&json!(MAC), &json!(120), &json!("down")));
    assert_eq!(now["policy"]["guest_set"], state["set"]);
    assert_eq!(instance.config(), &config, "the configuration stays the host's");
    // All keys of a request, or none.
    let refused = set(&mut instance, 0, json!({"vlan": 121, "max_tx_rate": 1001})).unwrap_err();
    assert_eq!(
        (refused.code, &*refused.message),
        (RefusalCode::Denied, "max_tx_rate=1001: the host allows up to 1000")
    );
    assert_eq!(shown(&instance, 0), now);
    let pf = "52:54:00:00:00:01";
    for (index, mac) in [(1, MAC), (1, pf), (1, before["mac"].as_str().unwrap())] {
        let refused = set(&mut instance, index, json!({ "mac": mac })).unwrap_err();
        assert_eq!(refused.code, RefusalCode::Conflict, "{mac}");
        assert!(refused.message.ends_with("another function has this address; give another"), "{}", refused.message);
    }
    set(&mut instance, 0, json!({"vlan": 0, "max_tx_rate": 0})).unwrap();
    assert_eq!(shown(&instance, 0)["policy"]["guest_set"], json!(["mac", "link"]));
    let vf = address(&instance, "pf", 0);
    assert_eq!(request(&mut instance, json!({"reset": {"vf": vf}})).unwrap()["set"], json!([]));
    assert_eq!(shown(&instance, 0), before);
}

#[test]
fn the_host_ends_settings_of_the_guest_that_it_no_longer_allows() {
    let mut instance = governed();
    let before = shown(&instance, 0);
    set(&mut instance, 0, json!({"vlan": 120, "vlan_qos": 3, "max_tx_rate": 200, "link": "up", "mac": MAC})).unwrap();
    set_by_host(&mut instance, json!({"index": 0, "storm": 9})).unwrap();
    assert_eq!(shown(&instance, 0)["policy"]["guest_set"], json!(["vlan", "vlan_qos", "mac", "max_tx_rate", "link"]));
    set_by_host(&mut instance, json!({"index": "*", "vlan": 7})).unwrap();
    let policy = shown(&instance, 0)["policy"].clone();
    assert_eq!((&policy["vlan"], &policy["vlan_qos"], &policy["storm"]), (&json!(7), &json!(0), &json!(9)));
    set_by_host(&mut instance, json!({"index": 0, "max_tx_rate": 100, "link": "down"})).unwrap();
    let now = shown(&instance, 0);
    assert_eq!((&now["policy"]["max_tx_rate"], &now["link"], &now["mac"]), (&json!(100), &json!("down"), &json!(MAC)));
    assert_eq!(now["policy"]["guest_set"], json!(["mac"]));
    // An address that the host gives to another VF is that one's.
    set_by_host(&mut instance, json!({"index": 1, "mac": MAC})).unwrap();
    assert_eq!((&shown(&instance, 1)["mac"], &shown(&instance, 0)["mac"]), (&json!(MAC), &before["mac"]));
    assert!(shown(&instance, 0)["policy"]["guest_set"].is_null());
    // One that it gives to the VF itself, too.
    set(&mut instance, 0, json!({"mac": "52:54:00:00:00:06"})).unwrap();
    set_by_host(&mut instance, json!({"index": 0, "mac": "52:54:00:00:00:05"})).unwrap();
    assert_eq!(shown(&instance, 0)["mac"], "52:54:00:00:00:05");
    assert_eq!(set(&mut instance, 0, json!({"mac": MAC})).unwrap_err().code, RefusalCode::Denied);
}

#[test]
fn settings_of_the_guest_end_in_the_access_that_disables_the_vf() {
    let mut instance = governed();
    let before = shown(&instance, 0);
    let wanted = json!({"vlan": 120, "mac": MAC, "link": "down"});
    let ends: [fn(&Instance); 3] = [
        |instance| write(instance, "pf", sriov::CONTROL_STATUS, 0),
        |instance| plugged(instance, "pf").slot().reset(),
        |instance| {
            let removal = virtio_devices::Fault::Removal;
            plugged(instance, "pf").slot().inject(Some(VfIndex(0)), removal).unwrap();
            write(instance, "pf", sriov::CONTROL_STATUS, 0);
        },
    ];
    for end in ends {
        set(&mut instance, 0, wanted.clone()).unwrap();
        write(&instance, "pf", sriov::CONTROL_STATUS, sriov::VF_ENABLE);
        assert_eq!(shown(&instance, 0)["mac"], MAC, "VF Enable stays set");
        end(&instance);
        enable(&instance, "pf", 2);
        // The control thread has not run since.
        assert_eq!(shown(&instance, 0), before);
        let link_up =
            plugged(&instance, "pf").slot().with(|device| device.host_nic(Some(VfIndex(0))).unwrap().link_up());
        assert_eq!(link_up, Some(true));
        let vf = address(&instance, "pf", 0);
        assert_eq!(request(&mut instance, json!({"get": {"vf": vf}})).unwrap()["set"], json!([]));
    }
    set(&mut instance, 0, wanted).unwrap();
    instance.forget_device("pf");
    assert!(instance.saved_guest_settings().is_empty());
}

#[test]
fn settings_of_the_guest_are_restored_and_decided_again() {
    let mut instance = governed();
    let wanted = json!({"vlan": 120, "mac": MAC, "max_tx_rate": 200, "link": "down", "spoofchk": false});
    set(&mut instance, 1, wanted).unwrap();
    let saved = instance.saved_guest_settings();
    let text = serde_json::to_string(&saved).unwrap();
    assert_eq!(serde_json::from_str::<Vec<crate::machine_state::GuestVfState>>(&text).unwrap(), saved);
    plugged(&instance, "pf").slot().pause();
    let state = plugged(&instance, "pf").slot().save().unwrap().unwrap();
    for (keys, remaining) in [
        (format!(r#","guest_control":{RIGHTS}"#), json!(["vlan", "mac", "max_tx_rate", "link", "spoofchk"])),
        (r#","guest_control":["vlan:100-110","mac","max_tx_rate:199"]"#.to_string(), json!(["mac"])),
        (String::new(), Value::Null),
    ] {
        let mut restored = with_vfs(&keys);
        let before = shown(&restored, 1);
        plugged(&restored, "pf").slot().pause();
        guest_vfs::prepare(restored.vm().unwrap(), &restored.planned, &saved);
        plugged(&restored, "pf").slot().restore(&state).unwrap();
        restored.restore_guest_settings(&saved);
        let now = shown(&restored, 1);
        assert_eq!(now["policy"]["guest_set"], remaining, "{keys}");
        match remaining.as_array().map_or(0, Vec::len) {
            5 => assert_eq!(
                (&now["mac"], &now["policy"]["vlan"], &now["link"]),
                (&json!(MAC), &json!(120), &json!("down"))
            ),
            1 => {
                assert_eq!((&now["mac"], &now["policy"]["vlan"], &now["link"]), (&json!(MAC), &json!(0), &json!("up")))
            }
            _ => assert_eq!(now, before),
        }
        assert_eq!(shown(&restored, 0)["policy"], before["policy"]);
        // They still end with the VF.
        write(&restored, "pf", sriov::CONTROL_STATUS, 0);
        enable(&restored, "pf", 2);
        assert_eq!(shown(&restored, 1), before);
    }
}

#[test]
fn an_untrusted_state_gives_a_vf_nothing_beyond_its_limits() {
    let saved = |id: &str, vf: u16, settings: Value| {
        serde_json::from_value::<crate::machine_state::GuestVfState>(json!({"id": id, "vf": vf, "settings": settings}))
    };
    assert!(saved("pf", 0, json!({"trust": true})).is_err());
    let mut instance = governed();
    let before: Vec<_> = (0..3).map(|index| shown(&instance, index)).collect();
    let all: Vec<_> = [
        saved("pf", 0, json!({"vlan": 9, "mac": "01:00:00:00:00:01", "max_tx_rate": 0, "vlan_qos": 99})),
        saved("pf", 1, json!({"mac": "52:54:00:00:00:01", "vlan": 65535})),
        saved("pf", 2, json!({"vlan": 120})),
        saved("pf", 9, json!({"vlan": 120})),
        saved("other", 0, json!({"vlan": 120})),
        saved("no", 0, json!({"vlan": 120})),
    ]
    .into_iter()
    .map(Result::unwrap)
    .collect();
    guest_vfs::prepare(instance.vm().unwrap(), &instance.planned, &all);
    instance.restore_guest_settings(&all);
    assert_eq!((0..3).map(|index| shown(&instance, index)).collect::<Vec<_>>(), before);
    assert!(instance.saved_guest_settings().is_empty());
}

#[test]
fn settings_decided_before_a_vf_was_disabled_do_not_come_back() {
    let mut instance = governed();
    let before = shown(&instance, 0);
    let wanted = json!({"vlan": 120, "mac": MAC, "link": "down"});
    let nic = |instance: &Instance| {
        let read = |device: &mut dyn virtio_devices::VirtioPci| {
            let nic = device.host_nic(Some(VfIndex(0))).unwrap();
            (MacAddress(nic.mac()).to_string(), nic.link_up())
        };
        plugged(instance, "pf").slot().with(read).unwrap()
    };
    let host = (before["mac"].as_str().unwrap().to_string(), true);
    for is_disabled in [false, true] {
        set(&mut instance, 0, wanted.clone()).unwrap();
        let change = serde_json::from_value::<SetVf>(json!({"pf": "pf", "index": 0, "storm": 9})).unwrap();
        let planned = instance.planned_with_vf(&change).unwrap();
        let plugged = plugged(&instance, "pf");
        let governed = instance.governed_after(plugged, planned.as_ref(), (0..=0, None));
        // The guest is faster than the control thread.
        if is_disabled {
            write(&instance, "pf", sriov::CONTROL_STATUS, 0);
            enable(&instance, "pf", 2);
            assert_eq!(nic(&instance), host);
        }
        let plan = set_vf::plan_of(&instance.planned, "pf", 0).unwrap();
        let put = put_governed(plugged, &governed[&0], ("pf", 0), (plan, LinkPolicy::Auto));
        assert_eq!(put.is_err_and(|failure| failure.kind == ErrorKind::NotFound), is_disabled);
        let expected = if is_disabled { host.clone() } else { (MAC.to_string(), false) };
        assert_eq!(nic(&instance), expected);
        // The host's own change applies to the VF that exists now.
        let plans = VfPlans { change: &change, now: &instance.planned, planned: planned.as_ref(), governed };
        plans.apply(plugged, 0, LinkPolicy::Auto).unwrap().wait().unwrap();
        assert_eq!(nic(&instance), expected);
    }
}

#[test]
fn a_change_of_all_keys_builds_one_table_of_the_switch() {
    let mut instance = governed();
    let tables = |instance: &Instance| plugged(instance, "pf").switch().unwrap().tables();
    let before = tables(&instance);
    set(&mut instance, 0, json!({"vlan": 120, "mac": MAC, "max_tx_rate": 200, "link": "down"})).unwrap();
    assert_eq!(tables(&instance), before + 1);
    set_by_host(&mut instance, json!({"index": 1, "mac": "52:54:00:00:00:09", "vlan": 7, "link": "down"})).unwrap();
    assert_eq!(tables(&instance), before + 2);
    let vf = address(&instance, "pf", 0);
    request(&mut instance, json!({"reset": {"vf": vf}})).unwrap();
    assert_eq!(tables(&instance), before + 3);
}

#[test]
fn the_last_of_many_changes_is_reported_in_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    let output = EventMonitor::Path(path.clone()).open().unwrap();
    let (stream, events) = EventStream::start(output, Instant::now()).unwrap();
    let mut instance = governed();
    instance.events = events;
    let mut vlan = 100;
    let now = Instant::now();
    while instance.wait_to_report(now).is_none() {
        vlan += 1;
        set(&mut instance, 0, json!({ "vlan": vlan })).unwrap();
    }
    instance.report_late(now + Duration::from_secs(60));
    assert_eq!(instance.wait_to_report(now), None);
    drop(stream);
    let text = std::fs::read_to_string(path).unwrap();
    let values: Vec<Value> = serde_json::Deserializer::from_str(&text).into_iter().map(Result::unwrap).collect();
    let last = &values.last().unwrap()["properties"];
    assert_eq!((&last["by"], &last["index"], &last["left_out"]), (&json!("guest"), &json!("0"), &Value::Null));
    assert_eq!(last["changed"], format!("vlan {} -> {vlan}", vlan - 1));
}
