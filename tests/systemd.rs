//! The units in contrib are as confined as the documents say, and only an operator starts a VM. The script in contrib
//! gives a bridge its VLANs.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// The most exposure, in tenths of systemd's unit: from 0 to 100. Versions of systemd differ by some tenths.
const MOST: u32 = 20;

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// The units of a VM that starts here, and of one that arrives.
const UNITS: [&str; 2] = ["cloud-hypervisor", "cloud-hypervisor-receive"];

/// The lines of a unit without comments.
fn settings(unit: &str) -> Vec<String> {
    let text = read(&format!("contrib/systemd/{unit}@.service"));
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// All values of `key` in `settings`.
fn values<'s>(settings: &'s [String], key: &str) -> Vec<&'s str> {
    settings
        .iter()
        .filter_map(|line| line.split_once('=').filter(|(name, _)| *name == key))
        .map(|(_, value)| value)
        .collect()
}

/// A figure such as `1.8`, in tenths.
fn tenths(figure: &str) -> u32 {
    figure.replace('.', "").parse().unwrap()
}

#[test]
fn the_exposure_of_each_unit_is_what_the_documents_say() {
    UNITS.iter().for_each(|unit| check_exposure(unit));
}

fn check_exposure(unit: &str) {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("contrib/systemd/{unit}@.service"));
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager"])
        .arg(&unit)
        .output()
        .expect("systemd-analyze is missing: apt-get install systemd");
    let text = String::from_utf8_lossy(&output.stdout);
    let line =
        text.lines().find(|line| line.contains("Overall exposure level")).unwrap_or_else(|| panic!("{output:?}"));
    let measured = tenths(line.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit())).unwrap());
    let usage = read("docs/usage.md");
    let documented = usage.split_once("rates its exposure at ").unwrap().1.split_whitespace().next().unwrap();
    assert!(measured <= MOST && tenths(documented) <= MOST, "{line}; documented: {documented}");
    assert!(measured.abs_diff(tenths(documented)) <= 3, "{line}; documented: {documented}");
}

#[test]
fn the_unit_lets_the_program_confine_itself() {
    let unit = read("contrib/systemd/cloud-hypervisor@.service");
    let filter: Vec<_> = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")).collect();
    for call in ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp"] {
        assert!(
            filter.iter().any(|calls| !calls.starts_with('~') && calls.split(' ').any(|one| one == call)),
            "{call}"
        );
    }
}

/// A client or a failure that started a VM again could run a guest twice: it may have moved.
#[test]
fn only_an_operator_starts_a_vm_again() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/systemd");
    for file in fs::read_dir(folder).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if name == "upgrade-vm" {
            continue; // An operator's.
        }
        assert!(name.ends_with("@.service"), "{name} could start a service");
    }
    for unit in UNITS {
        let settings = settings(unit);
        assert_eq!(values(&settings, "Restart"), ["no"], "{unit}");
        for key in ["Sockets", "RestartForceExitStatus", "OnFailure", "OnSuccess", "Upholds", "Alias", "Also"] {
            assert!(values(&settings, key).is_empty(), "{unit}: {key}");
        }
        // The API's socket is in the folder that systemd removes with the service.
        assert_eq!(values(&settings, "RuntimeDirectory"), [format!("{unit}/%i")]);
        assert!(values(&settings, "RuntimeDirectoryPreserve").is_empty(), "{unit}");
        let socket = format!("%t/{unit}/%i/api.sock");
        assert!(values(&settings, "ExecStart")[0].contains(&format!(" --api-socket path={socket}")), "{unit}");
        let metrics = format!(" --read-only-socket path=%t/{unit}/%i/metrics.sock");
        // An operator's options, empty by default, for all ways to start.
        assert!(values(&settings, "ExecStart")[0].ends_with(" $OPTIONS"), "{unit}");
        assert_eq!(values(&settings, "Environment"), ["OPTIONS="], "{unit}");
        assert!(values(&settings, "ExecStart")[0].contains(&metrics), "{unit}");
        assert!(values(&settings, "ExecStop")[0].contains(&format!(" --api-socket {socket} power-button")), "{unit}");
        // Without it, a reload would be refused.
        assert!(values(&settings, "ExecReload")[0].contains("kill -HUP $MAINPID"), "{unit}");
    }
    // A VM that has moved to another host is marked, by either unit, and its own unit does not start it.
    let mark = "%S/cloud-hypervisor/%i.moved";
    for unit in UNITS {
        let settings = settings(unit);
        let marks = values(&settings, "ExecStopPost")[0];
        assert!(marks.starts_with("-+") && marks.contains("moved away ") && marks.contains(mark), "{unit}: {marks}");
    }
    let refuses = settings(UNITS[0]);
    assert!(values(&refuses, "ExecStartPre")[0].starts_with(&format!("+/usr/bin/sh -c 'test ! -e {mark} || ")));
    // A received VM does not come back with the host.
    assert!(values(&settings(UNITS[1]), "WantedBy").is_empty());
}

#[test]
fn a_received_vm_is_confined_and_owned_as_one_that_starts() {
    let differs = [
        "Description",
        "LoadCredential",
        "RuntimeDirectory",
        "ExecStartPre",
        "ExecStart",
        "ExecStop",
        "WantedBy",
        "[Install]",
    ];
    let same = |unit: &str| {
        let kept = |line: &String| !differs.contains(&line.split('=').next().unwrap());
        settings(unit).into_iter().filter(kept).collect::<Vec<_>>()
    };
    let of_both = same(UNITS[0]);
    assert_eq!(of_both, same(UNITS[1]));
    // The same images, which systemd gives to the same user.
    assert_eq!(values(&of_both, "User"), ["vm-%i"]);
    assert_eq!(values(&of_both, "StateDirectory"), ["cloud-hypervisor/%i"]);
}

/// Runs `contrib/network/bridge-with-vlans` with commands that only write down their arguments.
#[test]
fn the_bridge_gets_a_trunk_and_one_vlan_for_each_vf() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bridge-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let log = folder.join("log");
    for name in ["ip", "bridge"] {
        let command = folder.join(name);
        fs::write(&command, format!("#!/bin/sh\necho {name} \"$@\" >> '{}'\n", log.display())).unwrap();
        fs::set_permissions(&command, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/network/bridge-with-vlans");
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let run = |arguments: &[&str]| Command::new(&script).args(arguments).env("PATH", &path).output().unwrap();
    // The interface `lo` exists, so it is not made.
    let done = run(&["nobridge0", "lo", "notap0", "100", "200"]);
    assert!(done.status.success(), "{done:?}");
    let calls = fs::read_to_string(&log).unwrap();
    let expected = "ip link add nobridge0 type bridge vlan_filtering 1 vlan_default_pvid 0
ip link set nobridge0 up
ip link set lo master nobridge0 up
bridge vlan add dev lo vid 100
bridge vlan add dev lo vid 200
ip tuntap add notap0 mode tap vnet_hdr
ip link set notap0 master nobridge0 up
bridge vlan add dev notap0 vid 100
bridge vlan add dev notap0 vid 200
ip tuntap add notap0v0 mode tap vnet_hdr
ip link set notap0v0 master nobridge0 up
bridge vlan add dev notap0v0 vid 100 pvid untagged
ip tuntap add notap0v1 mode tap vnet_hdr
ip link set notap0v1 master nobridge0 up
bridge vlan add dev notap0v1 vid 200 pvid untagged
";
    assert_eq!(calls, expected);
    assert_eq!(run(&["br0"]).status.code(), Some(2));
    fs::remove_dir_all(&folder).unwrap();
}

/// Stands in for `systemctl`: units are folders below `run`, which a program's API is in while it runs. One whose
/// folder name is in the file `broken` does not start.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo systemctl "$@" >> log
for unit; do :; done
folder=run/${unit%%@*}/vm1
case $1 in
start) grep -qx "${unit%%@*}" broken && { echo 'Job failed.' >&2; echo 'See systemctl status.' >&2; exit 1; }
    mkdir -p "$folder" ;;
stop) rm -rf "$folder" ;;
--quiet) [ -e "$folder/api.sock" ] ;;
show) echo inactive ;;
esac
"#;

/// Stands in for `ch-remote`: a program has a VM if the file of its API exists. A target whose folder name is in the
/// file `refusing` does not take one.
const REMOTE: &str = r#"#!/bin/sh
echo ch-remote "$@" >> log
case "$*" in
*info) [ -e "$2" ] && echo '{"config": {}, "state": "Running"}' ;;
*receive-migration*) [ -d "${2%/*}" ] || { echo 'ch-remote: no such socket' >&2; exit 1; } ;;
*send-migration*) to=${4#*unix:} to=${to%/move*}
    if grep -qx "$(basename "${to%/vm1}")" refusing; then echo 'ch-remote: send-migration: no room' >&2; exit 1; fi
    mv "$2" "$to/api.sock" ;;
esac
"#;

/// Runs a copy of `upgrade-vm` below a folder of its own, with programs that only move files.
#[test]
fn a_failed_step_of_an_upgrade_leaves_the_guest_in_one_unit() {
    let (first, second) = ("cloud-hypervisor", "cloud-hypervisor-receive");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("upgrade-{}", std::process::id()));
    let place = |unit: &str| folder.join("run").join(unit).join("vm1/api.sock");
    fs::create_dir_all(place(first).parent().unwrap()).unwrap();
    fs::write(place(first), "").unwrap();
    // Without a slash before them, paths of the system are below this folder.
    let script = read("contrib/systemd/upgrade-vm").replace("=/run/", "=run/").replace(" \"/var/lib", " \"var/lib");
    for (name, text) in [("upgrade-vm", script.as_str()), ("systemctl", SYSTEMCTL), ("ch-remote", REMOTE)] {
        fs::write(folder.join(name), text).unwrap();
        fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let upgrade = |broken: &str, refusing: &str| {
        fs::write(folder.join("broken"), broken).unwrap();
        fs::write(folder.join("refusing"), refusing).unwrap();
        let mut command = Command::new(folder.join("upgrade-vm"));
        let output = command.arg("vm1").env("PATH", &path).current_dir(&folder).output().unwrap();
        assert!(!folder.join(format!("run/systemd/system/{first}@vm1.service.d")).exists(), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let stays = |reason: &str, unit: &str| {
        let cure = "remove the cause and call upgrade-vm vm1 again";
        format!("upgrade-vm: {reason}; the guest stays in {unit}@vm1.service (Running); {cure}\n")
    };
    let dead =
        |unit: &str| format!("{unit}@vm1.service did not start (journalctl --unit={unit}@vm1.service has the reason)");
    let refused = "ch-remote: send-migration: no room";
    assert_eq!(upgrade(second, ""), stays(&dead(second), first));
    assert_eq!(upgrade("", second), stays(refused, first));
    assert!(place(first).exists() && !place(second).parent().unwrap().exists());
    assert_eq!(upgrade(first, ""), stays(&dead(first), second));
    assert_eq!(upgrade("", first), stays(refused, second));
    assert!(place(second).exists() && !place(first).parent().unwrap().exists());
    // The cause is removed.
    assert_eq!(upgrade("", ""), "");
    assert!(place(first).exists() && !place(second).exists());
    // A guest that has ended is said to be in no unit.
    fs::remove_file(place(first)).unwrap();
    assert_eq!(
        upgrade("", ""),
        format!("upgrade-vm: {first}@vm1.service has no VM; start it (systemctl start {first}@vm1.service)\n")
    );
    fs::remove_dir_all(&folder).unwrap();
}

/// Checks copies, whose commands exist on any host.
#[test]
fn systemd_knows_every_setting_of_the_units() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("units-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for unit in UNITS {
        let text = read(&format!("contrib/systemd/{unit}@.service"));
        let copy = folder.join(format!("{unit}@a.service"));
        fs::write(
            &copy,
            text.replace("/usr/bin/cloud-hypervisor", "/bin/true").replace("/usr/bin/ch-remote", "/bin/true"),
        )
        .unwrap();
        let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output().unwrap();
        let said = String::from_utf8_lossy(&verified.stderr);
        // Units of the host may have faults of their own, and names of system calls depend on the version.
        let is_fault = |line: &&str| line.contains(&format!("{unit}@")) && line.contains("Unknown");
        assert_eq!(said.lines().find(is_fault), None, "{said}");
        assert!(verified.status.success(), "{said}");
    }
    fs::remove_dir_all(&folder).unwrap();
}
