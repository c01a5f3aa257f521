use std::collections::BTreeMap;

use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::config::keys;

const VF: &str = "0000:03:02.3";

fn read_with(value: &Value, arguments: &str) -> Result<Settings> {
    let keys = keys(value.to_string().as_bytes()).unwrap();
    Settings::read(&keys, &Environment(BTreeMap::from([("CNI_ARGS".to_string(), arguments.to_string())])))
}

fn read(extra: &[(&str, Value)]) -> Result<Settings> {
    let mut config = json!({"deviceID": VF});
    for (key, value) in extra {
        config[*key] = value.clone();
    }
    read_with(&config, "")
}

fn mac(last: u8) -> MacAddress {
    MacAddress([0x52, 0x54, 0, 0, 1, last])
}

/// A VF as its host has it.
fn state() -> VfState {
    VfState {
        vf: VF.into(),
        index: 2,
        mac: mac(1),
        vlan: 0,
        vlan_qos: 0,
        vlan_proto: VlanProto::Customer,
        max_tx_rate: 0,
        link: LinkPolicy::Auto,
        spoofchk: true,
        link_up: true,
        set: Vec::new(),
        counters: BTreeMap::new(),
    }
}

#[test]
fn the_keys_of_sriov_cni_are_settings() {
    let config = json!({
        "cniVersion": "0.3.1", "name": "sriov-dpdk", "type": "virtio-sriov-cni", "deviceID": VF,
        "mac": "CA:FE:C0:FF:EE:00", "vlan": 1000, "vlanQoS": 4, "vlanProto": "802.1ad", "min_tx_rate": 0,
        "max_tx_rate": 200, "spoofchk": "off", "trust": "off", "link_state": "enable", "logLevel": "debug",
        "logFile": "/tmp/sriov.log"
    });
    let settings = read_with(&config, "").unwrap();
    let expected = Set {
        vf: VF.into(),
        vlan: Some(1000),
        vlan_qos: Some(4),
        vlan_proto: Some(VlanProto::Service),
        mac: Some(MacAddress([0xca, 0xfe, 0xc0, 0xff, 0xee, 0])),
        max_tx_rate: Some(200),
        link: Some(LinkPolicy::Up),
        spoofchk: Some(false),
    };
    assert_eq!(settings.changes(&state()), Some(expected));
}

#[rstest]
#[case::trust(&[("trust", json!("on"))], "trust=on: ")]
#[case::guarantee(&[("min_tx_rate", json!(100))], "min_tx_rate=100: ")]
#[case::infiniband(
    &[("runtimeConfig", json!({"infinibandGUID": "c2:11:22:33:44:55:66:77"}))],
    "runtimeConfig.infinibandGUID=c2:11:22:33:44:55:66:77: "
)]
#[case::trunk(&[("vlan_trunk", json!("10-30"))], "vlan_trunk=10-30: ")]
fn a_key_that_the_channel_cannot_set_is_refused(#[case] extra: &[(&str, Value)], #[case] start: &str) {
    let error = read(extra).unwrap_err();
    assert!(error.is(Code::Unsupported) && error.message.starts_with(start), "{error}");
}

#[rstest]
#[case(&[("vlan", json!(4095))], "vlan=4095: ")]
#[case(&[("vlan", json!(-1))], "vlan=-1: ")]
#[case(&[("vlan", json!("100"))], "vlan=\"100\": ")]
#[case(&[("vlan", json!(1)), ("vlanQoS", json!(8))], "vlanQoS=8: ")]
#[case(&[("vlanQoS", json!(1))], "vlanQoS=1: give a vlan")]
#[case(&[("vlan", json!(0)), ("vlanProto", json!("802.1ad"))], "vlanProto=802.1ad: give a vlan")]
#[case(&[("vlan", json!(1)), ("vlanProto", json!("802.1x"))], "vlanProto=802.1x: ")]
#[case(&[("mac", json!("52:54:00"))], "mac=52:54:00: ")]
#[case(&[("mac", json!("01:00:5e:00:00:01"))], "mac=01:00:5e:00:00:01: ")]
#[case(&[("mac", json!("00:00:00:00:00:00"))], "mac=00:00:00:00:00:00: ")]
#[case(&[("runtimeConfig", json!({"mac": "x"}))], "runtimeConfig.mac=x: ")]
#[case(&[("max_tx_rate", json!(1.5))], "max_tx_rate=1.5: ")]
#[case(&[("min_tx_rate", json!("1"))], "min_tx_rate=\"1\": ")]
#[case(&[("spoofchk", json!("yes"))], "spoofchk=yes: ")]
#[case(&[("spoofchk", json!(true))], "spoofchk=true: ")]
#[case(&[("trust", json!("maybe"))], "trust=maybe: ")]
#[case(&[("link_state", json!("up"))], "link_state=up: ")]
#[case(&[("deviceID", json!(""))], "deviceID: ")]
#[case(&[("deviceID", json!("eth0"))], "deviceID=eth0: ")]
#[case(&[("deviceID", json!("../../x"))], "deviceID=../../x: ")]
fn a_wrong_value_is_refused_by_its_key(#[case] extra: &[(&str, Value)], #[case] start: &str) {
    let error = read(extra).unwrap_err();
    assert!(error.is(Code::Config) && error.message.starts_with(start), "{error}");
}

#[rstest]
#[case(&[])]
#[case(&[("vlan", json!(0)), ("vlanQoS", json!(0)), ("vlanProto", json!("802.1q")), ("mac", json!(""))])]
#[case(&[("max_tx_rate", json!(0)), ("min_tx_rate", json!(0)), ("trust", json!("off")), ("trust", json!(""))])]
#[case(&[("link_state", json!("auto")), ("spoofchk", json!("on")), ("vlan", Value::Null)])]
fn defaults_of_generated_configurations_change_nothing(#[case] extra: &[(&str, Value)]) {
    let settings = read(extra).unwrap();
    assert_eq!(settings.changes(&state()), None);
    assert_eq!(settings.difference(&state()), None);
}

#[test]
fn the_mac_of_the_pod_precedes_that_of_arguments_and_network() {
    let all = json!({"deviceID": VF, "mac": mac(3).to_string(), "runtimeConfig": {"mac": mac(1).to_string()}});
    let arguments = format!("IgnoreUnknown=true;MAC={}", mac(2));
    assert_eq!(read_with(&all, &arguments).unwrap().mac, Some(mac(1)));
    let network = json!({"deviceID": VF, "mac": mac(3).to_string()});
    assert_eq!(read_with(&network, &arguments).unwrap().mac, Some(mac(2)));
    assert_eq!(read_with(&network, "").unwrap().mac, Some(mac(3)));
}

#[test]
fn multus_may_pass_the_device_as_runtime_configuration() {
    let runtime = json!({"runtimeConfig": {"deviceID": "0000:01:00.2"}});
    assert_eq!(read_with(&runtime, "").unwrap().vf, "0000:01:00.2");
    let both = json!({"deviceID": "01:00.3", "runtimeConfig": {"deviceID": "0000:01:00.2"}});
    assert_eq!(read_with(&both, "").unwrap().vf, "0000:01:00.2");
    let null = json!({"deviceID": "01:00.3", "runtimeConfig": {"deviceID": null}});
    assert_eq!(read_with(&null, "").unwrap().vf, "0000:01:00.3");
}

#[rstest]
#[case("vlan", json!(120), VfState { vlan: 100, ..state() })]
#[case("mac", json!("52:54:00:00:01:02"), state())]
#[case("max_tx_rate", json!(200), VfState { max_tx_rate: 100, ..state() })]
#[case("link_state", json!("disable"), state())]
#[case("spoofchk", json!("off"), state())]
fn a_setting_that_the_vf_does_not_have_is_named(#[case] key: &str, #[case] value: Value, #[case] state: VfState) {
    let difference = read(&[(key, value)]).unwrap().difference(&state).unwrap();
    assert!(difference.starts_with(&format!("{key}=")) && difference.contains(VF), "{difference}");
}
