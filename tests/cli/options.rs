//! The options of the program itself, and a VM described by a file.

use serde_json::{Value, json};

use crate::files::Files;
use crate::run::{Run, USAGE, WRONG};

fn usage(arguments: &[&str]) -> String {
    Run::new(arguments).refused(USAGE)
}

fn printed(arguments: &[&str]) -> String {
    let output = Run::new(arguments).command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn help_is_by_topic() {
    let text = printed(&["--help"]);
    let at = |text_of: &str| text.find(text_of).unwrap_or_else(|| panic!("{text_of} in {text}"));
    assert!(at("\nBoot:") < at("--kernel <"));
    assert!(at("\nMachine:") < at("--cpus <") && at("Devices:") < at("--net <"));
    assert!(at("API and events:") < at("--event-monitor <") && at("Process:") < at("--print-config"));
}

#[test]
fn the_printed_configuration_is_whole_and_can_be_given_again() {
    let text = printed(&[
        "--kernel",
        "/nonexistent/vmlinux",
        "--cmdline",
        "console=ttyS0",
        "--memory",
        "size=1G",
        "--disk",
        "path=/nonexistent/disk",
        "--rng",
        "src=/dev/hwrng",
        "--balloon",
        "size=64M,free_page_reporting=on",
        "--vsock",
        "cid=5,socket=/run/v",
        "--watchdog",
        "--pvpanic",
        "--tpm",
        "socket=/run/tpm",
        "--pmem",
        "file=/run/pmem,size=4M",
        "--landlock",
        "--landlock-rules",
        "path=/srv/later,access=rw",
        "--net",
        "id=pf0,sriov_vfs=4",
        "--net-vf",
        "pf=pf0,index=3,tap=clitest3",
        "--print-config",
    ]);
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["memory"]["size"], Value::from(1u64 << 30));
    assert_eq!((&config["net"][0]["id"], &config["net"][0]["vfs"][0]["index"]), (&"pf0".into(), &3.into()));
    assert!(config["net"][0]["mac"].is_string());
    assert_eq!(config["disks"][0]["id"], Value::from("_disk0"));
    assert_eq!(config["rng"]["src"], Value::from("/dev/hwrng"));
    let balloon = json!({
        "size": 64 << 20, "deflate_on_oom": false, "free_page_reporting": true, "id": "__balloon", "pci_segment": 0,
        "iommu": false,
    });
    assert_eq!(config["balloon"], balloon);
    assert_eq!((&config["vsock"]["cid"], &config["vsock"]["socket"]), (&5.into(), &"/run/v".into()));
    assert_eq!((&config["tpm"], &config["pmem"][0]["size"]), (&json!({"socket": "/run/tpm"}), &(4 << 20).into()));
    assert_eq!((&config["watchdog"], &config["pvpanic"]), (&true.into(), &true.into()));
    let rules = json!([{"path": "/srv/later", "access": "rw"}]);
    assert_eq!((&config["landlock_enable"], &config["landlock_rules"]), (&true.into(), &rules));
    let files = Files::new();
    let file = files.write("vm.json", text.as_bytes());
    assert_eq!(printed(&["--config", &file, "--print-config"]), text);
    let mut run = Run::new(&["--config", "-", "--print-config"]);
    let output = run.command.write_stdin(text.clone()).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), text);
}

#[test]
fn a_wrong_configuration_is_not_printed() {
    let said = Run::new(&["--kernel", "k", "--cpus", "boot=0", "--print-config"]).refused(WRONG);
    assert_eq!(said, "--cpus boot=0: a VM needs a vCPU; give 1 or more");
    assert_eq!(
        usage(&["--api-socket", "s", "--print-config"]),
        "--print-config: no VM is described; give --kernel or --config"
    );
}

#[test]
fn a_file_is_the_whole_vm() {
    let files = Files::new();
    let file = files.write("vm.json", br#"{"payload": {"kernel": "/nonexistent/vmlinux"}}"#);
    for more in ["--cpus", "--kernel", "--net"] {
        let said = usage(&["--config", &file, more, "x"]);
        assert_eq!(
            said.replace("--config", "x").replace(more, "x"),
            "x cannot be combined with x; leave one of them out; see --help"
        );
    }
    assert_eq!(
        Run::new(&["--config", &file]).refused(WRONG),
        "--kernel /nonexistent/vmlinux: cannot be read: No such file or directory (os error 2)"
    );
    let none = files.write("none.json", b"{}");
    assert_eq!(
        Run::new(&["--config", &none]).refused(WRONG),
        "--kernel: is required; give the path of a bzImage or a vmlinux, or --firmware"
    );
}

#[test]
fn a_fault_in_a_file_is_named_by_its_path() {
    let files = Files::new();
    let said = |text: &str| {
        let file = files.write("vm.json", text.as_bytes());
        usage(&["--config", &file]).replace(&file, "F")
    };
    assert!(said("{").starts_with("--config F: the document: not JSON: "));
    assert!(said(r#"{"colour": 1}"#).contains("unknown field `colour`"));
    assert!(said(r#"{"net": [{"sriov_vf": 1}]}"#).starts_with("--config F: net[0]"));
    let missing = Run::new(&["--config", "/nonexistent/vm.json"]).refused(WRONG);
    assert_eq!(missing, "--config /nonexistent/vm.json: cannot be read: No such file or directory (os error 2)");
    let later = files.write("later.json", br#"{"user_devices": [{"socket": "x"}]}"#);
    assert_eq!(
        Run::new(&["--config", &later]).refused(WRONG).replace(&later, "F"),
        "--config F: user_devices: vfio-user devices are not supported yet; leave it out"
    );
    let wrong = files.write("wrong.json", br#"{"payload": {"kernel": "k"}, "net": [{}, {"queue_size": 100}]}"#);
    let said = Run::new(&["--config", &wrong]).refused(WRONG).replace(&wrong, "F");
    assert!(said.starts_with("--config F: net[1].queue_size=100: not a power of two"), "{said}");
}

#[test]
fn there_has_to_be_something_to_run() {
    assert_eq!(usage(&["--log-file", "log"]), "nothing to run; give --kernel, --config, --restore or --api-socket");
}

#[test]
fn where_events_go_is_a_path_or_a_descriptor() {
    for bare in ["events", "", "path=", "fd=1", "fd=x", "path=a,fd=3"] {
        assert_eq!(
            usage(&["--api-socket", "s", "--event-monitor", bare]),
            format!("--event-monitor {bare}: give path=<path> or fd=<number>")
        );
    }
    let wrong = |monitor: &str| Run::new(&["--kernel", "k", "--event-monitor", monitor]).refused(WRONG);
    assert_eq!(
        wrong("path=/nonexistent/events"),
        "--event-monitor path=/nonexistent/events: the folder /nonexistent does not exist; make it (mkdir -p), or give \
         another path"
    );
    assert_eq!(
        wrong("fd=99"),
        "--event-monitor fd=99: not a file descriptor open for writing; open it before the program starts"
    );
}

#[test]
fn where_the_api_is_found_is_a_path_or_a_descriptor() {
    for malformed in ["", "fd=2", "fd=x", "path=", "port=80"] {
        assert_eq!(
            usage(&["--api-socket", malformed]),
            format!("--api-socket {malformed}: give path=<path>, a path alone, or fd=<number>")
        );
    }
    assert_eq!(
        usage(&["--api-socket", "s", "--read-only-socket", "fd=2"]),
        "--read-only-socket fd=2: give path=<path>, a path alone, or fd=<number>"
    );
    assert_eq!(
        usage(&["--read-only-socket", "s"]),
        "nothing to run; give --kernel, --config, --restore or --api-socket"
    );
    assert!(
        Run::new(&["--api-socket", "fd=99"])
            .refused(WRONG)
            .starts_with("--api-socket fd=99: not a listening Unix socket")
    );
}

#[test]
fn a_disk_and_an_entropy_device_are_read_by_their_keys() {
    let malformed = |option: &str, text: &str| usage(&["--kernel", "k", option, text]);
    assert_eq!(malformed("--disk", "size=1G"), "--disk size=1G: unknown key; --help lists those of --disk");
    assert_eq!(malformed("--disk", "readonly=maybe"), "--disk readonly=maybe: give on or off");
    assert_eq!(malformed("--balloon", "pages=1"), "--balloon pages=1: unknown key; --help lists those of --balloon");
    assert_eq!(malformed("--rng", "source=x"), "--rng source=x: unknown key; --help lists those of --rng");
}

#[test]
fn an_empty_name_or_policy_is_refused_and_the_key_named() {
    for (option, value, key) in [
        ("--net", "id=,tap=a", "id="),
        ("--net", "tap=a,vlan=", "vlan="),
        ("--net", "tap=a,trunk=\"\"", "trunk=\"\""),
        ("--net", "tap=a,sriov_vfs=", "sriov_vfs="),
        ("--net-vf", "pf=a,index=0,spoofchk=", "spoofchk="),
        ("--disk", "path=/d,id=", "id="),
        ("--device", "path=/d,id=", "id="),
        ("--memory-zone", "id=,size=1G", "id="),
        ("--console", "tty,id=", "id="),
    ] {
        let line = usage(&["--kernel", "/k", option, value]);
        assert!(
            line.contains(&format!("{key}: the value is empty; give one, or leave the key out")),
            "{value}: {line}"
        );
    }
    // As in Cloud Hypervisor's guide.
    printed(&["--kernel", "/k", "--net", "tap=,mac=,ip=,mask=", "--print-config"]);
    let empty = "not a device name; use printable characters";
    for (json, what) in [
        (json!({"net": [{"tap": ""}]}), "net[0].tap=: not the name of an interface"),
        (json!({"net": [{"id": ""}]}), empty),
        (json!({"disks": [{"path": "/d", "id": ""}]}), empty),
        (json!({"pmem": [{"file": "/d", "id": ""}]}), empty),
        (json!({"vsock": {"cid": 3, "socket": "/s", "id": ""}}), empty),
        (json!({"serial": {"mode": "File", "file": ""}}), "the path is empty; give one"),
        (json!({"console": {"mode": "Socket", "socket": ""}}), "the path is empty; give one"),
        (json!({"debug_console": {"mode": "File", "file": ""}}), "the path is empty; give one"),
        (json!({"memory": {"size": 0, "zones": [{"id": "a", "size": 1 << 30, "file": ""}]}}), "the path is empty"),
    ] {
        let mut vm = json!({"payload": {"kernel": "/k"}});
        vm.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
        let files = Files::new();
        let file = files.write("vm.json", vm.to_string().as_bytes());
        let line = Run::new(&["--config", &file, "--print-config"]).refused(WRONG);
        assert!(line.contains(what), "{json}: {line}");
    }
}
