//! The library against a host that answers well, badly, or not at all.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use fixtures::channel::{Guest, Host};
use rustix::fs::{FlockOperation, flock};
use vfctl::function::{Function, full_address};
use vfctl::{Channel, Error, Roots};
use vm_api::channel::{CONTROL_PORT, MAX_REPLY, RefusalCode, Set};

/// A limit that no test reaches.
const LONG: Duration = Duration::from_secs(600);
/// A limit that is reached on purpose.
const SHORT: Duration = Duration::from_millis(50);
const STATE: &str = r#"{"vf":"0000:00:03.1","index":0,"mac":"52:54:00:00:01:00","vlan":120,"vlan_qos":0,
    "vlan_proto":"802.1q","max_tx_rate":0,"link":"auto","spoofchk":true,"link_up":true,"set":["vlan"]}"#;

fn state() -> String {
    STATE.replace("\n    ", "")
}

/// The number of a request.
fn id(line: &str) -> &str {
    line.strip_prefix(r#"{"id":"#).and_then(|rest| rest.split(',').next()).unwrap()
}

/// A guest with a host that answers each request by `answer`.
fn guest(answer: impl FnMut(&str) -> Vec<Vec<u8>> + Send + 'static) -> (Guest, Host, Roots) {
    let guest = Guest::new().unwrap();
    let host = guest.add_port(CONTROL_PORT, "vport1p1", answer).unwrap();
    let roots = Roots::below(guest.root());
    (guest, host, roots)
}

#[test]
fn a_reply_is_found_among_lines_that_are_not_its_own() {
    let (_guest, host, roots) = guest(|line| {
        let noise = ["not json", r#"{"id":1,"ok":{}}"#, r#"{"vf":"0000:00:03.1","by":"host","changed":"vlan 0 -> 1"}"#];
        let mut pieces: Vec<_> = noise.iter().map(|noise| format!("{noise}\n").into_bytes()).collect();
        pieces.push(vec![b'x'; MAX_REPLY * 2]);
        pieces.push(format!("\n{{\"id\":{},\"o", id(line)).into_bytes());
        pieces.push(format!("k\":{}}}", state()).into_bytes());
        pieces.push(b"\n".to_vec());
        pieces
    });
    let mut channel = Channel::open_in(&roots, LONG).unwrap();
    let vf = channel.get("0000:00:03.1").unwrap();
    assert_eq!((vf.vlan, vf.set), (120, vec!["vlan".to_owned()]));
    let set = Set { vf: "0000:00:03.1".to_owned(), vlan: Some(120), ..Set::default() };
    channel.set(&set).unwrap();
    channel.reset("0000:00:03.1").unwrap();
    let lines = host.lines();
    let bodies: Vec<_> = lines.iter().map(|line| line.split_once(',').unwrap().1).collect();
    assert_eq!(
        bodies,
        [
            r#""get":{"vf":"0000:00:03.1"}}"#,
            r#""set":{"vf":"0000:00:03.1","vlan":120}}"#,
            r#""reset":{"vf":"0000:00:03.1"}}"#
        ]
    );
    assert_ne!(id(&lines[0]), id(&lines[1]));
}

#[test]
fn all_pages_of_a_list_are_asked_for() {
    let (_guest, host, roots) = guest(|line| {
        let next = if line.contains(r#""from":0"#) { r#","next":16"# } else { "" };
        vec![format!("{{\"id\":{},\"ok\":{{\"vfs\":[{}]{next}}}}}\n", id(line), state()).into_bytes()]
    });
    assert_eq!(Channel::open_in(&roots, LONG).unwrap().list("0000:00:03.0").unwrap().len(), 2);
    assert!(host.lines()[1].contains(r#""list":{"pf":"0000:00:03.0","from":16}"#));
}

#[test]
fn a_list_that_does_not_advance_is_an_error() {
    let (_guest, _host, roots) =
        guest(|line| vec![format!("{{\"id\":{},\"ok\":{{\"vfs\":[],\"next\":0}}}}\n", id(line)).into_bytes()]);
    let error = Channel::open_in(&roots, LONG).unwrap().list("0000:00:03.0").unwrap_err();
    assert!(matches!(&error, Error::Unexpected(reason) if reason == "VF 0 follows VF 0"), "{error}");
}

#[test]
fn a_refusal_is_told_by_the_sentence_of_the_host() {
    let (_guest, _host, roots) = guest(|line| {
        let refusal = r#"{"code":"denied","message":"vlan=300: the host allows 100-199"}"#;
        vec![format!("{{\"id\":{},\"error\":{refusal}}}\n", id(line)).into_bytes()]
    });
    let error = Channel::open_in(&roots, LONG).unwrap().get("0000:00:03.1").unwrap_err();
    assert_eq!(error.to_string(), "vlan=300: the host allows 100-199");
    assert!(matches!(error, Error::Refused(refusal) if refusal.code == RefusalCode::Denied));
}

#[test]
fn a_host_that_does_not_answer_is_an_error_of_one_line() {
    let (_guest, _host, roots) = guest(|_| vec![b"{\"id\":1,\"ok\":{}}\n{\"id\"".to_vec()]);
    let error = Channel::open_in(&roots, SHORT).unwrap().hello().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the host did not answer within 0.05 s; try again, and if that fails, look at the VMM's log"
    );
}

#[test]
fn endless_noise_of_a_host_does_not_hold_a_program() {
    let (_guest, _host, roots) = guest(|_| vec![b"noise\n".repeat(100_000)]);
    let error = Channel::open_in(&roots, SHORT).unwrap().hello().unwrap_err();
    assert!(matches!(error, Error::NoAnswer { .. }), "{error}");
}

#[test]
fn a_refusal_without_a_number_is_of_the_only_request() {
    let (_guest, _host, roots) =
        guest(|_| vec![b"{\"error\":{\"code\":\"invalid\",\"message\":\"not a request\"}}\n".to_vec()]);
    let error = Channel::open_in(&roots, SHORT).unwrap().hello().unwrap_err();
    assert_eq!(error.to_string(), "not a request");
}

#[test]
fn a_host_of_another_version_is_an_error() {
    let (_guest, host, roots) =
        guest(|line| vec![format!("{{\"id\":{},\"ok\":{{\"version\":2,\"pfs\":[]}}}}\n", id(line)).into_bytes()]);
    let error = Channel::open_in(&roots, LONG).unwrap().hello().unwrap_err();
    assert!(error.to_string().contains("version 2 instead of 1"), "{error}");
    assert!(host.lines()[0].ends_with(r#""hello":{"version":1}}"#));
}

#[test]
fn a_guest_without_the_port_has_no_channel() {
    let guest = Guest::new().unwrap();
    let roots = Roots::below(guest.root());
    let open = || Channel::open_in(&roots, LONG).unwrap_err();
    assert!(matches!(open(), Error::NoChannel { port: "sriov.control" }));
    let _other = guest.add_port("org.qemu.guest_agent.0", "vport1p2", |_| Vec::new()).unwrap();
    assert!(open().to_string().starts_with("this guest has no channel (sriov.control): its host gives it one with"));
    let _host = guest.add_port(CONTROL_PORT, "vport1p1", |_| Vec::new()).unwrap();
    fs::remove_file(roots.dev.join("vport1p1")).unwrap();
    assert!(matches!(open(), Error::NoNode(node) if node.ends_with("dev/vport1p1")));
}

#[test]
fn one_program_has_the_channel_at_a_time() {
    let (_guest, _host, roots) =
        guest(|line| vec![format!("{{\"id\":{},\"ok\":{{\"version\":1,\"pfs\":[]}}}}\n", id(line)).into_bytes()]);
    let first = Channel::open_in(&roots, LONG).unwrap();
    let error = Channel::open_in(&roots, SHORT).unwrap_err();
    assert!(matches!(&error, Error::Busy(path) if path.ends_with("run/vfctl.lock")), "{error}");
    drop(first);
    let threads: Vec<_> = (0..16)
        .map(|_| {
            let roots = roots.clone();
            std::thread::spawn(move || Channel::open_in(&roots, LONG)?.hello())
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap().unwrap().pfs, []);
    }
}

#[test]
fn a_lock_that_is_held_is_waited_for() {
    let (_guest, _host, roots) = guest(|_| Vec::new());
    let lock = File::create(roots.run.join("vfctl.lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let start = Instant::now();
    let waiting = std::thread::spawn(move || Channel::open_in(&roots, LONG).map(|_| start.elapsed()));
    std::thread::sleep(SHORT);
    drop(lock);
    assert!(waiting.join().unwrap().unwrap() >= SHORT);
}

#[test]
fn a_guest_without_a_folder_for_locks_has_the_channel() {
    let (_guest, _host, roots) =
        guest(|line| vec![format!("{{\"id\":{},\"ok\":{{\"version\":1,\"pfs\":[]}}}}\n", id(line)).into_bytes()]);
    fs::remove_dir(&roots.run).unwrap();
    Channel::open_in(&roots, LONG).unwrap().hello().unwrap();
}

#[test]
fn a_function_is_found_by_each_of_its_names() {
    let guest = Guest::new().unwrap();
    guest.add_function("0000:00:03.0", "virtio-pci", Some("eth0")).unwrap();
    guest.add_function("0000:00:03.1", "virtio-pci", Some("eth1")).unwrap();
    guest.add_function("0000:00:03.2", "vfio-pci", None).unwrap();
    guest.make_pf("0000:00:03.0", &["0000:00:03.1", "0000:00:03.2"]).unwrap();
    let roots = Roots::below(guest.root());
    let find = |text: &str| Function::find(&roots, text);
    for text in ["0000:00:03.1", "00:03.1", "eth1", "eth0/0", "0000:00:03.0/0", "00:03.0/0"] {
        assert_eq!(find(text).unwrap().address(), "0000:00:03.1", "{text}");
    }
    for text in ["", "..", "../..", "eth2", "eth0/2", "eth0/", "eth0/-1", "eth0/0/0", "0000:00:04.0", "/", "eth1/0"] {
        assert_eq!(find(text), None, "{text}");
    }
    let vfio = find("eth0/1").unwrap();
    let virtio = find("eth1").unwrap();
    assert_eq!((vfio.netdev(), vfio.driver().as_deref(), vfio.index(&roots)), (None, Some("vfio-pci"), Some(1)));
    assert_eq!((virtio.netdev().as_deref(), virtio.driver().as_deref()), (Some("eth1"), Some("virtio-pci")));
    assert_eq!(virtio.pf().as_deref(), Some("0000:00:03.0"));
    let pf = find("eth0").unwrap();
    assert_eq!((pf.pf(), pf.index(&roots)), (None, None));
    assert_eq!(pf.vfs(), [(0, "0000:00:03.1".to_owned()), (1, "0000:00:03.2".to_owned())]);
}

#[test]
fn vfs_are_in_the_order_of_numbers() {
    let guest = Guest::new().unwrap();
    guest.add_function("0000:01:00.0", "virtio-pci", None).unwrap();
    let vfs: Vec<_> = (1..=12).map(|number| format!("0000:01:{:02x}.{}", number / 8, number % 8)).collect();
    vfs.iter().for_each(|vf| guest.add_function(vf, "virtio-pci", None).unwrap());
    guest.make_pf("0000:01:00.0", &vfs.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    let pf = Function::at(&Roots::below(guest.root()), "0000:01:00.0").unwrap();
    assert_eq!(pf.vfs().into_iter().map(|(_, vf)| vf).collect::<Vec<_>>(), vfs);
    assert!(pf.folder().starts_with(Path::new(guest.root())));
}

#[test]
fn an_address_is_never_a_path() {
    assert_eq!(full_address("0000:00:1F.7").as_deref(), Some("0000:00:1f.7"));
    assert_eq!(full_address("00:1f.7").as_deref(), Some("0000:00:1f.7"));
    for wrong in
        ["", "0:1f.7", "0000:00:1f", "0000.00.1f.7", "000g:00:1f.7", "../..:00:1f.7", "00001:00:00.0", "..:...."]
    {
        assert_eq!(full_address(wrong), None, "{wrong}");
    }
}
