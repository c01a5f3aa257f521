//! A switch between a PF and its VFs: configuration, reports, and refusals.

use serde_json::{Value, json};

use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, reasons, taps};

fn pf(client: &mut Client) -> Value {
    client.get("vm.info").expect(200)["sriov"][0].clone()
}

/// Default policy of a VF on a switch.
fn restricted() -> Value {
    json!({
        "vlan": 0, "vlan_qos": 0, "vlan_proto": "802.1q", "spoofchk": true, "trust": false, "max_tx_rate": 0,
        "storm": 0, "link": "auto", "weight": 10,
    })
}

#[test]
fn a_closed_switch_joins_functions_without_backend_or_tap() {
    let vmm = Vmm::start();
    let mut client = vmm.boot(json!([{
        "id": "pf0", "switch": "veb", "workers": 2, "sriov_vfs": 3,
        "vfs": [
            {"index": 1, "tap": "aswc0"}, {"index": 2, "isolated": true, "mirror": "pf", "weight": 100, "trust": true},
        ],
    }]));
    let now = pf(&mut client);
    assert_eq!(now["switch"], json!({"mode": "veb", "workers": 2}));
    assert_eq!(now["backend"], json!({"kind": "switch", "name": "pf0"}));
    let backends: Vec<_> = now["vfs"].as_array().unwrap().iter().map(|vf| vf["backend"]["kind"].clone()).collect();
    assert_eq!(backends, ["switch", "tap", "switch"]);
    assert_eq!(taps("aswc"), ["aswc0"]);
    assert_eq!(now["vfs"][0]["policy"], restricted());
    let mut open = restricted();
    open.as_object_mut().unwrap().remove("weight");
    (open["spoofchk"], open["trust"]) = (json!(false), json!(true));
    assert_eq!(now["vfs"][1]["policy"], open, "it has a tap of its own");
    let mut given = restricted();
    for (key, value) in
        [("isolated", json!(true)), ("mirror", json!("pf")), ("weight", json!(100)), ("trust", json!(true))]
    {
        given[key] = value;
    }
    assert_eq!(now["vfs"][2]["policy"], given);
    assert_eq!((&now["policy"]["spoofchk"], &now["policy"]["trust"]), (&json!(false), &json!(true)));
    assert!(!vmm.threads().iter().any(|name| name.contains("pf0")), "no thread until a driver runs");
    let counters = client.get("vm.counters").expect(200);
    assert_eq!(counters["pf0v0"]["tx_frames"], 0);
    assert!(counters.get("__uplink_pf0").is_none());
}

#[test]
fn the_pfs_tap_is_the_uplink_and_counts_by_itself() {
    let vmm = Vmm::start();
    let net = json!([{"id": "pf0", "switch": "vepa", "tap": "aswu", "mtu": 9000, "sriov_vfs": 2, "num_queues": 4}]);
    let mut client = vmm.boot(net);
    assert_eq!(pf(&mut client)["switch"], json!({"mode": "vepa", "uplink": "aswu", "workers": 1}));
    assert_eq!(taps("aswu"), ["aswu"], "the VFs have none");
    assert_eq!(client.get("vm.counters").expect(200)["__uplink_pf0"]["rx_frames"], 0);
    client.put_json("vm.remove-device", &json!({"id": "pf0"})).expect(204);
    client.put("vm.shutdown").expect(204);
    assert_eq!(taps("aswu"), [""; 0]);
}

#[test]
fn the_host_changes_a_running_switch_port_and_the_change_stays() {
    let vmm = Vmm::start();
    let mut client = vmm.boot(json!([{
        "id": "pf0", "switch": "veb", "sriov_vfs": 3, "vfs": [{"index": 2, "tap": "aswl"}],
    }]));
    let mut expected = restricted();
    for (key, value) in [
        ("isolated", json!(true)),
        ("mirror", json!(1)),
        ("weight", json!(7)),
        ("vlan", json!(100)),
        ("spoofchk", json!(false)),
        ("trust", json!(true)),
        ("max_tx_rate", json!(500)),
        ("storm", json!(1000)),
    ] {
        client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 0, key: value.clone()})).expect(204);
        expected[key] = value;
        assert_eq!(pf(&mut client)["vfs"][0]["policy"], expected, "{key}");
    }
    let change = json!({"pf": "pf0", "index": 0, "isolated": false, "mirror": "off", "mac": "52:54:00:00:01:77"});
    client.put_json("vm.set-vf", &change).expect(204);
    ["isolated", "mirror"].iter().for_each(|key| drop(expected.as_object_mut().unwrap().remove(*key)));
    assert_eq!(pf(&mut client)["vfs"][0]["policy"], expected);
    assert_eq!(pf(&mut client)["vfs"][0]["mac"], "52:54:00:00:01:77");

    let refused = |client: &mut Client, index: u16, key: &str, value: Value| {
        let answer = client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": index, "vlan": 9, key: value}));
        (answer.status, reasons(&answer).last().unwrap().to_string())
    };
    let others = pf(&mut client)["vfs"][1]["mac"].as_str().unwrap().to_string();
    let in_use = format!("MAC address {others} is already in use by VF 1 of pf0; give another");
    let (status, why) = refused(&mut client, 0, "mac", json!(others));
    assert!(status == 409 && why.contains(&in_use), "{status} {why}");
    for (index, key, value, status, why) in [
        (0, "weight", json!(101), 400, "weight=101: not a weight; give 1 to 100"),
        (0, "mirror", json!(0), 400, "mirror=0: a port cannot get copies of what it sends itself; name another"),
        (
            0,
            "mirror",
            json!(2),
            409,
            "mirror=2: that VF has a backend of its own and is not on the switch; name another",
        ),
        (
            2,
            "isolated",
            json!(true),
            409,
            "isolated=on: only a port of a switch has this; add switch=veb to the PF and name no tap or other backend \
             for the VF, or leave isolated out (docs/switch.md)",
        ),
    ] {
        let expected = format!("pf=pf0,index={index},{why}");
        assert_eq!(refused(&mut client, index, key, value), (status, expected));
    }
    assert_eq!(pf(&mut client)["vfs"][0]["policy"], expected, "all keys or none");
    for again in [&["vm.reboot"][..], &["vm.shutdown", "vm.boot"]] {
        again.iter().for_each(|action| drop(client.put(action).expect(204)));
        assert_eq!(pf(&mut client)["vfs"][0]["policy"], expected, "{again:?}");
    }
}

#[test]
fn a_vf_may_have_any_mac_address_if_the_host_allows_it() {
    let vmm = Vmm::start();
    let mac = "52:54:00:00:00:01";
    let vfs = json!([{"index": 0, "mac": "any"}]);
    let mut client = vmm.boot(json!([{"id": "pf0", "switch": "veb", "sriov_vfs": 2, "mac": mac, "vfs": vfs}]));
    let macs = |client: &mut Client| {
        let now = pf(client);
        let given = client.get("vm.info").expect(200)["config"]["net"][0]["vfs"][0]["mac"].clone();
        (now["vfs"][0]["mac"].as_str().unwrap().to_string(), given)
    };
    let derived = "06:00:00:01:00:00".to_string();
    assert_eq!(macs(&mut client), (derived.clone(), json!("any")));
    let set = |client: &mut Client, mac: &str| {
        client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 0, "mac": mac})).expect(204);
    };
    set(&mut client, "52:54:00:00:01:77");
    assert_eq!(macs(&mut client), ("52:54:00:00:01:77".to_string(), json!("52:54:00:00:01:77")));
    set(&mut client, "any");
    assert_eq!(macs(&mut client), (derived.clone(), json!("any")), "the derived one again");
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    assert_eq!(macs(&mut client), (derived, json!("any")));
    let answer = client.put_json("vm.add-net", &json!({"id": "n", "mac": "any"}));
    let why = "mac=any: only a VF on a switch may have any; elsewhere the guest may change an address with \
               trust=on; leave mac out to have one chosen";
    assert_eq!((answer.status, reasons(&answer).last()), (400, Some(&why)));
}

#[test]
fn an_impossible_switch_is_refused_and_leaves_nothing() {
    let vmm = Vmm::start();
    let mut client = vmm.boot(json!([]));
    let before = client.get("vm.info").expect(200);
    for (net, why) in [
        (json!({"sriov_vfs": 0}), "switch=veb: connects a PF with its VFs, and there are none; add sriov_vfs="),
        (
            json!({"tap": "aswr", "vhost": true}),
            "switch=veb: the switch's uplink is a tap whose packets this program carries; leave vhost out, or leave \
             switch out",
        ),
        (json!({"workers": 3}), "workers=3: at most one for each of the VM's 2 vCPUs, and 64; give 1 to 2"),
    ] {
        let mut wrong = json!({"id": "n", "switch": "veb", "sriov_vfs": 1});
        wrong.as_object_mut().unwrap().extend(net.as_object().unwrap().clone());
        let answer = client.put_json("vm.add-net", &wrong);
        assert_eq!((answer.status, reasons(&answer).last()), (400, Some(&why)));
    }
    assert_eq!(client.get("vm.info").expect(200), before);
    assert_eq!(taps("aswr"), [""; 0]);
}

#[test]
fn guaranteed_rates_never_exceed_the_uplinks_rate() {
    let vmm = Vmm::start();
    let net = json!([{
        "id": "pf0", "switch": "veb", "tap": "aswq", "sriov_vfs": 3, "uplink_rate": 1000, "min_tx_rate": 100,
        "vfs": [{"index": 0, "min_tx_rate": 500}, {"index": 2, "tap": "aswq2"}],
    }]);
    let mut client = vmm.boot(net);
    let rates = |client: &mut Client| {
        let now = pf(client);
        let of = |function: &Value| function["policy"].get("min_tx_rate").cloned();
        (now["switch"]["uplink_rate"].clone(), of(&now), [0, 1, 2].map(|vf| of(&now["vfs"][vf])))
    };
    let expected =
        |vf1: Value| (json!(1000), Some(json!(100)), [Some(json!(500)), Some(vf1).filter(|v| *v != 0), None]);
    assert_eq!(rates(&mut client), expected(json!(0)));
    let set = |client: &mut Client, index: u16, change: Value| {
        let mut body = json!({"pf": "pf0", "index": index, "storm": 9});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let answer = client.put_json("vm.set-vf", &body);
        (answer.status, reasons(&answer).last().copied().unwrap_or_default().to_string())
    };
    let refused = |what: &str| (409, what.to_string());
    assert_eq!(
        set(&mut client, 1, json!({"min_tx_rate": 401})),
        refused(
            "--net id=pf0,uplink_rate=1000: the functions are guaranteed 1001 Mbit/s together (min_tx_rate); lower \
             some, or raise this"
        )
    );
    assert_eq!(
        set(&mut client, 1, json!({"min_tx_rate": 300, "max_tx_rate": 200})),
        refused(
            "pf=pf0,index=1,min_tx_rate=300: more than max_tx_rate=200; give no more than that, or raise \
             max_tx_rate"
        )
    );
    assert_eq!(
        set(&mut client, 2, json!({"min_tx_rate": 1})),
        refused(
            "pf=pf0,index=2,min_tx_rate=1: only a port of a switch has this; add switch=veb to the PF and \
             name no tap or other backend for the VF, or leave min_tx_rate out (docs/switch.md)"
        )
    );
    assert_eq!(rates(&mut client), expected(json!(0)));
    assert_eq!(pf(&mut client)["vfs"][1]["policy"]["storm"], 0, "all keys or none");
    assert_eq!(set(&mut client, 1, json!({"min_tx_rate": 400})).0, 204);
    assert_eq!(rates(&mut client), expected(json!(400)));
    for again in [&["vm.reboot"][..], &["vm.shutdown", "vm.boot"]] {
        again.iter().for_each(|action| drop(client.put(action).expect(204)));
        assert_eq!(rates(&mut client), expected(json!(400)), "{again:?}");
    }
    let wrong = json!({"id": "n", "switch": "veb", "sriov_vfs": 1, "vfs": [{"index": 0, "min_tx_rate": 5}]});
    let answer = client.put_json("vm.add-net", &wrong);
    let why = "vfs[0].min_tx_rate=5: a part of the uplink's rate, which is not given; add uplink_rate= \
               to the PF, or leave min_tx_rate out (docs/switch.md)";
    assert_eq!((answer.status, reasons(&answer).last()), (400, Some(&why)));
}
