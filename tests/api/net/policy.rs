//! Policies of network functions: at the start, live, and refused ones.

use serde_json::{Value, json};

use crate::migration::pages::peer;
use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, reasons, taps};

fn vf(client: &mut Client, index: usize) -> Value {
    client.get("vm.info").expect(200)["sriov"][0]["vfs"][index].clone()
}

fn open() -> Value {
    json!({
        "vlan": 0, "vlan_qos": 0, "vlan_proto": "802.1q", "spoofchk": false, "trust": true, "max_tx_rate": 0,
        "storm": 0, "link": "auto",
    })
}

#[test]
fn a_vf_has_its_configured_policy_until_a_client_changes_it() {
    let vmm = Vmm::start();
    let mut client = vmm.boot(json!([{
        "id": "pf0", "tap": "apl0", "sriov_vfs": 3, "storm": 9,
        "vfs": [{"index": 1, "vlan": 100, "vlan_qos": 3, "spoofchk": true, "max_tx_rate": 500, "link": "down"}],
    }]));
    let info = client.get("vm.info").expect(200);
    assert_eq!(info["sriov"][0]["policy"]["storm"], 9, "the PF's own");
    assert_eq!((vf(&mut client, 0)["policy"].clone(), vf(&mut client, 2)["policy"].clone()), (open(), open()));
    let mut expected = open();
    for (key, value) in [("vlan", json!(100)), ("vlan_qos", json!(3)), ("spoofchk", json!(true))] {
        expected[key] = value;
    }
    (expected["trust"], expected["max_tx_rate"], expected["link"]) = (json!(false), json!(500), json!("down"));
    let now = vf(&mut client, 1);
    assert_eq!((&now["policy"], &now["link"]), (&expected, &json!("down")));

    // Each key alone leaves the others unchanged.
    for (key, value) in [
        ("vlan_qos", json!(0)),
        ("vlan", json!(0)),
        ("trunk", json!([7, "10-19"])),
        ("vlan_proto", json!("802.1ad")),
        ("trust", json!(true)),
        ("spoofchk", json!(false)),
        ("max_tx_rate", json!(0)),
        ("storm", json!(1000)),
        ("link", json!("up")),
    ] {
        client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 1, key: value.clone()})).expect(204);
        expected[key] = value;
        assert_eq!(vf(&mut client, 1)["policy"], expected, "{key}");
    }
    assert_eq!(vf(&mut client, 1)["link"], "up");

    // Several keys are applied together or not at all.
    let wrong = json!({"pf": "pf0", "index": 1, "storm": 5, "link": "down", "vlan": 5});
    let answer = client.put_json("vm.set-vf", &wrong);
    assert_eq!(answer.status, 409, "{answer:?}");
    let what = "pf=pf0,index=1,trunk=[7,10-19]: cannot be combined with vlan=5; leave one of them out";
    assert_eq!(reasons(&answer).last(), Some(&what));
    assert_eq!((&vf(&mut client, 1)["policy"], &vf(&mut client, 1)["link"]), (&expected, &json!("up")));
    let none = json!({"pf": "pf0", "index": 1, "trunk": [], "vlan_proto": "802.1q"});
    client.put_json("vm.set-vf", &none).expect(204);
    expected["vlan_proto"] = json!("802.1q");
    expected.as_object_mut().unwrap().remove("trunk");
    let limits = json!({"ops": {"size": 10, "refill_time": 100}});
    client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 1, "rate_limiter_config": limits})).expect(204);

    // All settings are kept by the VM, except the link.
    client.put("vm.reboot").expect(204);
    assert_eq!(vf(&mut client, 1)["policy"], expected);
    client.put("vm.shutdown").expect(204);
    client.put("vm.boot").expect(204);
    expected["link"] = json!("down");
    assert_eq!(vf(&mut client, 1)["policy"], expected);
    let config = client.get("vm.info").expect(200)["config"]["net"][0]["vfs"][0].clone();
    assert_eq!((&config["rate_limiter_config"], &config["storm"]), (&limits, &json!(1000)));
}

#[test]
fn an_unenforceable_policy_is_refused_and_leaves_nothing() {
    let vmm = Vmm::start();
    let mut client = vmm.boot_shared(json!([{"id": "pf0", "tap": "apr0", "sriov_vfs": 1}]));
    let before = client.get("vm.info").expect(200);
    for (backend, key, carrier) in [
        (json!({"vhost": true}), "vhost", "vhost-net carries"),
        (json!({"vhost_user": true, "vhost_socket": "/s"}), "vhost_user", "another process (vhost_user=on) carries"),
        (json!({"vdpa": "/dev/vhost-vdpa-none"}), "vdpa", "a vDPA device carries"),
    ] {
        let mut vf = backend;
        (vf["index"], vf["spoofchk"]) = (json!(0), json!(true));
        let net = json!({"id": "n", "tap": "apr1", "sriov_vfs": 1, "vfs": [vf]});
        let answer = client.put_json("vm.add-net", &net);
        let what = format!(
            "vfs[0].spoofchk=on: {carrier} this function's packets past this program; leave {key} out, \
             or set it on the host (docs/policy.md)"
        );
        assert_eq!((answer.status, reasons(&answer).last()), (400, Some(&what.as_str())));
    }
    assert_eq!(client.get("vm.info").expect(200), before);
    assert_eq!(taps("apr"), ["apr0", "apr0v0"]);
}

#[test]
fn a_policy_a_peer_cannot_enforce_is_refused_without_a_change() {
    let vmm = Vmm::start();
    let peer = peer(&vmm, "name=p0,ip=10.78.9.1");
    let socket = vmm.files.path("peer");
    let vfs = json!([{"index": 0, "vhost_user": true, "vhost_socket": socket}]);
    let mut client = vmm.boot_shared(json!([{"id": "pf0", "tap": "aprl", "sriov_vfs": 1, "vfs": vfs}]));
    let before = client.get("vm.info").expect(200);
    for (key, value, text) in [
        ("vlan", json!(5), "vlan=5"),
        ("trunk", json!([5]), "trunk=[5]"),
        ("spoofchk", json!(true), "spoofchk=on"),
        ("trust", json!(false), "trust=off"),
        ("max_tx_rate", json!(5), "max_tx_rate=5"),
        ("storm", json!(5), "storm=5"),
    ] {
        let answer = client.put_json("vm.set-vf", &json!({"pf": "pf0", "index": 0, "link": "down", key: value}));
        let what = format!(
            "pf=pf0,index=0,{text}: another process (vhost_user=on) carries this function's packets past this \
             program; leave vhost_user out, or set it on the host (docs/policy.md)"
        );
        assert_eq!((answer.status, reasons(&answer).last()), (409, Some(&what.as_str())));
    }
    assert_eq!(client.get("vm.info").expect(200), before);
    drop(peer);
}
