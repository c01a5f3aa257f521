//! Completions and man pages name every option and subcommand, and bash completes them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::{TempDir, tempdir};

const COMMANDS: [&str; 2] = [env!("CARGO_BIN_EXE_cloud-hypervisor"), env!("CARGO_BIN_EXE_ch-remote")];

/// The example, which cargo builds next to the commands when it builds tests.
fn generator() -> PathBuf {
    let folder = PathBuf::from(COMMANDS[0]);
    folder.parent().unwrap().join("examples/generate")
}

/// The words of `text` that begin with `begin`, up to the end of the name.
fn words<'a>(text: &'a str, begin: &'a str) -> impl Iterator<Item = &'a str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
    text.split(move |c: char| !is_name(c)).filter(move |word| word.starts_with(begin) && word.len() > begin.len())
}

/// The completions and pages, in a folder.
fn generated() -> TempDir {
    let folder = tempdir().unwrap();
    assert!(Command::new(generator()).arg(folder.path()).status().unwrap().success());
    folder
}

/// Completions that bash offers for a line of `command`, whose cursor is at its end.
fn completed(folder: &Path, command: &str, line: &str) -> Vec<String> {
    let script = folder.join(format!("completions/{command}.bash"));
    // As readline: a word of its own is what is behind the last blank, equals sign or colon.
    let text = r#"
        source "$1" || exit 1
        COMP_WORDBREAKS=$' \t\n"\'><=;|&(:' COMP_LINE=$2 COMP_POINT=${#2}
        "_${3//-/_}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "--noprofile", "-c", text, "bash"]).arg(script).args([line, command]);
    let output = bash.current_dir(folder).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.as_str()), (Some(0), ""), "{line}");
    let offered = String::from_utf8(output.stdout).unwrap();
    offered.lines().filter(|line| !line.is_empty()).map(str::to_string).collect()
}

#[test]
fn bash_completes_subcommands_options_keys_and_values() {
    let folder = generated();
    fs::write(folder.path().join("vm.sock"), "").unwrap();
    for (line, expected) in [
        ("ch-remote send", &["send-migration"][..]),
        ("ch-remote --api-socket x set-vf pf0 3 --max", &["--max-tx-rate"]),
        ("ch-remote set-vf pf0 3 --link ", &["auto", "up", "down"]),
        ("ch-remote set-vf pf0 3 --link d", &["down"]),
        ("ch-remote send-migration --w", &["--wait"]),
        ("ch-remote ping --api", &["--api-socket"]),
        ("ch-remote --api-socket vm", &["vm.sock"]),
        ("ch-remote --api-socket=vm", &["vm.sock"]),
        ("ch-remote add-net sriov", &["sriov_vfs="]),
        ("ch-remote add-net id=pf0,sriov", &["pf0,sriov_vfs="]),
        ("ch-remote add-net id=pf0 --vf index=0,spoof", &["0,spoofchk="]),
        ("ch-remote add-net offload_tso=o", &["on", "off"]),
        ("ch-remote create --kernel vm", &["vm.sock"]),
        ("ch-remote create --kernel k --net id=a id=b,sriov", &["b,sriov_vfs="]),
        ("cloud-hypervisor --ker", &["--kernel"]),
        ("cloud-hypervisor --net sriov", &["sriov_vfs="]),
        ("cloud-hypervisor --net id=a --net-vf pf=a,tru", &["a,trunk=", "a,trust="]),
        ("cloud-hypervisor --net id=a,trust=on,tru", &["on,trunk="]),
        ("cloud-hypervisor --disk path=vm", &["vm.sock"]),
        ("cloud-hypervisor --net id=a vhost=a", &["auto"]),
        ("cloud-hypervisor --watchdog --pv", &["--pvpanic"]),
        ("vfctl re", &["reset"]),
        ("vfctl reset --a", &["--all"]),
    ] {
        let command = line.split(' ').next().unwrap();
        assert_eq!(completed(folder.path(), command, line), expected, "{line}");
    }
    let all = completed(folder.path(), "ch-remote", "ch-remote ");
    assert!(["add-net", "vfs", "ping"].iter().all(|name| all.iter().any(|offered| offered == name)), "{all:?}");
}

#[test]
fn keys_are_lists_in_pages_and_the_synopsis_has_values() {
    let folder = generated();
    for page in fs::read_dir(folder.path().join("man")).unwrap() {
        let page = page.unwrap().path();
        let text = fs::read_to_string(&page).unwrap();
        for (line, next) in text.lines().zip(text.lines().skip(1)) {
            let is_key =
                next.starts_with("\\fB") && next.split_once("\\fR=").is_some_and(|(key, _)| !key.contains(' '));
            assert!(!is_key || line == ".TP", "{}: {line} {next}", page.display());
            assert!(!line.starts_with("        "), "{}: {line}", page.display());
        }
        assert_eq!(text.matches(".RS").count(), text.matches(".RE").count(), "{}", page.display());
    }
    let page = fs::read_to_string(folder.path().join("man/cloud-hypervisor.1")).unwrap();
    assert!(page.contains(".TP\n\\fBdeflate_on_oom\\fR=on|off\n"), "{page}");
    assert!(page.contains("[\\fB\\-\\-kernel\\fR \\fIpath\\fR]"), "the synopsis has values");
}

#[test]
fn completions_and_pages_name_every_option_and_subcommand() {
    let folder = generated();
    let read = |name: String| fs::read_to_string(folder.path().join(name)).unwrap();
    for command in COMMANDS {
        let name = command.rsplit('/').next().unwrap();
        let help = String::from_utf8(Command::new(command).arg("--help").output().unwrap().stdout).unwrap();
        // Examples and value descriptions may name options of the other command.
        let options = help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(|line| words(line, "--"));
        let options: Vec<_> = options.filter(|option| !option.ends_with('-')).collect();
        assert!(options.len() > 3, "{help}");
        let (bash, page) = (read(format!("completions/{name}.bash")), read(format!("man/{name}.1")));
        let title: Vec<_> = page.lines().skip_while(|line| !line.starts_with(".TH")).take(2).collect();
        assert!(title[0].matches('"').count() == 2 && title[1] == ".SH NAME", "{title:?}");
        for option in options {
            assert!(bash.contains(option), "{option} in completions of {name}");
            assert!(page.contains(&option.replace('-', "\\-")), "{option} in the page of {name}");
        }
    }
    for (subcommand, option) in [("add-net", "vf"), ("set-vf", "link"), ("vfs", "watch"), ("create", "kernel")] {
        let page = read(format!("man/ch-remote-{subcommand}.1"));
        assert!(page.contains(&format!("\\-\\-{option}")), "{subcommand}");
        assert!(read("completions/_ch-remote".to_string()).contains(subcommand));
    }
    for (subcommand, text) in [("set", "max_tx_rate"), ("reset", "\\-\\-all"), ("watch", "\\-\\-timeout")] {
        let page = read(format!("man/vfctl-{subcommand}.1"));
        assert!(page.contains(text), "{subcommand}: {page}");
        assert!(read("completions/_vfctl".to_string()).contains(subcommand));
    }
}
