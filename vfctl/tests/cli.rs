//! The program `vfctl` in a guest whose host is a thread of the test.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use fixtures::channel::{Guest, Host};
use serde_json::{Value, json};
use vm_api::channel::{CONTROL_PORT, EVENTS_PORT};

const PF: &str = "0000:00:03.0";

/// The host's answer about a VF.
fn state(vf: &str, change: &Value) -> Value {
    let index: u16 = vf[vf.len() - 1..].parse::<u16>().unwrap() - 1;
    let mut state = json!({
        "vf": vf, "index": index, "mac": format!("52:54:00:00:01:0{index}"), "vlan": 0, "vlan_qos": 0,
        "vlan_proto": "802.1q", "max_tx_rate": 0, "link": "auto", "spoofchk": true, "link_up": true, "set": [],
        "counters": {"rx_frames": 3}
    });
    let keys: Vec<_> = change.as_object().unwrap().keys().filter(|key| *key != "vf").cloned().collect();
    for key in &keys {
        state[key] = change[key].clone();
    }
    state["set"] = json!(keys);
    state
}

/// The body of the reply of a host that lets the guest set VLANs from 100 to 199. VF 1 has one.
fn body(request: &Value) -> Value {
    let none = json!({});
    let vlan = json!({"vlan": 150});
    if request.get("hello").is_some() {
        return json!({"ok": {"version": 1, "pfs": [{"pf": PF, "vfs": 2, "allowed": ["vlan:100-199", "mac"]}]}});
    }
    if request.get("list").is_some() {
        return json!({"ok": {"vfs": [state("0000:00:03.1", &none), state("0000:00:03.2", &vlan)]}});
    }
    let named = |command: &str| Some(request.get(command)?["vf"].as_str()?.to_owned());
    if let Some(vf) = named("get").or_else(|| named("reset")) {
        return json!({"ok": state(&vf, &none)});
    }
    let set = &request["set"];
    match set["vlan"].as_u64() {
        Some(vlan @ (1..100 | 200..)) => {
            json!({"error": {"code": "denied", "message": format!("vlan={vlan}: the host allows 100-199")}})
        }
        _ => json!({"ok": state(set["vf"].as_str().unwrap(), set)}),
    }
}

fn reply(line: &str) -> Vec<Vec<u8>> {
    let request: Value = serde_json::from_str(line).unwrap();
    let mut reply = body(&request);
    reply["id"] = request["id"].clone();
    vec![format!("{reply}\n").into_bytes()]
}

/// A guest with a PF `eth0` and two VFs, of which one has the network interface `eth1`.
fn guest() -> (Guest, Host) {
    let guest = Guest::new().unwrap();
    guest.add_function(PF, "virtio-pci", Some("eth0")).unwrap();
    guest.add_function("0000:00:03.1", "virtio-pci", Some("eth1")).unwrap();
    guest.add_function("0000:00:03.2", "vfio-pci", None).unwrap();
    guest.make_pf(PF, &["0000:00:03.1", "0000:00:03.2"]).unwrap();
    let host = guest.add_port(CONTROL_PORT, "vport2p1", reply).unwrap();
    (guest, host)
}

fn vfctl(guest: &Guest, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vfctl"));
    command.arg("--root").arg(guest.root()).args(arguments).stdin(Stdio::null());
    command
}

/// Exit code, standard output, and standard error of the program.
fn run(guest: &Guest, arguments: &[&str]) -> (i32, String, String) {
    let output = vfctl(guest, arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Standard output of the program, which must succeed.
fn done(guest: &Guest, arguments: &[&str]) -> String {
    let (code, said, error) = run(guest, arguments);
    assert_eq!((code, error.as_str()), (0, ""), "{arguments:?}");
    said
}

/// Exit code and error of the program, which must fail and print nothing else.
fn failed(guest: &Guest, arguments: &[&str]) -> (i32, String) {
    let (code, said, error) = run(guest, arguments);
    assert_eq!((said.as_str(), error.lines().count()), ("", 1), "{arguments:?}: {error}");
    (code, error.trim_end().to_owned())
}

#[test]
fn list_prints_a_table_of_each_pf() {
    let (guest, _host) = guest();
    let expected = "\
eth0 (0000:00:03.0): the host allows vlan:100-199, mac
VF      ADDRESS  NETDEV  MAC                VLAN  RATE  LINK     SPOOFCHK  DRIVER      SET
eth0/0  00:03.1  eth1    52:54:00:00:01:00  -     -     auto/up  on        virtio-pci  -
eth0/1  00:03.2  -       52:54:00:00:01:01  150   -     auto/up  on        vfio-pci    vlan
";
    assert_eq!(done(&guest, &["--text", "list"]), expected);
    assert_eq!(done(&guest, &["list", "eth0", "--text"]), expected);
}

#[test]
fn list_prints_json_to_a_pipe() {
    let (guest, _host) = guest();
    let listed: Value = serde_json::from_str(&done(&guest, &["list", PF])).unwrap();
    assert_eq!((&listed[0]["pf"], &listed[0]["netdev"]), (&json!(PF), &json!("eth0")));
    let vf = &listed[0]["vfs"][1];
    assert_eq!((&vf["vlan"], &vf["driver"], &vf["pf"]), (&json!(150), &json!("vfio-pci"), &json!(PF)));
    assert_eq!(vf["netdev"], Value::Null);
}

#[test]
fn set_names_the_vf_by_its_address_and_prints_it() {
    let (guest, host) = guest();
    for name in ["eth1", "eth0/0", "00:03.1", "0000:00:03.0/0"] {
        let set: Value = serde_json::from_str(&done(&guest, &["set", name, "vlan=120", "spoofchk=off"])).unwrap();
        assert_eq!((&set["vf"], &set["vlan"]), (&json!("0000:00:03.1"), &json!(120)), "{name}");
    }
    let expected = r#""set":{"vf":"0000:00:03.1","vlan":120,"spoofchk":false}}"#;
    assert!(host.lines().len() == 4 && host.lines().iter().all(|line| line.ends_with(expected)));
    let table = done(&guest, &["--text", "set", "eth0/1", "vlan=130"]);
    assert!(table.contains("\neth0/1  00:03.2  -       52:54:00:00:01:01  130 "), "{table}");
}

#[test]
fn show_has_a_line_for_each_value() {
    let (guest, _host) = guest();
    let shown = done(&guest, &["--text", "show", "eth1"]);
    assert!(
        shown.starts_with("VF           eth0/0 (0000:00:03.1)\n") && shown.ends_with("rx_frames    3\n"),
        "{shown}"
    );
}

#[test]
fn reset_returns_one_vf_or_those_with_settings() {
    let (guest, host) = guest();
    done(&guest, &["reset", "eth1"]);
    assert!(host.lines()[0].ends_with(r#""reset":{"vf":"0000:00:03.1"}}"#));
    let all: Value = serde_json::from_str(&done(&guest, &["reset", "--all"])).unwrap();
    assert_eq!((all.as_array().unwrap().len(), &all[0]["vf"]), (1, &json!("0000:00:03.2")));
}

#[test]
fn a_refusal_is_one_line_with_the_sentence_of_the_host() {
    let (guest, _host) = guest();
    let refused = (1, "vfctl: eth0/0: vlan=300: the host allows 100-199".to_owned());
    assert_eq!(failed(&guest, &["set", "eth0/0", "vlan=300"]), refused);
}

#[test]
fn a_name_that_is_not_one_of_a_vf_asks_nothing_of_the_host() {
    let (guest, host) = guest();
    for (arguments, line) in [
        (&["show", "eth7"][..], "vfctl: eth7: there is no such function; give a PCI address, a network interface of"),
        (&["reset", "eth0/2"], "vfctl: eth0/2: there is no such function"),
        (&["set", "eth0", "vlan=100"], "vfctl: eth0: not a VF; name a VF of it, such as eth0/0"),
    ] {
        let (code, error) = failed(&guest, arguments);
        assert!(code == 1 && error.starts_with(line), "{error}");
    }
    assert_eq!(host.lines(), [""; 0]);
}

#[test]
fn a_pf_that_the_host_keeps_is_not_listed() {
    let (guest, _host) = guest();
    let line = "vfctl: eth1: the host does not let this guest govern its VFs, only those of: 0000:00:03.0";
    assert_eq!(failed(&guest, &["list", "eth1"]), (1, line.to_owned()));
}

#[test]
fn a_malformed_command_line_is_one_line() {
    let (guest, host) = guest();
    for (arguments, line) in [
        (&["set", "eth1", "vlan=5000"][..], "vlan=5000: not a number from 0 to 4094"),
        (&["set", "eth1"], "the following required arguments were not provided: <SETTING=VALUE>...; see --help"),
        (&["reset"], "the following required arguments were not provided: <VF|--all>; see --help"),
        (&["--timeout", "0", "list"], "invalid value '0' for '--timeout <seconds>': not a number above 0, and at most"),
        (&["list", "--json", "--text"], "the argument '--json' cannot be used with '--text'; see --help"),
    ] {
        let (code, error) = failed(&guest, arguments);
        assert!(code == 2 && error.starts_with(&format!("vfctl: {line}")), "{error}");
    }
    assert_eq!(host.lines(), [""; 0]);
}

#[test]
fn each_state_of_the_channel_has_its_exit_code() {
    let guest = Guest::new().unwrap();
    let (code, error) = failed(&guest, &["list"]);
    assert!(code == 3 && error.starts_with("vfctl: this guest has no channel (sriov.control): its host"), "{error}");
    let (code, error) = failed(&guest, &["watch"]);
    assert!(code == 3 && error.starts_with("vfctl: this guest has no channel (sriov.events): its host"), "{error}");
    let _silent = guest.add_port(CONTROL_PORT, "vport1p1", |_| Vec::new()).unwrap();
    let (code, error) = failed(&guest, &["--timeout", "0.05", "list"]);
    assert!(code == 6 && error.starts_with("vfctl: the host did not answer within 0.05 s; "), "{error}");
    let lock = std::fs::File::create(guest.root().join("run/vfctl.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (code, error) = failed(&guest, &["--timeout", "0.05", "list"]);
    assert!(code == 5 && error.ends_with("/run/vfctl.lock: another program uses the channel; try again"), "{error}");
}

#[test]
fn watch_prints_each_notice() {
    let (guest, _host) = guest();
    let host = guest.add_port(EVENTS_PORT, "vport2p2", |_| Vec::new()).unwrap();
    for (format, expected) in [
        ("--text", "0000:00:03.1 (eth1) by host: vlan 0 -> 100"),
        ("--json", r#"{"vf":"0000:00:03.1","by":"host","changed":"vlan 0 -> 100"}"#),
    ] {
        let mut child = vfctl(&guest, &["watch", format]).stdout(Stdio::piped()).spawn().unwrap();
        host.write(b"noise\n{\"vf\":\"0000:00:03.1\",\"by\":\"host\",\"changed\":\"vlan 0 -> 100\"}\n");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), expected);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
